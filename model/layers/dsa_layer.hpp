// The sparse attention mixer: latent attention over the keys an indexer selects.
#pragma once

#include "model/layers/context.hpp"

namespace lockstep::model {

/// x [T, D] act; returns [T, D] act. `selection` is the last full indexer's choice: a layer with
/// its own indexer replaces it, a shared layer uses it (int32 [T_local, width], global row
/// indices).
Tensor dsa_mixer(const LayerContext& ctx, int64_t layer, const Tensor& x, Tensor& selection);

}  // namespace lockstep::model
