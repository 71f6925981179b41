// Which numerics switch makes how much of the distance between two runs, and which switches explain
// a result whose numerics nobody knows.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "harness/launch/scenario.hpp"
#include "harness/runner/run_output.hpp"
#include "model/config/numerics.hpp"

namespace lockstep::harness {

/// Computes a run on the tokens (and, for weights by formula, the weights) of one seed. Throws like
/// execute_run.
using Evaluate = std::function<RunOutput(const RunSpec& run, int64_t seed)>;
using AttributeStep = std::function<void(int64_t done, int64_t total, const std::string& what)>;

/// One number, measured once for each seed.
struct Spread {
  std::vector<double> values;
  [[nodiscard]] double mean() const;
  /// Of the 95% confidence interval of the mean, by Student's t; NaN for fewer than two seeds.
  [[nodiscard]] double half_width() const;
  /// The interval lies on one side of 0, or all values are the same and not 0.
  [[nodiscard]] bool is_clear() const;
};

/// Log-probabilities of two runs on the same tokens.
struct LogprobDistance {
  Spread mismatch_kl;  ///< mean of exp(l) - l - 1, nat
  Spread max_logprob;  ///< largest absolute difference, nat
};

struct SwitchCost {
  model::Switch id{};
  std::string from, to;        ///< values on the two sides
  LogprobDistance alone;       ///< between the sides when this switch alone differs
  LogprobDistance without;     ///< when every switch but this one differs
  LogprobDistance cumulative;  ///< when this one and those before it in the ranking differ
  Spread cost;                 ///< mismatch_kl alone, less that of equal switches on the same seed
  Spread saved;                ///< mismatch_kl of all, less that without this one
  std::vector<double> layers;  ///< relative L2 error it alone makes, by layer_names, mean of seeds
  bool inert = false;          ///< alone it changes no byte of any logit
  std::string refused;         ///< why the engine does not run with this switch alone
};

struct Attribution {
  RunSpec from, to;
  int64_t seeds = 0, tokens = 0;  ///< tokens of one seed
  LogprobDistance same;           ///< all switches equal: the two programs themselves
  LogprobDistance whole;          ///< as the runs are
  std::vector<std::string> layer_names;
  std::vector<SwitchCost> costs;  ///< by mean cost, largest first; equal ones in table order
  Spread parts;                   ///< same + the costs of all switches, to be held against `whole`
};

/// Runs `from` as it is, and `to` with its switches set to those of `from`, to its own one at a
/// time, all but one at a time, and cumulatively in the order of their cost. Widths that differ
/// (float32, bfloat16) are part of `same`. Throws kConfig where no switch differs, and what
/// Evaluate throws, except that a switch refused alone is recorded.
Attribution attribute(const RunSpec& from,
                      const RunSpec& to,
                      int64_t seeds,
                      const Evaluate& evaluate,
                      const AttributeStep& progress);

/// One switch value tried on top of what is already known.
struct Candidate {
  model::Switch id{};
  std::string value;
  double distance = 0;            ///< mean absolute difference of log-probabilities, nat
  std::vector<std::string> ties;  ///< of a found one: "D05 = tf32", values equally near
};

struct Explanation {
  std::string policy;             ///< where the search started
  double start = 0, end = 0;      ///< distance of the policy, and with what was found
  std::vector<Candidate> found;   ///< each together with those before it
  std::vector<Candidate> others;  ///< of the last round, nearest first, without effectless ones
  int64_t evaluated = 0;          ///< runs made
};

/// The policy and switches that come nearest to log-probabilities [T] of somebody else's program on
/// the same tokens. From each policy, the nearest first: one switch value after another, each time
/// the one that comes nearest, as long as it takes at least a tenth off the distance and at most
/// `most`; ends at distance 0. With roundings the experts of a token may change, which hides how
/// near a value is until all are right: several unknown switches at once may not be found. Seed 0
/// of Evaluate. Throws kInput for log-probabilities of another length.
Explanation explain(const RunSpec& from,
                    const std::vector<std::string>& policies,
                    const Tensor& logprobs,
                    int64_t most,
                    const Evaluate& evaluate,
                    const AttributeStep& progress);

}  // namespace lockstep::harness
