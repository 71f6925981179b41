// From a scenario to its result: load, set up, run, compare, record.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "harness/launch/scenario.hpp"
#include "harness/result/result.hpp"
#include "harness/runner/progress.hpp"
#include "parallel/comm/group.hpp"

namespace lockstep::harness {

/// What is known of a run before it is made; `ranks` are those of its topology.
RunRecord begin_record(const RunSpec& run);

struct RunnerOptions {
  std::filesystem::path out;      ///< results go to out/runs/SCENARIO/...
  std::vector<std::string> sets;  ///< as given to load_scenario, for ranks started by mpirun
  const parallel::Session* session = nullptr;
  Progress* progress = nullptr;
};

/// Runs all points of a scenario. Errors of a run or comparison end up in the result; nothing is
/// thrown for them except, inside an mpirun with several ranks, errors of a run over several ranks,
/// after which the ranks can no longer act together.
///
/// A run on one rank happens in this process. A run on N ranks uses the ranks of the surrounding
/// mpirun (fewer than N is kMesh) or starts `mpirun -n N lockstep worker`. Runs that occur at
/// several points of a sweep with the same inputs are computed once. Inside an mpirun every rank
/// calls this and only rank 0's result means anything.
ScenarioResult run_scenario(const ScenarioSet& set, const RunnerOptions& options);

}  // namespace lockstep::harness
