// Bytes of parameters, gradients and optimizer that a rank holds, from the configuration alone.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/config/model_config.hpp"
#include "model/config/numerics.hpp"
#include "parallel/mesh/layout.hpp"

namespace lockstep::parallel {

/// Shards of one kind of parameters while training with AdamW: masters of what is trained (the rest
/// in the dtype it is computed with), their gradients, and two moments.
struct Footprint {
  std::string category;  ///< "embedding and head", "kda", "sparse attention", "indexer", "experts",
                         ///< "router", "mlp", "hyper-connections", "norms"
  int64_t elements = 0, parameters = 0, gradients = 0, optimizer = 0;
};

/// Categories that the model has, in the order above.
std::vector<Footprint> footprint(const model::ModelConfig& config,
                                 const model::Numerics& num,
                                 const model::Topology& topology,
                                 int64_t rank);

}  // namespace lockstep::parallel
