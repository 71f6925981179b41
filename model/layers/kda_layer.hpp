// The KDA mixer: projections, short convolutions, gated delta rule, gated output norm.
#pragma once

#include "model/layers/context.hpp"

namespace lockstep::model {

/// x [T, D] act, the normalised collapsed stream of layer `layer`; returns [T, D] act.
Tensor kda_mixer(const LayerContext& ctx, int64_t layer, const Tensor& x);

}  // namespace lockstep::model
