#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "harness/cli/commands.hpp"
#include "harness/cli/errors.hpp"
#include "harness/launch/workload.hpp"
#include "harness/result/json_text.hpp"
#include "harness/runner/execute.hpp"
#include "harness/runner/step_plan.hpp"
#include "model/config/config_json.hpp"

namespace lockstep::harness {
namespace {

using Json = nlohmann::ordered_json;

struct Planned {
  std::string title, scenario, point, run, policy;
  StepPlanText step;
};

/// A preset by name, or a config file or folder.
model::ModelConfig config_of(const PlanOptions& options) {
  const std::vector<std::string> presets = model::preset_names();
  if (std::find(presets.begin(), presets.end(), options.config) != presets.end())
    return model::preset_config(options.config);
  LOCKSTEP_CHECK(std::filesystem::exists(options.config),
                 kInput,
                 "plan: --config {}: neither a file or folder nor a preset; presets are {}",
                 options.config,
                 fmt::join(presets, ", "));
  return model::load_config(options.config, parse_defaults(options.defaults));
}

void check_ranks(const PlanOptions& options, const std::string& what, const model::Topology& t) {
  LOCKSTEP_CHECK(options.ranks == 0 || t.num_ranks() <= options.ranks,
                 kMesh,
                 "plan: {}: topology {} needs {} ranks, --ranks says that there are {}; use "
                 "smaller degrees",
                 what,
                 model::to_string(t),
                 t.num_ranks(),
                 options.ranks);
}

StepPlanText describe(const PlanOptions& options, StepPlanInput input) {
  input.optimizer = parallel::parse_optimizer(options.optimizer);
  input.offload = parallel::parse_offload(options.offload);
  input.ranks_per_host = options.ranks_per_host;
  input.tflops = options.tflops;
  input.link = options.link;
  input.network = options.network;
  return describe_step(input);
}

/// The engine's ranks are the first of the trainer's, or follow them.
SyncSides sync_sides(const model::ModelConfig& config,
                     const model::Numerics& trainer,
                     const model::Numerics& engine,
                     const model::Topology& from,
                     const model::Topology& to,
                     bool colocated) {
  return {config,
          trainer,
          engine,
          from,
          to,
          consecutive_ranks(0, from.num_ranks()),
          consecutive_ranks(colocated ? 0 : from.num_ranks(), to.num_ranks())};
}

Planned plan_config(const PlanOptions& options) {
  const model::ModelConfig config = config_of(options);
  const model::Topology topology = model::parse_topology(options.topology);
  check_ranks(options, options.config, topology);
  RunSpec run;
  run.policy = options.policy;
  for (const std::string& text : options.numerics) {
    const size_t equals = text.find('=');
    LOCKSTEP_CHECK(equals != std::string::npos,
                   kInput,
                   "plan: --numerics {}: write SWITCH=VALUE, such as D61=tp",
                   text);
    add_numerics(run, text.substr(0, equals), text.substr(equals + 1));
  }
  for (const int64_t length : options.documents)
    LOCKSTEP_CHECK(length >= 0, kInput, "plan: --documents: a length of {} tokens", length);
  const model::Numerics num = numerics_of(run);
  Planned planned;
  planned.policy = num.name();
  planned.title =
      fmt::format("{}: {} ({})", options.config, num.name(), model::to_string(topology));
  std::optional<SyncSides> sync;
  if (options.engine_tp > 0) {
    constexpr int64_t kMostPairs = 8192;
    LOCKSTEP_CHECK(topology.num_ranks() <= kMostPairs / options.engine_tp,
                   kConfig,
                   "plan: a weight sync of {} x {} ranks: at most {} pairs are worked out; plan "
                   "fewer replicas, or leave out --engine-tp",
                   topology.num_ranks(),
                   options.engine_tp,
                   kMostPairs);
    RunSpec engine = run;
    engine.topology = {.tp = options.engine_tp};
    if (!options.engine_policy.empty()) {
      engine.policy = options.engine_policy;
      engine.numerics.clear();
    }
    check_topology(engine, config);
    sync =
        sync_sides(config, num, numerics_of(engine), topology, engine.topology, options.colocated);
  }
  planned.step = describe(options,
                          {.config = config,
                           .num = num,
                           .topology = topology,
                           .batch = Packing::of_lengths(options.documents),
                           .cp_cuts = options.cp_cuts,
                           .recompute = options.recompute,
                           .sync = sync});
  return planned;
}

void plan_scenario(const std::filesystem::path& file,
                   const PlanOptions& options,
                   std::vector<Planned>& list) {
  const ScenarioSet set = load_scenario(file, options.sets);
  for (const ScenarioPoint& point : set.points) {
    const model::ModelConfig config = resolve_config(point.scenario.model);
    const Packing batch = load_workload(point.scenario).documents.packing;
    for (const RunSpec& run : point.scenario.runs) {
      const std::string label = point.label();
      const std::string title = fmt::format(
          "{}{}: run {}", set.name, label.empty() ? "" : fmt::format(" ({})", label), run.name);
      check_ranks(options, title, run.topology);
      const model::Numerics num = numerics_of(run);
      std::optional<SyncSides> sync;
      for (const RunSpec& from : run.trainer)
        sync = sync_sides(config, numerics_of(from), num, from.topology, run.topology, true);
      try {
        list.push_back(
            {fmt::format("{}: {} ({})", title, num.name(), model::to_string(run.topology)),
             set.name,
             label,
             run.name,
             num.name(),
             describe(options,
                      {.config = config,
                       .num = num,
                       .topology = run.topology,
                       .batch = batch,
                       .cp_cuts = run.cp_cuts,
                       .recompute = run.recompute,
                       .sync = sync})});
        StepPlanText& step = list.back().step;
        if (!step.blocked.empty())
          step.blocked = fmt::format("scenario {}: {}", run.where, step.blocked);
      } catch (const Error& error) {
        throw Error(error.kind(), fmt::format("scenario {}: {}", run.where, error.what()));
      }
    }
  }
}

Json to_json(const Planned& planned) {
  Json out = {{"policy", planned.policy}};
  if (!planned.scenario.empty()) {
    out["scenario"] = planned.scenario;
    out["point"] = planned.point;
    out["run"] = planned.run;
  }
  out.update(Json::parse(planned.step.json));
  return out;
}

}  // namespace

int run_command_plan(const PlanOptions& options, const Context& context) {
  LOCKSTEP_CHECK(options.paths.empty() != options.config.empty(),
                 kInput,
                 "plan: name scenario files, or a model with --config, {}",
                 options.config.empty() ? "got neither" : "not both");
  std::vector<Planned> list;
  if (!options.config.empty()) list.push_back(plan_config(options));
  for (const std::filesystem::path& file : find_scenarios(options.paths))
    plan_scenario(file, options, list);
  if (context.json) {
    Json plans = Json::array();
    for (const Planned& planned : list) plans.push_back(to_json(planned));
    print(json_text(Json{{"plans", plans}}) + "\n");
  } else {
    for (const Planned& planned : list) {
      if (planned.step.blocked.empty()) print(planned.title + "\n" + planned.step.text);
    }
  }
  for (const Planned& planned : list) {
    if (planned.step.warning.empty()) continue;
    std::fputs(fmt::format("lockstep plan: warning: {}: {}\n", planned.title, planned.step.warning)
                   .c_str(),
               stderr);
  }
  const auto blocked = std::find_if(list.begin(), list.end(), [](const Planned& planned) {
    return !planned.step.blocked.empty();
  });
  if (blocked == list.end()) return 0;
  // Not thrown: the JSON above has the reason already and stays one object.
  const Failure failure{ErrorKind::kMesh, "plan: " + blocked->step.blocked};
  std::fputs(error_block(failure, "plan").c_str(), stderr);
  return exit_code(failure.kind);
}

}  // namespace lockstep::harness
