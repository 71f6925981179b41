// Products with weights, and the embedding. Every product runs over a fixed grid of tiles
// (linear_tiles.hpp): the bits do not depend on the number of threads. With D63 = fixed-tiles every
// element is one chain of fused multiply-adds (chain_gemm.hpp), and a row's bits depend neither on
// the other rows nor on the processor.
#pragma once

#include "model/base/weight.hpp"
#include "model/config/numerics.hpp"

namespace lockstep::model {

/// y = x W^T. x [..., K] act; weight [N, K] act or acc dtype; returns [..., N] act.
/// numerics: operands as given, accumulation in acc, one rounding at the store. Gradients likewise
/// (dx act, dW in weight's dtype, summed over all rows in acc and rounded once). D63.
/// With weight.sum, dW is one chain of fused multiply-adds over the rows of each block, the blocks
/// added exactly. Throws kShape on wrong shapes, dtypes or blocks.
Tensor linear(const Tensor& x, const Weight& weight, const Numerics& num);

/// Same product with operands raised to acc (any floating dtype) and the result left in acc: router
/// logits, fp32 heads. Gradients in the operands' dtypes.
Tensor linear_acc(const Tensor& x, const Weight& weight, const Numerics& num);

/// at::matmul with autograd, rounded like linear.
Tensor linear_reference(const Tensor& x, const Tensor& weight, const Numerics& num);

/// Rows of weight [V, D] for ids [T] int64, in act. The row pad_id (if >= 0) gets no gradient; the
/// others get the sum over their tokens in order, in acc, rounded once to weight's dtype; with
/// weight.sum, every token's gradient is added exactly.
/// Throws kInput for an id outside [0, V), naming position and id.
Tensor embedding(const Tensor& ids, const Weight& weight, int64_t pad_id, const Numerics& num);

}  // namespace lockstep::model
