// Carrying out one run on the ranks of a mesh.
#pragma once

#include <filesystem>
#include <functional>

#include "harness/launch/workload.hpp"
#include "harness/runner/run_output.hpp"
#include "parallel/mesh/mesh.hpp"

namespace lockstep::harness {

using StepCallback = std::function<void(int64_t done, int64_t total, const char* what)>;

/// Runs the engine that the run names. Every rank of the mesh calls it; the result is complete on
/// each. Throws kInternal when ranks that must agree (loss and gradients) hold different bytes, and
/// whatever the engine throws. `replay`: see TrainerOptions.
RunOutput execute_run(const RunSpec& run,
                      const Workload& work,
                      const parallel::Mesh& mesh,
                      const StepCallback& progress = {},
                      const std::vector<Tensor>& replay = {});

/// The same on the first ranks of `world`, all of which call it; nothing on ranks beyond. A run
/// that takes the weights of a trainer run carries that out first, on the same ranks, and
/// synchronises.
RunOutput execute_run(const RunSpec& run,
                      const Workload& work,
                      const parallel::Group& world,
                      const StepCallback& progress = {},
                      const std::vector<Tensor>& replay = {});

/// The same with the result complete on every rank of `world`, and what a rank finds wrong with the
/// run thrown by all of them, with its message.
RunOutput execute_run_for_all(const RunSpec& run,
                              const Workload& work,
                              const parallel::Group& world,
                              const std::vector<Tensor>& replay = {});

/// Throws what every rank would find wrong with the model under the run's topology (kMesh), so that
/// none has to be started for it.
void check_topology(const RunSpec& run, const model::ModelConfig& config);

/// The expert choice of a run that traced "*.mlp.gate.experts", for a run that replays it.
std::vector<Tensor> expert_choice(const RunOutput& output, const model::ModelConfig& config);
/// The same of a run that save_run() left in `folder`; nothing where that is empty.
std::vector<Tensor> replay_from(const std::filesystem::path& folder,
                                const model::WeightSource& source);

}  // namespace lockstep::harness
