// A training step on paper: who talks to whom, what each rank holds, and what it moves. Needs no
// MPI and no weights.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "harness/sync/transfer_plan.hpp"
#include "model/base/packing.hpp"
#include "model/config/model_config.hpp"
#include "model/config/numerics.hpp"
#include "model/config/topology.hpp"
#include "parallel/optim/optimizer.hpp"
#include "parallel/plan/offload.hpp"

namespace lockstep::harness {

struct StepPlanInput {
  const model::ModelConfig& config;
  const model::Numerics& num;
  model::Topology topology;
  Packing batch = Packing::whole({0});  ///< whole
  std::vector<int64_t> cp_cuts;         ///< empty: near-even
  bool recompute = false;
  parallel::OptimizerKind optimizer = parallel::OptimizerKind::kAdamW;
  parallel::Offload offload = parallel::Offload::kNone;
  std::optional<SyncSides> sync = {};  ///< after the step, into an inference engine
  int64_t ranks_per_host = 8;          ///< consecutive ones
  /// For the time: of one rank, sustained. TFLOP/s; GB/s each way in a host, and between hosts.
  double tflops = 400, link = 300, network = 50;
};

struct StepPlanText {
  std::string text;     ///< tables for people
  std::string json;     ///< an object: topology, num_ranks, num_tokens, num_documents, optimizer,
                        ///< offload, model, groups, ranks (place, tokens, memory, traffic of
                        ///< each), hosts, checkpoint, time, weight_sync, cp_blocker; of many ranks
                        ///< the first, and what is left_out
  std::string warning;  ///< what makes the plan a poor one: ranks without tokens; also in json
  std::string blocked;  ///< why cp cannot cut the batch as asked, then nothing else is planned
};

/// Training, one micro-batch. Bytes of ep are those of an even load of the experts.
/// The time is that of arithmetic and of bytes alone, of the slowest rank. Throws kMesh for a
/// topology that the model cannot be laid over, kConfig for one that the optimizer cannot.
StepPlanText describe_step(const StepPlanInput& input);

}  // namespace lockstep::harness
