#include "harness/attribute/attribute.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <map>

#include "harness/attribute/attribution_report.hpp"
#include "harness/cli/begin_report.hpp"
#include "harness/cli/commands.hpp"
#include "harness/cli/ranks.hpp"
#include "harness/launch/available.hpp"
#include "harness/launch/mpi_start.hpp"
#include "harness/launch/workload.hpp"
#include "harness/runner/execute.hpp"
#include "harness/runner/progress.hpp"
#include "harness/runner/tensor_file.hpp"
#include "reports/writer/writer.hpp"

namespace lockstep::harness {
namespace {

/// Outputs of layers and the final norm.
constexpr const char* kLayerTrace = "layers.?,layers.??,layers.???,norm";

std::string known_sides(const Scenario& scenario) {
  std::vector<std::string> runs;
  for (const RunSpec& run : scenario.runs) runs.push_back(run.name);
  return fmt::format("runs of {} are {}; policies are {}",
                     scenario.file.string(),
                     fmt::join(runs, ", "),
                     fmt::join(model::Numerics::policy_names(), ", "));
}

/// A run of the scenario, or one of that policy by the engine it describes.
RunSpec side(const Scenario& scenario, const std::string& name, std::string_view option) {
  RunSpec run;
  if (const RunSpec* found = scenario.find_run(name)) {
    run = *found;
  } else {
    const std::vector<std::string> policies = model::Numerics::policy_names();
    LOCKSTEP_CHECK(std::find(policies.begin(), policies.end(), name) != policies.end(),
                   kInput,
                   "attribute: {} {}: neither a run nor a policy; {}",
                   option,
                   name,
                   known_sides(scenario));
    run.name = run.policy = name;
    run.engine = name.starts_with("vllm-") ? "inference" : "trainer";
  }
  run.grads = false;
  run.trace.clear();
  return run;
}

struct Sides {
  RunSpec from, to;
};

Sides sides_of(const Scenario& scenario, const AttributeOptions& options) {
  std::string from = options.from, to = options.to;
  if (from.empty() || (to.empty() && options.dump.empty())) {
    std::string left, right;
    for (const CompareSpec& compare : scenario.compares) {
      if (scenario.find_run(compare.left) == nullptr || scenario.find_run(compare.right) == nullptr)
        continue;
      left = compare.left;
      right = compare.right;
      break;
    }
    LOCKSTEP_CHECK(!left.empty() || !options.dump.empty(),
                   kInput,
                   "attribute: no comparison of {} has runs on both sides; name them with --from "
                   "and --to; {}",
                   scenario.file.string(),
                   known_sides(scenario));
    if (!left.empty()) {
      // Held still: what the other takes its experts from, the trainer of a pair, the right side.
      const RunSpec &l = *scenario.find_run(left), &r = *scenario.find_run(right);
      const bool left_trains = l.engine == "trainer" && r.engine != "trainer";
      if (left_trains ? l.replay == right : r.replay != left) std::swap(left, right);
    }
    if (from.empty()) from = left == to ? right : left;
    if (to.empty()) to = from == right ? left : right;
  }
  Sides sides;
  if (!from.empty()) sides.from = side(scenario, from, "--from");
  if (options.dump.empty()) {
    sides.to = side(scenario, to, "--to");
    sides.to.trace = kLayerTrace;
  }
  return sides;
}

/// Workloads of all runs, each made once.
class Bench {
 public:
  Bench(const Scenario& scenario, const parallel::Session& session)
      : scenario_(scenario), session_(session) {}

  RunOutput operator()(const RunSpec& run, int64_t seed) {
    return execute_run_for_all(run, workload(seed), session_.world(), choice(run.replay, seed));
  }

 private:
  const std::vector<Tensor>& choice(const std::string& replayed, int64_t seed) {
    static const std::vector<Tensor> own;
    if (replayed.empty()) return own;
    const auto known = choices_.find(seed);
    if (known != choices_.end()) return known->second;
    RunSpec run = *scenario_.find_run(replayed);
    run.trace = kExpertsTrace;
    run.grads = false;
    const Workload& work = workload(seed);
    return choices_
        .emplace(
            seed,
            expert_choice(execute_run_for_all(run, work, session_.world()), work.source->config()))
        .first->second;
  }
  const Workload& workload(int64_t seed) {
    const auto known = workloads_.find(seed);
    if (known != workloads_.end()) return known->second;
    Scenario scenario = scenario_;
    scenario.data.seed += static_cast<uint64_t>(seed);
    if (!scenario.model.preset.empty()) scenario.model.seed += static_cast<uint64_t>(seed);
    Workload work = load_workload(scenario);
    if (seed > 0 && scenario.data.documents.empty()) {
      const model::ModelConfig& config = work.source->config();
      std::vector<int64_t> lengths;
      const std::vector<int64_t>& cu = work.documents.packing.cu_seqlens();
      for (size_t d = 0; d + 1 < cu.size(); ++d) lengths.push_back(cu[d + 1] - cu[d]);
      work.documents = random_documents(lengths,
                                        config.vocab_size,
                                        config.pad_token_id.value_or(-1),
                                        static_cast<uint64_t>(seed));
    }
    return workloads_.emplace(seed, std::move(work)).first->second;
  }

