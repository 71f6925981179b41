// Bytes that a rank moves in one training step, from the configuration alone.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "model/base/packing.hpp"
#include "model/config/model_config.hpp"
#include "model/config/numerics.hpp"
#include "parallel/mesh/layout.hpp"
#include "parallel/optim/optimizer.hpp"
#include "parallel/plan/offload.hpp"
#include "parallel/plan/token_plan.hpp"

namespace lockstep::parallel {

/// What one rank sends to and receives from the other ranks of a circle, for one purpose.
struct Traffic {
  Circle circle = Circle::kAll;
  std::string what;  ///< "parameters", "latents", ...
  int64_t calls = 0, bytes_sent = 0, bytes_received = 0;
};

struct StepPlan {
  const model::ModelConfig& config;
  const model::Numerics& num;
  model::Topology topology;
  const Packing& batch;          ///< whole; see plan_tokens
  std::vector<int64_t> cp_cuts;  ///< empty: near-even
  bool recompute = false;
  bool balance = false;  ///< router bias follows the load
  OptimizerKind optimizer = OptimizerKind::kAdamW;
  Offload offload = Offload::kNone;
  /// By layer, the experts [T, k] int64 of every token of the batch. Without them every expert gets
  /// the same number of rows, so the bytes of ep are those of an even load.
  std::map<int64_t, Tensor> routes;

  [[nodiscard]] TokenRow row(int64_t number) const {
    return plan_row(topology, number, batch, cp_cuts, num.invariant());
  }
  /// What the rank at `rank` holds, without `rows`.
  [[nodiscard]] TokenPlan tokens(int64_t rank) const {
    const Coordinates c = coordinates(topology, rank);
    return row(c.dp * topology.fsdp + c.fsdp).part(c.cp);
  }
  /// Rows of an even load that `tokens` tokens send to `experts` experts.
  [[nodiscard]] int64_t even_rows(int64_t tokens, int64_t experts) const;
};

/// Throws kMesh for a topology that cannot be, kConfig for an optimizer that cannot run on it or be
/// kept like that.
void validate(const StepPlan& plan);

/// Tokens of each rank of an ep circle: first and one past the last, counted in the batch.
std::vector<std::pair<int64_t, int64_t>> ep_tokens(const StepPlan& plan, int64_t rank);

/// Rows that tokens [begin, end) send to each expert of a layer of plan.routes.
std::vector<int64_t> expert_rows(const StepPlan& plan, int64_t layer, int64_t begin, int64_t end);

/// One micro-batch, forward and backward, and the optimizer's step, of the rank at `rank`. Circles
/// of one rank move nothing and are left out. With `routes`, figures equal those of the ledger.
/// Throws kMesh and kConfig where a run would. `replica_sums`, if there, gets the elements of each
/// sum of gradients over the replicas.
std::vector<Traffic> step_traffic(const StepPlan& plan,
                                  int64_t rank,
                                  std::vector<int64_t>* replica_sums = nullptr);

/// Bytes of those sums, sent and received alike, of replica `own` of `size`.
int64_t replica_bytes(const StepPlan& plan,
                      const std::vector<int64_t>& replica_sums,
                      int64_t size,
                      int64_t own);

}  // namespace lockstep::parallel
