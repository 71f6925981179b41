#include "harness/attribute/attribute.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "harness/launch/workload.hpp"
#include "harness/runner/measure.hpp"
#include "model/base/error.hpp"
#include "model/base/same_bytes.hpp"

namespace lockstep::harness {
namespace {

using model::Numerics;
using model::Switch;
using model::switch_info;

/// 97.5% quantile of Student's t.
double student_t(size_t degrees) {
  constexpr std::array<double, 30> kTable = {
      12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
      2.201,  2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
      2.080,  2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042};
  return degrees <= kTable.size() ? kTable[degrees - 1]
                                  : 1.960 + 2.5 / static_cast<double>(degrees);
}

/// `run` with these switches as `values` has them.
RunSpec with_switches(RunSpec run, const std::vector<Switch>& switches, const Numerics& values) {
  for (const Switch s : switches) run.numerics.emplace_back(switch_info(s).id, values.value(s));
  return run;
}

/// `a` is the side that trains where only one does: mismatch_kl is not symmetric.
void measure_into(LogprobDistance& into,
                  const RunSpec& a_run,
                  const RunOutput& a,
                  const RunSpec& b_run,
                  const RunOutput& b) {
  const bool swapped = a_run.engine != "trainer" && b_run.engine == "trainer";
  const Tensor& train = swapped ? b.logprobs : a.logprobs;
  const Tensor& infer = swapped ? a.logprobs : b.logprobs;
  into.mismatch_kl.values.push_back(measure("mismatch_kl", train, infer, "logprobs"));
  into.max_logprob.values.push_back(measure("max_abs", train, infer, "logprobs"));
}

/// Errors of traced outputs that both have, in the order of `want`.
std::vector<double> layer_errors(const RunOutput& got, const RunOutput& want) {
  std::vector<double> errors;
  for (size_t i = 0; i < want.trace.size(); ++i) {
    LOCKSTEP_CHECK(i < got.trace.size() && got.trace[i].first == want.trace[i].first,
                   kInternal,
                   "attribute: runs of one engine traced different modules, {} on one side",
                   want.trace[i].first);
    errors.push_back(
        measure("rel_l2", got.trace[i].second, want.trace[i].second, want.trace[i].first));
  }
  return errors;
}

/// Every run of an attribution, told to somebody.
class Runs {
 public:
  Runs(const Evaluate& evaluate, const AttributeStep& progress, int64_t total)
      : evaluate_(evaluate), progress_(progress), total_(total) {}
  RunOutput operator()(const RunSpec& run, int64_t seed, const std::string& what) {
    if (progress_) progress_(done_, total_, what);
    ++done_;
    return evaluate_(run, seed);
  }
  [[nodiscard]] int64_t done() const { return done_; }
  void skip(int64_t runs) { done_ += runs; }
  void expect(int64_t total) { total_ = total; }

