// Bytes of parameters, gradients and optimizer that a rank holds, from the configuration alone.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "parallel/plan/traffic.hpp"

namespace lockstep::parallel {

/// Shards of one kind of parameters while training: masters of what is trained (the rest in the
/// dtype it is computed with), their gradients, and the state of the optimizer.
struct Footprint {
  std::string category;  ///< "embedding and head", "kda", "sparse attention", "indexer", "experts",
                         ///< "router", "mlp", "hyper-connections", "norms"
  int64_t elements = 0, parameters = 0, gradients = 0, optimizer = 0;
  int64_t host = 0;  ///< bytes that are kept in the host's memory instead
};

/// Categories that the model has, in the order above, of the rank at `rank`.
std::vector<Footprint> footprint(const StepPlan& plan, int64_t rank);

/// Parameters of a whole model, and the files that hold them.
struct ModelSize {
  int64_t parameters = 0;
  int64_t active = 0;          ///< of them those that one token is multiplied with
  int64_t embedding = 0;       ///< of which a token looks up one row; 0 where it is the head, too
  int64_t weight_bytes = 0;    ///< in the dtypes of the published files
  int64_t training_bytes = 0;  ///< the same, with float32 masters and the optimizer's state
};
/// The text model, or one of its MTP layers: sparse attention, the MLP of the last layer, plain
/// residuals, three norms more and a projection of twice the width; embedding and head are the
/// model's.
ModelSize model_size(const model::ModelConfig& config, OptimizerKind optimizer);
ModelSize mtp_layer_size(const model::ModelConfig& config, OptimizerKind optimizer);

}  // namespace lockstep::parallel
