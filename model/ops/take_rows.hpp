// Rows by index, with sums over repeated rows in a fixed order on every device.
#pragma once

#include "model/base/torch.hpp"

namespace lockstep::model {

/// to[index[i]] += rows[i] for all i, ascending. to [N, ...]; index [M] int64 in [0, N), on the
/// same device; rows [M, ...] of the same dtype.
void add_rows(const Tensor& to, const Tensor& index, const Tensor& rows);

/// x.index_select(0, index), whose gradient is formed by add_rows in `sum_dtype` and rounded once.
Tensor take_rows(const Tensor& x, const Tensor& index, at::ScalarType sum_dtype);

}  // namespace lockstep::model
