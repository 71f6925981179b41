// Causal depthwise short convolution followed by silu.
#pragma once

#include <span>

#include "model/base/weight.hpp"
#include "model/config/numerics.hpp"

namespace lockstep::model {

/// y[t,c] = silu( sum_j weight[c,j] x[t-W+1+j, c] ), restarted at each segment of cu (local
/// boundaries {0,...,T}). x [T, C] act; weight [C, W] any width >= 1 (D14: rounded to bf16 or not);
/// halo [S, W-1, C] act or undefined: the W-1 raw rows before each segment, oldest first, zeros
/// where the document starts later; undefined means zeros. Returns [T, C] act. numerics: sum in acc
/// from 0 in order j = 0..W-1, D16 silu form, one rounding. Gradients for x, weight and halo.
/// Segments may be empty or shorter than W-1.
/// With weight.blocks (which start where segments do and have W-1 rows at least where a segment
/// goes on; kShape otherwise), the gradient of x is that of the taps inside its block, rounded,
/// plus that of the taps from the next block, rounded: what a cut between the blocks gives. With
/// weight.sum, a block's gradient of the weight is one chain, and blocks are added exactly.
Tensor conv_silu(const Tensor& x,
                 const Weight& weight,
                 std::span<const int64_t> cu,
                 const Tensor& halo,
                 const Numerics& num);
Tensor conv_silu_reference(const Tensor& x,
                           const Tensor& weight,
                           std::span<const int64_t> cu,
                           const Tensor& halo,
                           const Numerics& num);

}  // namespace lockstep::model