  const Scenario& scenario_;
  const parallel::Session& session_;
  std::map<int64_t, Workload> workloads_;
  std::map<int64_t, std::vector<Tensor>> choices_;  ///< one side at most replays
};

int64_t ranks_of(const Sides& sides) {
  LOCKSTEP_CHECK(
      sides.from.replay.empty() && (sides.to.replay.empty() || sides.to.replay == sides.from.name),
      kConfig,
      "attribute: {} replays the experts of {}; where a side replays, that is --to, and "
      "--from is the run it takes them from",
      sides.from.replay.empty() ? sides.to.name : sides.from.name,
      sides.from.replay.empty() ? sides.to.replay : sides.from.replay);
  return std::max(sides.from.num_ranks(), sides.to.num_ranks());
}

Tensor dumped_logprobs(const std::filesystem::path& file) {
  const auto tensors = open_tensor_file(file);
  const std::vector<std::string> names = tensors->names();
  LOCKSTEP_CHECK(
      std::find(names.begin(), names.end(), "logprobs") != names.end(),
      kInput,
      "attribute: --dump {}: has no tensor `logprobs`, [tokens] of each next token; it "
      "has {}",
      file.string(),
      fmt::join(names.begin(), names.begin() + std::min<ptrdiff_t>(5, std::ssize(names)), ", "));
  return tensors->load("logprobs");
}

int explain_dump(const AttributeOptions& options,
                 const Context& context,
                 const Sides& sides,
                 Bench& bench,
                 const AttributeStep& step) {
  std::vector<std::string> policies = {sides.from.policy};
  // Whose program made it is unknown too, unless --from says it.
  if (options.from.empty()) policies = model::Numerics::policy_names();
  const Explanation found = explain(
      sides.from,
      policies,
      dumped_logprobs(options.dump),
      options.most,
      [&](const RunSpec& run, int64_t seed) { return bench(run, seed); },
      step);
  if (context.json) {
    print(json_of(found) + "\n");
  } else {
    print(text_of(found));
  }
  return 0;
}

int attribute_runs(const AttributeOptions& options,
                   const Context& context,
                   const Scenario& scenario,
                   const Sides& sides,
                   Bench& bench,
                   bool first,
                   const AttributeStep& step) {
  const auto start = std::chrono::steady_clock::now();
  Report report = begin_report(context);
  const Attribution all = attribute(
      sides.from,
      sides.to,
      options.seeds,
      [&](const RunSpec& run, int64_t seed) { return bench(run, seed); },
      step);
  if (!first) return 0;
  report.title = scenario.name + ": attribution";
  report.seed = scenario.model.seed;
  report.scenarios.push_back(result_of(all, scenario.name));
  report.scenarios.back().file = scenario.file.string();
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  report.scenarios.back().seconds = report.seconds;
  conclude(report);
  reports::write(report, options.out);
  if (context.json) {
    print(json_of(all) + "\n");
  } else {
    print(fmt::format("{}report: {}\n", text_of(all), (options.out / "report.html").string()));
  }
  return 0;
}

}  // namespace

int run_command_attribute(const AttributeOptions& options, const Context& context) {
  parallel::set_comm_timeout_ms(options.comm_timeout_ms);
  const ScenarioSet set = load_scenario(options.scenario, options.sets);
  const Scenario& scenario = set.points.front().scenario;
  const Sides sides = sides_of(scenario, options);
  const int64_t ranks = ranks_of(sides);
  for (const RunSpec* run : {&sides.from, &sides.to})
    check_topology(*run, resolve_config(scenario.model));
  if (!under_mpi_launcher()) check_hang_rank(ranks);
  if (ranks > 1 && !under_mpi_launcher()) return start_own_ranks(ranks, context);
  return on_ranks(context, "attribute", [&](const parallel::Session& session) {
    LOCKSTEP_CHECK(ranks == 1 || session.world().size() == ranks,
                   kMesh,
                   "attribute: these runs need {} ranks, this mpirun has {}; start with mpirun -n "
                   "{}, or without mpirun",
                   ranks,
                   session.world().size(),
                   ranks);
    const bool first = session.world().rank() == 0;
    if (first && options.dump.empty()) check_writable(options.out, "attribute");
    Progress progress(context.quiet || !first ? Progress::Mode::kQuiet : Progress::Mode::kAuto);
    progress.start("attribute");
    const AttributeStep step = [&](int64_t done, int64_t total, const std::string& what) {
      progress.step(done, total, what);
    };
    Bench bench(scenario, session);
    const int code = options.dump.empty()
                         ? attribute_runs(options, context, scenario, sides, bench, first, step)
                         : explain_dump(options, context, sides, bench, step);
    progress.clear();
    return code;
  });
}

}  // namespace lockstep::harness
