// A training step on paper: who talks to whom, what each rank holds, and what it moves. Needs no
// MPI and no weights.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/base/packing.hpp"
#include "model/config/model_config.hpp"
#include "model/config/numerics.hpp"
#include "model/config/topology.hpp"

namespace lockstep::harness {

struct StepPlanInput {
  const model::ModelConfig& config;
  const model::Numerics& num;
  model::Topology topology;
  Packing batch = Packing::whole({0});  ///< whole
  std::vector<int64_t> cp_cuts;         ///< empty: near-even
  bool recompute = false;
};

struct StepPlanText {
  std::string text;  ///< tables for people
  std::string json;  ///< an object: topology, num_ranks, num_tokens, num_documents, groups,
                     ///< ranks (place, tokens, memory, traffic of each)
};

/// Training with AdamW, one micro-batch. Bytes of ep are those of an even load of the experts.
/// Throws kMesh for a topology that the model or the batch cannot be laid over.
StepPlanText describe_step(const StepPlanInput& input);

}  // namespace lockstep::harness
