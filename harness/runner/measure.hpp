// One metric of one pair of tensors, with the place where they first differ.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "golden/compare/metrics.hpp"
#include "harness/runner/run_output.hpp"
#include "model/base/torch.hpp"

namespace lockstep::harness {

/// Value of a metric of harness/launch/schema.hpp. got and want: same shape. Throws kShape when the
/// shapes differ, kConfig when the metric does not exist.
double measure(std::string_view metric,
               const Tensor& got,
               const Tensor& want,
               std::string_view name);

/// Which row of a packed row an index is: " (document 2, position 17, rank 1)". Empty pieces are
/// left out where they are unknown or say nothing.
std::string place_of_row(int64_t row,
                         const std::vector<int64_t>& cu_seqlens,
                         const std::vector<RankRows>& rank_rows);

/// First element over what the metric and limit call different, in words; empty when bits are
/// equal. Without a limit, and where no single element stands out, the first element whose bits
/// differ.
std::string first_divergence(std::string_view metric,
                             std::optional<double> limit,
                             const Tensor& got,
                             const Tensor& want,
                             std::string_view name,
                             const std::vector<int64_t>& cu_seqlens,
                             const std::vector<RankRows>& rank_rows);

}  // namespace lockstep::harness
