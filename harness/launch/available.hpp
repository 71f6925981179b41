// What the vocabulary of scenarios and the command line has but this build does not run.
#pragma once

#include <string>
#include <string_view>

#include "harness/launch/scenario.hpp"
#include "model/config/topology.hpp"

namespace lockstep::harness {

/// Of a batch, a page or a piece of a prefill: more than any machine holds, and no product of it
/// with the sizes of a model leaves 64 bits.
inline constexpr int64_t kMostTokens = int64_t{1} << 24;

/// Why this engine, device or topology cannot run here and what can; empty when it can run. Names
/// that exist nowhere get a list of those that do.
std::string engine_problem(std::string_view engine);
std::string device_problem(std::string_view device);
std::string topology_problem(const model::Topology& topology, std::string_view engine = "trainer");
/// Options of a run that its engine does not have.
std::string option_problem(const RunSpec& run);

}  // namespace lockstep::harness
