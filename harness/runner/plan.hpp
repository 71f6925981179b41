// What a scenario will do, checked before it does it.
#pragma once

#include <string>

#include "harness/launch/scenario.hpp"
#include "parallel/comm/group.hpp"

namespace lockstep::harness {

struct ScenarioPlan {
  std::string text;  ///< lines for people
  /// An object: name, file, description, tags, points; of each point label, model, data, runs,
  /// compares.
  std::string json;
};

/// Checks a scenario as far as possible without computing (models resolve, goldens exist, ranks
/// suffice) and describes what would happen, for --dry-run.
ScenarioPlan describe_plan(const ScenarioSet& set, const parallel::Session& session);

/// Everything that must hold before any rank computes, beyond what loading checked: models resolve,
/// stored cases named by compares are there and intact, an mpirun around us has enough ranks.
/// Throws kInput, kConfig, kMesh, kGolden.
void check_scenario(const ScenarioSet& set, const parallel::Session& session);

}  // namespace lockstep::harness