 private:
  const Evaluate& evaluate_;
  const AttributeStep& progress_;
  int64_t done_ = 0, total_;
};

double sum_of_costs(const Attribution& all, size_t seed) {
  double sum = all.same.mismatch_kl.values[seed];
  for (const SwitchCost& c : all.costs) {
    if (c.refused.empty()) sum += c.cost.values[seed];
  }
  return sum;
}

double mean_distance(const Tensor& got, const Tensor& want) {
  const Tensor apart = got.to(at::kDouble).sub(want.to(at::kDouble)).abs();
  const Tensor counted = apart.masked_select(got.isnan().logical_and(want.isnan()).logical_not());
  if (counted.numel() == 0) return 0;
  const double mean = counted.mean().item<double>();
  return std::isnan(mean) ? std::numeric_limits<double>::infinity() : mean;
}

}  // namespace

double Spread::mean() const {
  double sum = 0;
  for (const double value : values) sum += value;
  return values.empty() ? 0 : sum / static_cast<double>(values.size());
}

double Spread::half_width() const {
  if (values.size() < 2) return std::numeric_limits<double>::quiet_NaN();
  const double center = mean();
  double squares = 0;
  for (const double value : values) squares += (value - center) * (value - center);
  const auto n = static_cast<double>(values.size());
  return student_t(values.size() - 1) * std::sqrt(squares / (n - 1) / n);
}

bool Spread::is_clear() const { return values.size() > 1 && std::abs(mean()) > half_width(); }

Attribution attribute(const RunSpec& from,
                      const RunSpec& to,
                      int64_t seeds,
                      const Evaluate& evaluate,
                      const AttributeStep& progress) {
  const Numerics ours = numerics_of(from), theirs = numerics_of(to);
  std::vector<Switch> differing = theirs.differences(ours);
  std::erase(differing, Switch::kExpertReplay);  // what a run is given, not what it rounds
  LOCKSTEP_CHECK(!differing.empty(),
                 kConfig,
                 "attribute: {} and {} have the same value for every numerics switch; give runs or "
                 "policies that differ with --from and --to",
                 from.name,
                 to.name);
  Attribution all;
  all.from = from;
  all.to = to;
  all.seeds = seeds;
  for (const Switch s : differing) {
    SwitchCost cost;
    cost.id = s;
    cost.from = ours.value(s);
    cost.to = theirs.value(s);
    all.costs.push_back(std::move(cost));
  }
  const auto n = static_cast<int64_t>(differing.size());
  Runs run(evaluate, progress, seeds * (3 + 3 * n));
  const RunSpec equal = with_switches(to, differing, ours);

  std::vector<RunOutput> references;
  for (int64_t seed = 0; seed < seeds; ++seed) {
    references.push_back(run(from, seed, from.name));
    const RunOutput& reference = references.back();
    all.tokens = reference.tokens;
    const RunOutput base = run(equal, seed, fmt::format("{}, switches of {}", to.name, from.name));
    measure_into(all.same, from, reference, to, base);
    const RunOutput full = run(to, seed, to.name);
    measure_into(all.whole, from, reference, to, full);
    if (all.layer_names.empty()) {
      for (const auto& [name, value] : base.trace) all.layer_names.push_back(name);
    }
    for (SwitchCost& c : all.costs) {
      c.inert = seed == 0 || c.inert;
      if (!c.refused.empty()) {
        run.skip(2);
        continue;
      }
      const std::string id(switch_info(c.id).id);
      try {
        const RunOutput alone = run(with_switches(equal, {c.id}, theirs), seed, id + " alone");
        measure_into(c.alone, from, reference, to, alone);
        c.inert = c.inert && same_bytes(alone.logits, base.logits);
        const std::vector<double> errors = layer_errors(alone, base);
        c.layers.resize(errors.size());
        for (size_t l = 0; l < errors.size(); ++l)
          c.layers[l] += errors[l] / static_cast<double>(seeds);
        const RunOutput without = run(with_switches(to, {c.id}, ours), seed, "all but " + id);
        measure_into(c.without, from, reference, to, without);
      } catch (const Error& error) {
        // Only what every seed and rank finds: a combination that the engine does not have.
        if (error.kind() != ErrorKind::kConfig || seed > 0) throw;
        c.refused = error.what();
        continue;
      }
      c.cost.values.push_back(c.alone.mismatch_kl.values.back() -
                              all.same.mismatch_kl.values.back());
      c.saved.values.push_back(all.whole.mismatch_kl.values.back() -
                               c.without.mismatch_kl.values.back());
    }
  }
  std::stable_sort(all.costs.begin(), all.costs.end(), [](const auto& a, const auto& b) {
    if (a.refused.empty() != b.refused.empty()) return a.refused.empty();
    return a.cost.mean() > b.cost.mean();
  });
  std::vector<Switch> taken;
  for (SwitchCost& c : all.costs) {
    taken.push_back(c.id);
    if (!c.refused.empty()) continue;
    for (int64_t seed = 0; seed < seeds; ++seed) {
      const RunOutput some =
          run(with_switches(equal, taken, theirs), seed, fmt::format("the first {}", taken.size()));
      measure_into(c.cumulative, from, references[static_cast<size_t>(seed)], to, some);
    }
  }
  for (int64_t seed = 0; seed < seeds; ++seed)
    all.parts.values.push_back(sum_of_costs(all, static_cast<size_t>(seed)));
  return all;
}

namespace {

/// Values that some numerics do not have: of each switch all but one.
int64_t num_other_values() {
  int64_t values = 0;
  for (const model::SwitchInfo& row : model::kSwitches)
    values += static_cast<int64_t>(row.num_values()) - 1;
  return values;
}

/// One policy's search, from a run already made.
Explanation search(
    RunSpec at, Tensor here, double start, const Tensor& logprobs, int64_t most, Runs& run) {
  Explanation result;
  result.policy = at.policy;
  result.start = result.end = start;
  while (result.end > 0 && static_cast<int64_t>(result.found.size()) < most) {
    run.expect(run.done() + num_other_values());
    const Numerics now = numerics_of(at);
    struct Try {
      Candidate candidate;
      Tensor logprobs;
    };
    std::vector<Try> tried;
    for (size_t s = 0; s < model::kNumSwitches; ++s) {
      const model::SwitchInfo& row = model::kSwitches[s];
      for (size_t v = 0; v < row.num_values(); ++v) {
        if (now.value(static_cast<Switch>(s)) == row.values[v]) continue;
        RunSpec next = at;
        next.numerics.emplace_back(row.id, row.values[v]);
        Tensor output;
        try {
          output =
              run(next, 0, fmt::format("{}, {} = {}", at.policy, row.id, row.values[v])).logprobs;
        } catch (const Error& error) {
          if (error.kind() != ErrorKind::kConfig) throw;
          continue;  // the engine does not have this value
        }
        if (same_bytes(output, here)) continue;
        tried.push_back({{static_cast<Switch>(s),
                          std::string(row.values[v]),
                          mean_distance(output, logprobs),
                          {}},
                         output});
      }
    }
    std::stable_sort(tried.begin(), tried.end(), [](const Try& a, const Try& b) {
      return a.candidate.distance < b.candidate.distance;
    });
    result.others.clear();
    for (const Try& t : tried) result.others.push_back(t.candidate);
    if (tried.empty() || tried.front().candidate.distance > 0.9 * result.end) break;
    Candidate best = tried.front().candidate;
    for (size_t i = 1; i < tried.size() && tried[i].candidate.distance == best.distance; ++i) {
      const Candidate& tie = tried[i].candidate;
      best.ties.push_back(fmt::format("{} = {}", switch_info(tie.id).id, tie.value));
    }
    result.end = best.distance;
    here = tried.front().logprobs;
    at.numerics.emplace_back(switch_info(best.id).id, best.value);
    result.found.push_back(std::move(best));
  }
  return result;
}

}  // namespace

Explanation explain(const RunSpec& from,
                    const std::vector<std::string>& policies,
                    const Tensor& logprobs,
                    int64_t most,
                    const Evaluate& evaluate,
                    const AttributeStep& progress) {
  struct Start {
    RunSpec run;
    Tensor logprobs;
    double distance;
  };
  Runs run(evaluate, progress, static_cast<int64_t>(policies.size()));
  std::vector<Start> starts;
  for (const std::string& policy : policies) {
    RunSpec start = from;
    start.policy = policy;
    const RunOutput output = run(start, 0, policy);
    LOCKSTEP_CHECK(output.logprobs.sizes() == logprobs.sizes(),
                   kInput,
                   "attribute: the log-probabilities to explain are {}, the documents of the "
                   "scenario give {}; dump those of the same documents, NaN at the last token of "
                   "each",
                   describe(logprobs),
                   describe(output.logprobs));
    starts.push_back({start, output.logprobs, mean_distance(output.logprobs, logprobs)});
  }
  std::stable_sort(starts.begin(), starts.end(), [](const Start& a, const Start& b) {
    return a.distance < b.distance;
  });
  Explanation best;
  best.end = std::numeric_limits<double>::infinity();
  for (const Start& start : starts) {
    Explanation found = search(start.run, start.logprobs, start.distance, logprobs, most, run);
    if (found.end < best.end) best = std::move(found);
    if (best.end == 0) break;
  }
  best.evaluated = run.done();
  return best;
}

}  // namespace lockstep::harness
