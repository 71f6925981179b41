// Bytes that a rank moves in one training step, from the configuration alone.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "model/base/packing.hpp"
#include "model/config/model_config.hpp"
#include "model/config/numerics.hpp"
#include "parallel/mesh/layout.hpp"
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
  /// By layer, the experts [T, k] int64 of every token of the batch. Without them every expert gets
  /// the same number of rows, so the bytes of ep are those of an even load.
  std::map<int64_t, Tensor> routes;

  /// What the rank at `rank` holds.
  [[nodiscard]] TokenPlan tokens(int64_t rank) const {
    return plan_tokens(topology, coordinates(topology, rank), batch, cp_cuts, num.invariant());
  }
};

/// Rows that these tokens send to each expert of a layer.
std::vector<double> expert_rows(const StepPlan& plan, int64_t layer, const TokenPlan& tokens);

/// One micro-batch, forward and backward, and the optimizer's step, of the rank at `rank`. Circles
/// of one rank move nothing and are left out. With `routes`, figures equal those of the ledger.
/// Throws kMesh where a run would.
std::vector<Traffic> step_traffic(const StepPlan& plan, int64_t rank);

}  // namespace lockstep::parallel
