// Comparing what two runs computed, or a run with a stored reference.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "golden/store/golden_case.hpp"
#include "harness/launch/scenario.hpp"
#include "harness/result/result.hpp"
#include "harness/runner/run_output.hpp"

namespace lockstep::harness {

/// One side of a comparison: a run or a stored case, whichever pointer is set.
struct Side {
  std::string name;
  const RunSpec* spec = nullptr;
  const RunOutput* run = nullptr;
  const golden::GoldenCase* stored = nullptr;
};

/// Carries out one [[compare]]: value, limit, verdict, the value seen by each rank, the first place
/// where the sides differ, and for grads and trace a detail per tensor in model order, gradients in
/// backward order. The worst tensor is judged; the first divergence is the first one over its
/// limit. Never throws for numbers that differ; an impossible comparison (other shapes, nothing
/// matched) becomes Status::kError with its reason.
Comparison compare_sides(const CompareSpec& spec, const Side& left, const Side& right);

/// Charts of the same pair: error of logits or logprobs by position inside the document, error of
/// traced layers by layer. `legend` names the pair.
std::vector<Series> error_series(const CompareSpec& spec,
                                 const Side& left,
                                 const Side& right,
                                 const std::string& legend);

/// Limit that follows from the spread stored with a case: exactness for float64, twice the
/// reference's own float32 error, 1.25 times the worst of its bfloat16 runs. Empty when the case
/// stores no spread for it. `subject` is "logits", "grads/NAME", "activations/NAME".
std::optional<double> golden_limit(const golden::GoldenCase& stored,
                                   const RunSpec& run,
                                   const std::string& subject);

}  // namespace lockstep::harness
