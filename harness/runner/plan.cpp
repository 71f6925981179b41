#include "harness/runner/plan.hpp"

#include <algorithm>

#include "golden/store/golden_case.hpp"
#include "harness/launch/paths.hpp"
#include "harness/launch/workload.hpp"
#include "harness/result/result.hpp"

namespace lockstep::harness {

void check_scenario(const ScenarioSet& set, const parallel::Session& session) {
  std::vector<std::string> verified;
  for (const ScenarioPoint& point : set.points) {
    const Scenario& scenario = point.scenario;
    resolve_config(scenario.model);
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
      const int64_t need = run.topology.num_ranks(), have = session.world().size();
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

std::string describe_plan(const ScenarioSet& set, const parallel::Session& session) {
  check_scenario(set, session);
  std::string text = fmt::format("{} ({}){}\n",
                                 set.name,
                                 set.file.string(),
                                 set.description.empty() ? "" : ": " + set.description);
  for (const ScenarioPoint& point : set.points) {
    const Scenario& s = point.scenario;
    const model::ModelConfig config = resolve_config(s.model);
    if (set.points.size() > 1) text += fmt::format("  point {}\n", point.label());
    text += fmt::format("  model {}: {} layers, hidden {}, vocabulary {}\n",
                        !s.model.preset.empty()       ? "preset " + s.model.preset
                        : !s.model.checkpoint.empty() ? s.model.checkpoint.string()
                                                      : "golden " + s.model.golden,
                        config.num_hidden_layers,
                        config.hidden_size,
                        config.vocab_size);
    for (const RunSpec& run : s.runs) {
      const int64_t ranks = run.topology.num_ranks();
      text += fmt::format("  run {}: {} {} on {} ({}{})\n",
                          run.name,
                          run.engine,
                          numerics_of(run).name(),
                          run.device,
                          model::to_string(run.topology),
                          ranks == 1            ? ", in this process"
                          : session.under_mpi() ? ", ranks of this mpirun"
                                                : fmt::format(", mpirun -n {}", ranks));
    }
    for (const CompareSpec& compare : s.compares) {
      text += fmt::format("  compare {} with {}: {} {}{}\n",
                          compare.left,
                          compare.right,
                          compare.what,
                          compare.metric,
                          compare.golden_limit ? ", limit from the stored spread"
                          : compare.limit ? fmt::format(", limit {}", format_number(*compare.limit))
                                          : ", recorded");
    }
  }
  return text;
}

}  // namespace lockstep::harness
