// Running the model against the stored cases.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "golden/compare/limits.hpp"
#include "harness/result/result.hpp"
#include "model/config/numerics.hpp"

namespace lockstep::harness {

struct GoldenVerifyPlan {
  std::filesystem::path data;
  std::vector<std::string> cases;     ///< empty: all
  std::vector<std::string> policies;  ///< empty: float64, float32, hf-bf16 and hf-bf16/replay
  std::string device = "cpu";
};

/// What follows the name of a policy whose run takes the experts that a float64 run chose. A choice
/// is a step: in bfloat16 one that falls otherwise outweighs all roundings, here and in the
/// reference, so the sharp comparison of bfloat16 is the replayed one.
inline constexpr std::string_view kReplaySuffix = "/replay";

struct GoldenVerifyRow {
  std::string golden_case, policy, skipped;  ///< skipped: why; empty: it ran
  model::Width width = model::Width::kFloat64;
  std::vector<Comparison> comparisons;  ///< logits, logprobs, loss, grads, activations
};

struct GoldenVerifyResult {
  std::vector<GoldenVerifyRow> rows;
  /// Error over the worst of the reference's own runs in the same precision, all cases and tensors.
  golden::RatioSummary f32, bf16, bf16_replay;
  golden::RatioSummary f64;  ///< the error itself: its reference is 1
  [[nodiscard]] bool pass() const;
};

/// Cases of one policy in bfloat16 that have anything over its limit.
struct TiedCases {
  int64_t cases = 0, over = 0;
  double worst = 0;  ///< value / limit
  std::string worst_name;
  [[nodiscard]] bool pass() const {
    return over <= golden::tied_cases_allowed(cases) && worst <= golden::kTiedCaseExcess;
  }
};

/// By policy. Stored cases have to keep their limits. Of freshly made ones, whose near ties nobody
/// has looked at, as many may exceed a bfloat16 limit as of the reference's own runs.
std::map<std::string, TiedCases> tied_cases(const std::vector<GoldenVerifyResult>& fresh);

/// Whether freshly made goldens agree: all but the bfloat16 limits as GoldenVerifyResult::pass(),
/// those by tied_cases().
bool fresh_pass(const std::vector<GoldenVerifyResult>& fresh);

/// Throws kGolden when a file is missing or its hash differs, before anything runs.
void verify_hashes(const GoldenVerifyPlan& plan);

/// Runs every case in every policy with gradients and compares with the derived limits.
GoldenVerifyResult verify_goldens(const GoldenVerifyPlan& plan,
                                  const std::function<void(std::string_view)>& say);

}  // namespace lockstep::harness
