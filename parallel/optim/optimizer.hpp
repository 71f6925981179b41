// Optimizers on sharded parameters: each rank updates the rows it holds, with state for those rows
// only.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/fsdp/sharded_parameters.hpp"

namespace lockstep::parallel {

enum class OptimizerKind : uint8_t {
  kAdamW,
  kSgd,
  kMuon,  ///< matrices, see muon_matrices(); the rest as AdamW
};

inline constexpr std::array<OptimizerKind, 3> kOptimizers = {
    OptimizerKind::kAdamW, OptimizerKind::kSgd, OptimizerKind::kMuon};
/// "adamw", "sgd", "muon".
std::string_view optimizer_name(OptimizerKind kind);
/// Throws kConfig for any other name.
OptimizerKind parse_optimizer(std::string_view name);
/// Throws kConfig for a topology that the optimizer cannot run on: Muon with tp > 1.
void check_optimizer(OptimizerKind kind, const model::Topology& topology);

struct OptimizerOptions {
  OptimizerKind kind = OptimizerKind::kAdamW;
  double lr = 1e-6;
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
  double momentum = 0.95;      ///< of Muon's matrices
  double weight_decay = 0.01;  ///< decoupled: value *= 1 - lr * weight_decay, before the update
  double clip_norm = 1.0;      ///< gradients are scaled to at most this global norm; 0: not clipped
};

struct OptimizerStep {
  double grad_norm = 0;        ///< before clipping, over every trainable parameter once
  double clip_factor = 1;      ///< what gradients were multiplied with
  int64_t num_parameters = 0;  ///< elements of the whole model that an optimizer owns
  int64_t num_unchanged = 0;   ///< of those, how many the step left at the same value
};

class Optimizer {
 public:
  /// `params` needs ShardOptions::masters. Both must outlive the optimizer. Throws kConfig for a
  /// rate that is negative or not finite, betas outside [0, 1), Muon with tp > 1.
  Optimizer(ShardedParameters& params, const Mesh& mesh, OptimizerOptions options);

  /// One step with Shard::grad (undefined: zero), which is left as it is. Arithmetic in float64 per
  /// element, moments and masters stored in their dtype. Collective: the norm is a sum over the
  /// shards of one replica in ascending order, so all ranks clip by the same factor; for exact
  /// gradients it does not depend on how they are sharded. Throws kInput when the norm is not
  /// finite, naming the first parameter that holds such a value; nothing is changed then. Muon
  /// gathers the momentum of matrices that are sharded by rows, and every rank makes it orthogonal.
  OptimizerStep step();

  /// Global norm alone.
  [[nodiscard]] double grad_norm() const;

  [[nodiscard]] int64_t num_steps() const { return num_steps_; }
  void set_num_steps(int64_t steps) { num_steps_ = steps; }
  void set_lr(double lr);
  [[nodiscard]] const OptimizerOptions& options() const { return options_; }

  /// Moments of one parameter by name ("exp_avg", "exp_avg_sq", "momentum"), shaped like its shard,
  /// zero before the first step. Empty for frozen parameters.
  [[nodiscard]] std::map<std::string, Tensor>& state(const std::string& parameter);
  static std::vector<std::string_view> state_names(OptimizerKind kind);
  /// Those that a trained parameter has.
  static std::vector<std::string_view> state_names(OptimizerKind kind, const ParamSpec& spec);

 private:
  [[nodiscard]] double exact_grad_norm() const;
  int64_t update(Shard& shard, double clip_factor);
  [[nodiscard]] Tensor muon_direction(const Shard& shard, double clip_factor);

  ShardedParameters& params_;
  const Mesh& mesh_;
  OptimizerOptions options_;
  int64_t num_steps_ = 0;
  std::map<std::string, std::map<std::string, Tensor>> state_;
};

/// The aux-loss-free balance of experts: bias += speed * sign(mean load - load). load [E] int64 of
/// one layer, summed over all tokens of the batch; every rank updates its rows of `bias` alike.
/// Padding never reaches the router, so it is in no load.
void update_router_bias(Shard& bias, const Tensor& load, double speed);

}  // namespace lockstep::parallel
