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
  int64_t ranks_per_host = 8;  ///< consecutive ones
  /// For the time: of one rank, sustained. TFLOP/s; GB/s each way in a host, and between hosts.
  double tflops = 400, link = 300, network = 50;
};

struct StepPlanText {
  std::string text;     ///< tables for people
  std::string json;     ///< an object: topology, num_ranks, num_tokens, num_documents, groups,
                        ///< ranks (place, tokens, memory, traffic of each), hosts, checkpoint,
                        ///< time, cp_blocker; of many ranks the first, and what is left_out
  std::string warning;  ///< what makes the plan a poor one: ranks without tokens; also in json
  std::string blocked;  ///< why cp cannot cut the batch as asked, then nothing else is planned
};

/// Training with AdamW, one micro-batch. Bytes of ep are those of an even load of the experts.
/// The time is that of arithmetic and of bytes alone, of the slowest rank. Throws kMesh for a
/// topology that the model cannot be laid over.
StepPlanText describe_step(const StepPlanInput& input);

}  // namespace lockstep::harness
