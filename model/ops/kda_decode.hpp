// KDA one token at a time, as decoding runs it: the recurrence on states kept in numbered slots.
#pragma once

#include "model/ops/kda.hpp"

namespace lockstep::model {

/// Advances the state of each segment by its tokens, in order, and returns o [T, H, D] act. Segment
/// s of in.cu (usually one token) works on slots[s], int64 [S], of states [slots, H, D, D], value
/// dim first, contiguous, acc or (D27) bfloat16; in.initial_state is not read. Slot 0 is nobody's:
/// its state counts as zeros, is not written, and o is 0. A slot may appear once. Everything in
/// acc, o rounded once, a bfloat16 state rounded after each token.
///
/// numerics: gate, beta and l2norm as kda_recurrent_reference. Bits depend neither on other
/// segments nor on threads. No gradient. Throws kShape, kInput for a slot that is negative, too
/// large or named twice.
Tensor kda_decode(const KdaInput& in,
                  const Tensor& slots,
                  const Tensor& states,
                  const Numerics& num);
Tensor kda_decode_reference(const KdaInput& in,
                            const Tensor& slots,
                            const Tensor& states,
                            const Numerics& num);

}  // namespace lockstep::model
