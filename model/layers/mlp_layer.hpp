// The second half of a block: dense SwiGLU or mixture of experts.
#pragma once

#include "model/layers/context.hpp"

namespace lockstep::model {

/// x [T, D] act; returns [T, D] act.
Tensor mlp(const LayerContext& ctx, int64_t layer, const Tensor& x);

}  // namespace lockstep::model
