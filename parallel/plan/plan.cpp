#include "parallel/plan/plan.hpp"

#include "parallel/cp/context_parallel.hpp"
#include "parallel/ep/expert_parallel.hpp"
#include "parallel/plan/placement.hpp"
#include "parallel/tp/tensor_parallel.hpp"

namespace lockstep::parallel {

ParallelPlan::ParallelPlan(const model::ModelConfig& config,
                           const model::Numerics& num,
                           const Mesh& mesh,
                           const Packing& batch,
                           const std::vector<int64_t>& cuts)
    : tokens_(plan_tokens(mesh.topology(), mesh.place(), batch, cuts, num.invariant())),
      sequence_(std::make_unique<model::LocalSequence>()),
      experts_(std::make_unique<model::LocalExperts>()),
      tensor_(std::make_unique<model::WholeTensors>()) {
  if (mesh.cp().size() > 1)
    sequence_ =
        context_parallel(mesh.cp(), tokens_.cuts, num.is<model::Switch::kCpKdaState>("handover"));
  if (mesh.ep().size() > 1)
    experts_ = expert_parallel(mesh.ep(), expert_cuts(config, mesh.topology()));
  if (mesh.tp().size() > 1)
    tensor_ = tensor_parallel(mesh.tp(), num.is<model::Switch::kTpPartialSums>("tp"));
}

}  // namespace lockstep::parallel
