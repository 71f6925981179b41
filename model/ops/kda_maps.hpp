// A KDA segment as an affine map of its entry state, for ranks that share a document.
#pragma once

#include <utility>

#include "model/ops/kda.hpp"

namespace lockstep::model {

/// The last segment of `in` as the map S -> A S + B of the state it is entered with: (A, B), [H, D,
/// D] acc each, A over key channels. `in.initial_state` is not read. Two passes of the chunked
/// form: B from a zero state, A from the identity with v = 0. Not differentiable.
std::pair<Tensor, Tensor> kda_last_segment_map(const KdaInput& in, const Numerics& num);

/// Gradient of the entry state of the first segment when the outputs have gradient dout [T, H, D]
/// and the final state has none: [H, D, D] acc. Costs a forward and a backward pass over that
/// segment. Not differentiable.
Tensor kda_entry_gradient(const KdaInput& in, const Tensor& dout, const Numerics& num);

}  // namespace lockstep::model
