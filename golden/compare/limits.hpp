// Limits derived from what the reference itself achieves, so that no tolerance is a guess.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/base/error.hpp"

namespace lockstep::golden {

/// Relative L2 error allowed in float64. Two orders of the hidden channels differ by 4e-15 in
/// logits and 3e-14 in the worst gradient; 1e-9 leaves room for another algorithm and none for an
/// error.
double limit_f64();

/// Twice the worst of the reference's own float32 errors against float64. Throws kGolden on none.
double limit_f32(const std::vector<double>& reference_errors);

/// 1.25 times the worst of the reference's own bfloat16 errors against float64.
double limit_bf16(const std::vector<double>& reference_errors);

/// What an estimate from `num_projections` projections may exceed its limit by: four of its
/// standard deviations. 1.35 for 64.
double sketch_slack(int64_t num_projections);

/// What one more run, as good as the reference's five, may exceed a limit by, because the error of
/// a tensor of few elements has few degrees of freedom and the worst of five of them may be small
/// by luck. Measured, not modelled (golden/make/spread_study.py, figures in docs/golden.md): half
/// the ratio to the worst of five that one run in 10,000 exceeds. 3 for a scalar, 1 for large
/// tensors.
double few_runs_slack(int64_t num_elements);

/// How many of `num_cases` freshly made cases may have a tensor over its bfloat16 limit. A choice
/// of pools or experts may nearly tie in a case that nobody has looked at; where it falls
/// otherwise, many tensors leave the five runs behind. In the reference's own runs of its most
/// tie-prone case 4.5% do that (docs/golden.md), so this is what a binomial of that rate exceeds in
/// one of 1000.
int64_t tied_cases_allowed(int64_t num_cases);

/// How far over the limit such a case may be: a run of the reference in 1000 is further.
inline constexpr double kTiedCaseExcess = 3.2;

/// One comparison's error beside the reference's.
struct RatioRow {
  std::string name;
  double error = 0.0;      ///< ours against float64
  double reference = 0.0;  ///< worst of the reference's own runs
};

struct RatioSummary {
  int64_t num_rows = 0;
  double median = 0.0, worst = 0.0;  ///< of error / reference
  std::string worst_name;
};

/// Over all cases and tensors; rows with an exact reference (0) count only when ours is not exact,
/// and are then infinite.
RatioSummary summarize_ratios(const std::vector<RatioRow>& rows);

/// The median of bfloat16 ratios over all cases may be at most this.
inline constexpr double kMedianRatioLimit = 1.1;

}  // namespace lockstep::golden
