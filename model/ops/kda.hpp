// Kimi Delta Attention: gated delta rule with a per-channel forget gate, over packed segments.
#pragma once

#include <optional>
#include <vector>

#include "model/base/exact_sum.hpp"
#include "model/config/numerics.hpp"

namespace lockstep::model {

struct KdaInput {
  Tensor q, k, v;        ///< [T, H, D] act; raw: l2norm of q and k happens inside
  Tensor f;              ///< [T, H, D] act; raw forget gate before dt_bias
  Tensor beta_logit;     ///< [T, H] act
  Tensor a_log;          ///< [H] any floating dtype, like dt_bias
  Tensor dt_bias;        ///< [H * D]
  Tensor initial_state;  ///< [S, H, D, D] acc (key dim first), one per segment; undefined: zeros
  ExactSum a_log_sum{}, dt_bias_sum{};  ///< where their gradients go, both or none: one chain for
                                    ///< every chunk, chunks added exactly (fast form only)
  std::vector<int64_t>
      cu;  ///< segment boundaries {0, ..., T}; empty segments pass their state through unchanged
  std::optional<double> lower_bound;  ///< g = lb * sigmoid(exp(A_log) (f + dt_bias)); empty: g =
                                      ///< -exp(A_log) softplus(f + dt_bias)
};

struct KdaOutput {
  Tensor o;            ///< [T, H, D] act, before the output norm
  Tensor final_state;  ///< [S, H, D, D] acc, differentiable
};

/// The chunked form (D21: 64 or 16 tokens from each segment's start), hand-written backward, exact
/// for any gate: every decay is a product of factors at most 1. Gradients of both outputs for every
/// tensor of the input, differentiable once.
///
/// numerics: D03, D17-D26, D71; D21 = recurrent runs kda_recurrent_reference. Forward rounds where
/// kda_chunk_reference does; backward is computed in acc from the rounded forward operands and
/// rounds only its results. A row's bits depend on the rows before it in its segment alone: not on
/// other segments, the segment's length, threads or the vector width. Errors of float32 against
/// float64 are those of the plain form or smaller (o 1e-7 to 4e-7 relative).
///
/// Cost O(T H (64 D + D^2)): at D = 64 about 1 us per token and head on one core with AVX-512,
/// forward and backward 3.7 us. Saved for backward are the inputs and one state per 8 chunks;
/// intermediates exist for 8 chunks of a few heads at a time.
///
/// Throws kShape naming the argument, kConfig for a lower bound that is not negative.
KdaOutput kda_chunk(const KdaInput& in, const Numerics& num);

/// Per-token recurrence in plain tensor functions, differentiable by autograd: the reference for
/// everything else. numerics: gate, beta and l2norm switches are honoured, prefill-only values of
/// D17-D20 as in decode (beta in acc, gate lb/(1+exp), l2norm divided and not rounded); D21-D26 do
/// not apply (no chunk intermediates exist).
KdaOutput kda_recurrent_reference(const KdaInput& in, const Numerics& num);

/// Chunked form written plainly, one chunk after another, with every rounding point of D17-D26:
/// what kda_chunk must equal to accumulation order in a bf16 policy. Differentiable by autograd
/// (the backward's own roundings are kda_chunk's contract).
KdaOutput kda_chunk_reference(const KdaInput& in, const Numerics& num);

}  // namespace lockstep::model
