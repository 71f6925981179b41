// Activation recompute: a layer that keeps only its input.
#pragma once

#include "model/layers/context.hpp"

namespace lockstep::model {

/// block() whose forward stores nothing but X (and the selection a shared layer reads); backward
/// runs the layer again on the same packing and differentiates that. Operators are deterministic,
/// so gradients are bitwise those of block(). A traced activation is recorded in the first forward
/// only.
Tensor recomputed_block(const LayerContext& ctx, int64_t layer, const Tensor& x, Tensor& selection);

}  // namespace lockstep::model
