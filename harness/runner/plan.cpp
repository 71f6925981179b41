#include "harness/runner/plan.hpp"

#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "golden/store/golden_case.hpp"
#include "harness/launch/paths.hpp"
#include "harness/launch/workload.hpp"
#include "harness/result/json_text.hpp"
#include "harness/result/result.hpp"
#include "harness/runner/execute.hpp"
#include "model/checkpoint/parameters.hpp"
#include "parallel/plan/token_plan.hpp"

namespace lockstep::harness {

namespace {

/// The weights of a preset are made in memory.
void check_memory(const ModelSpec& spec, const RunSpec& run, const model::ModelConfig& config) {
  if (spec.preset.empty()) return;
  double bytes = 0;
  for (const model::Parameter& p : model::expected_parameters(config)) {
    double elements = 1;  // in floating point: a wrong size may leave 64 bits
    for (const int64_t size : p.shape) elements *= static_cast<double>(size);
    bytes += 4 * elements;
  }
  const double ranks = static_cast<double>(run.topology.num_ranks()),
               memory = static_cast<double>(sysconf(_SC_PHYS_PAGES)) *
                        static_cast<double>(sysconf(_SC_PAGESIZE)),
               gib = 1 << 30;
  std::string overrides;
  for (const auto& [key, value] : spec.overrides)
    overrides += fmt::format("{}{} = {}", overrides.empty() ? "" : ", ", key, value);
  LOCKSTEP_CHECK(
      memory <= 0 || bytes / ranks <= memory,
      kConfig,
      "scenario {}: [model] preset = \"{}\"{}: the weights need {:.1f} GiB on each rank of "
      "run {}, this machine has {:.1f} GiB; use smaller sizes or more ranks",
      spec.where,
      spec.preset,
      overrides.empty() ? "" : fmt::format(", overrides = {{ {} }}", overrides),
      bytes / ranks / gib,
      run.name,
      memory / gib);
}

/// Whether the topology takes the model and its cuts the batch.
void check_run(const RunSpec& run, const model::ModelConfig& config, const Packing& batch) {
  try {
    check_topology(run, config);
    (void)parallel::plan_row(run.topology, 0, batch, run.cp_cuts, numerics_of(run).invariant());
  } catch (const Error& error) {
    fail(error.kind(),
         "scenario {}: run.{}{}: {}",
         run.where,
         run.name,
         run.cp_cuts.empty() ? "" : fmt::format(".cp_cuts = [{}]", fmt::join(run.cp_cuts, ", ")),
         error.what());
  }
}

}  // namespace

void check_scenario(const ScenarioSet& set, const parallel::Session& session) {
  std::vector<std::string> verified;
  for (const ScenarioPoint& point : set.points) {
    const Scenario& scenario = point.scenario;
    const model::ModelConfig config = resolve_config(scenario.model);
    for (const RunSpec& run : scenario.runs) check_memory(scenario.model, run, config);
    const Packing batch = load_workload(scenario).documents.packing;
    for (const RunSpec& run : scenario.runs) check_run(run, config, batch);
    for (const CompareSpec& compare : scenario.compares) {
      for (const std::string* side : {&compare.left, &compare.right}) {
        const auto ref = parse_golden_ref(*side, scenario.model);
        if (!ref) continue;
        LOCKSTEP_CHECK(
            ref->reference == "f64",
            kGolden,
            "scenario {}: '{}': cases store the reference f64 (and the spread of f32 and "
            "bf16, which limit = \"golden\" uses)",
            compare.where,
            *side);
        if (std::find(verified.begin(), verified.end(), ref->golden_case) != verified.end())
          continue;
        try {
          golden::open_golden(golden_folder(), ref->golden_case);
        } catch (const Error& error) {
          fail(error.kind(), "scenario {}: {}: {}", compare.where, *side, error.what());
        }
        verified.push_back(ref->golden_case);
      }
    }
    for (const RunSpec& run : scenario.runs) {
      const int64_t need = run.num_ranks(), have = session.world().size();
      LOCKSTEP_CHECK(!session.under_mpi() || need <= have,
                     kMesh,
                     "scenario {}: run {} needs {} ranks ({}) and this mpirun has {}; start with "
                     "mpirun -n {}, or without mpirun",
                     run.where,
                     run.name,
                     need,
                     model::to_string(run.topology),
                     have,
                     need);
    }
  }
}

namespace {

using Json = nlohmann::ordered_json;

std::string model_text(const ModelSpec& model) {
  return !model.preset.empty()       ? "preset " + model.preset
         : !model.checkpoint.empty() ? model.checkpoint.string()
                                     : "golden " + model.golden;
}

Json model_json(const ModelSpec& model, const model::ModelConfig& config) {
  Json out;
  if (!model.preset.empty()) out["preset"] = model.preset;
  if (!model.checkpoint.empty()) out["checkpoint"] = model.checkpoint.string();
  if (!model.golden.empty()) out["golden"] = model.golden;
  out["num_hidden_layers"] = config.num_hidden_layers;
  out["hidden_size"] = config.hidden_size;
  out["vocab_size"] = config.vocab_size;
  return out;
}

Json data_json(const DataSpec& data) {
  if (!data.file.empty()) return {{"file", data.file.string()}};
  if (!data.documents.empty()) return {{"documents", data.documents}, {"seed", data.seed}};
  return nullptr;
}

/// Where the ranks of a run come from.
std::string_view place_of(const RunSpec& run, const parallel::Session& session) {
  return run.num_ranks() == 1 ? "process" : session.under_mpi() ? "this mpirun" : "mpirun";
}

Json run_json(const RunSpec& run, const parallel::Session& session) {
  Json numerics = Json::object();
  for (const auto& [id, value] : run.numerics) numerics[id] = value;
  Json out{{"name", run.name},
           {"engine", run.engine},
           {"policy", run.policy},
           {"numerics", numerics},
           {"device", run.device},
           {"topology", model::to_string(run.topology)},
           {"ranks", run.num_ranks()},
           {"ranks_from", place_of(run, session)},
           {"grads", run.grads}};
  if (run.engine == "inference") {
    out["decode"] = run.decode;
    out["prefill_chunk"] = run.prefill_chunk;
    out["page_size"] = run.page_size;
    out["weights_from"] = run.weights_from;
  }
  return out;
}

Json compare_json(const CompareSpec& compare) {
  return {{"left", compare.left},
          {"right", compare.right},
          {"what", compare.what},
          {"metric", compare.metric},
          {"limit",
           compare.golden_limit ? Json("golden")
           : compare.limit      ? Json(*compare.limit)
                                : Json(nullptr)}};
}

std::string run_text(const RunSpec& run, const parallel::Session& session) {
  const int64_t ranks = run.num_ranks();
  return fmt::format("  run {}: {} {} on {} ({}{})\n",
                     run.name,
                     run.engine,
                     numerics_of(run).name(),
                     run.device,
                     model::to_string(run.topology),
                     ranks == 1            ? ", in this process"
                     : session.under_mpi() ? ", ranks of this mpirun"
                                           : fmt::format(", mpirun -n {}", ranks));
}

std::string compare_text(const CompareSpec& compare) {
  return fmt::format("  compare {} with {}: {} {}{}\n",
                     compare.left,
                     compare.right,
                     compare.what,
                     compare.metric,
                     compare.golden_limit ? ", limit from the stored spread"
                     : compare.limit      ? fmt::format(", limit {}", format_number(*compare.limit))
                                          : ", recorded");
}

}  // namespace

ScenarioPlan describe_plan(const ScenarioSet& set, const parallel::Session& session) {
  check_scenario(set, session);
  ScenarioPlan plan;
  plan.text = fmt::format("{} ({}){}\n",
                          set.name,
                          set.file.string(),
                          set.description.empty() ? "" : ": " + set.description);
  Json points = Json::array();
  for (const ScenarioPoint& point : set.points) {
    const Scenario& s = point.scenario;
    const model::ModelConfig config = resolve_config(s.model);
    if (set.points.size() > 1) plan.text += fmt::format("  point {}\n", point.label());
    plan.text += fmt::format("  model {}: {} layers, hidden {}, vocabulary {}\n",
                             model_text(s.model),
                             config.num_hidden_layers,
                             config.hidden_size,
                             config.vocab_size);
    Json runs = Json::array(), compares = Json::array();
    for (const RunSpec& run : s.runs) {
      plan.text += run_text(run, session);
      runs.push_back(run_json(run, session));
    }
    for (const CompareSpec& compare : s.compares) {
      plan.text += compare_text(compare);
      compares.push_back(compare_json(compare));
    }
    points.push_back({{"label", point.label()},
                      {"model", model_json(s.model, config)},
                      {"data", data_json(s.data)},
                      {"runs", runs},
                      {"compares", compares}});
  }
  plan.json = json_text(Json{{"name", set.name},
                             {"file", set.file.string()},
                             {"description", set.description},
                             {"tags", set.tags},
                             {"points", points}});
  return plan;
}

}  // namespace lockstep::harness
