// The one ordered recipe: the schemes of a topology as the seams of the model.
#pragma once

#include <memory>
#include <vector>

#include "model/config/model_config.hpp"
#include "model/config/numerics.hpp"
#include "model/layers/context.hpp"
#include "parallel/mesh/mesh.hpp"
#include "parallel/plan/token_plan.hpp"

namespace lockstep::parallel {

/// What stands behind the seams for one batch. Must outlive every graph built with them.
class ParallelPlan {
 public:
  /// `batch`: the whole batch, the same on every rank. cuts: see plan_tokens. Throws kMesh.
  ParallelPlan(const model::ModelConfig& config,
               const model::Numerics& num,
               const Mesh& mesh,
               const Packing& batch,
               const std::vector<int64_t>& cuts);

  [[nodiscard]] const TokenPlan& tokens() const { return tokens_; }
  [[nodiscard]] model::Seams seams() const { return {*sequence_, *experts_, *tensor_}; }

 private:
  TokenPlan tokens_;
  std::unique_ptr<model::SequenceSeam> sequence_;
  std::unique_ptr<model::TokenExchange> experts_;
  std::unique_ptr<model::TensorSplit> tensor_;
};

}  // namespace lockstep::parallel
