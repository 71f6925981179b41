// Rows picked by index, with a gradient whose summation order is fixed.
#pragma once

#include "model/base/torch.hpp"

namespace lockstep::model {

/// y[r] = x[index[r]]. x [T, D] any float dtype, index [R] int64 in [0, T); returns [R, D].
/// Backward adds the rows of each source in ascending r, in float32 (float64 for float64) with one
/// rounding. Cost O(R D).
Tensor take_rows(const Tensor& x, const Tensor& index);

}  // namespace lockstep::model
