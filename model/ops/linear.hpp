// Products with weights, and the embedding.
#pragma once

#include "model/config/numerics.hpp"

namespace lockstep::model {

/// y = x W^T. x [..., K] act; weight [N, K] act or acc dtype; returns [..., N] act.
/// numerics: operands as given, accumulation in acc, one rounding at the store. Gradients likewise
/// (dx act, dW in weight's dtype).
Tensor linear(const Tensor& x, const Tensor& weight, const Numerics& num);

/// Same product with operands raised to acc and the result left in acc: router logits, fp32 heads.
Tensor linear_acc(const Tensor& x, const Tensor& weight, const Numerics& num);

/// Rows of weight [V, D] for ids [T] int64, in act. The row pad_id (if >= 0) gets no gradient.
/// Throws kInput for an id outside [0, V), naming position and id.
Tensor embedding(const Tensor& ids, const Tensor& weight, int64_t pad_id, const Numerics& num);

}  // namespace lockstep::model
