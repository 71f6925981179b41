// Manifold-constrained hyper-connections: n residual streams mixed by token-dependent weights.
//
// Per token, with z = the n * D values of its streams (stream-major) and P = (2 + n) * n:
//   r = 1 / sqrt(mean(z^2) + norm_eps),  m = r * (fn z)                            [P]
//   pre_i = sigmoid(m_i scale_0 + base_i) + eps,  post_j = 2 sigmoid(m_{n+j} scale_1 + base_{n+j})
//   comb = Sinkhorn(softmax over j of (m_{2n+ni+j} scale_2 + base_{2n+ni+j}) + eps): columns first,
//          then sinkhorn_iters - 1 times rows and columns, each c / (sum + eps)
//   u = sum_i pre_i X_i,  x_normed = RMSNorm(u) * norm_weight
//   X'_j = post_j y + sum_i comb_ij X_i
// Column sums of comb end at 1; row sums do not.
//
// Inside an operator everything is in acc; gradients are rounded only where they leave it. Sums
// over tokens (gradients of fn, base, scale, norm_weight) run over fixed blocks of tokens, merged
// in order: no result depends on the number of threads.
#pragma once

#include "model/base/weight.hpp"
#include "model/config/numerics.hpp"

namespace lockstep::model {

struct HcParams {
  double norm_eps;         ///< rms_norm_eps, of both statistics
  double eps;              ///< added to pre, to the softmax and to every Sinkhorn denominator
  int64_t sinkhorn_iters;  ///< >= 1
};

struct HcPre {
  Tensor x_normed;  ///< [T, D] act: RMSNorm of the collapsed stream, what the sublayer reads
  Tensor post;      ///< [T, n] acc
  Tensor comb;      ///< [T, n, n] acc; row = source stream
};

/// Collapse n >= 1 streams into the sublayer's normalised input. x [T, n, D] act; fn [P, n * D],
/// base [P], scale [3] (pre, post, comb), norm_weight [D], each in act or acc; gradients for all
/// five. `unrounded` [T, n, D] acc, if given, holds the streams before their store rounding:
/// projection and r read it instead of x (D07), the gradient still goes to x. numerics: D01, D02,
/// D13 (rounding of parameters); D04 (normalise, then project, or the reverse); D05 (operands of
/// the projection: fp32; tf32 = both rounded to 10 mantissa bits; bf16x3 = fn as three bf16 terms,
/// smallest product added first); D06 (one sum; fixed = 8 slices; by-tokens: hc_projection_slices);
/// u rounded; D12; D11. D05 has no effect in float64. With exact sums (of all four weights or of
/// none), fn's gradient is one chain per block of fn.blocks, the others' one number per token, all
/// added exactly. Throws kShape, kConfig (iterations, eps).
/// Cost: reads x twice, 48 n D flops a token.
HcPre hc_pre(const Tensor& x,
             const Weight& fn,
             const Weight& base,
             const Weight& scale,
             const Weight& norm_weight,
             const HcParams& params,
             const Numerics& num,
             const Tensor& unrounded = {});
HcPre hc_pre_reference(const Tensor& x,
                       const Tensor& fn,
                       const Tensor& base,
                       const Tensor& scale,
                       const Tensor& norm_weight,
                       const HcParams& params,
                       const Numerics& num,
                       const Tensor& unrounded = {});

/// Number of partial sums of the projection over n * D values (D06). fixed: 8. by-tokens: 8 for at
/// most 32 tokens; above, what fills 132 processors with tiles of 64 tokens: 132 / ceil(T / 64),
/// at most a quarter of the 64-value steps, at least 1. Slices are runs of ceil(n D / slices)
/// rounded up to 64 values; their sums are added in order.
int64_t hc_projection_slices(int64_t tokens, int64_t width, const Numerics& num);

/// The new streams. y [T, D] act, x [T, n, D] act, post [T, n] acc, comb [T, n, n] acc; returns
/// [T, n, D] act. Gradients for all four.
/// numerics: D08 (post and comb rounded first); D09 = 3: act(act(post_j y) + act(sum_i comb_ij
/// X_i)); D09 = 1: one rounding, with D10 the order: streams 0..n-1 and then the post term, or the
/// post term first. Throws kShape.
Tensor hc_post(
    const Tensor& y, const Tensor& x, const Tensor& post, const Tensor& comb, const Numerics& num);
Tensor hc_post_reference(
    const Tensor& y, const Tensor& x, const Tensor& post, const Tensor& comb, const Numerics& num);

/// hc_post before its last rounding, in acc and without gradient: the `unrounded` of the next
/// hc_pre.
Tensor hc_post_unrounded(
    const Tensor& y, const Tensor& x, const Tensor& post, const Tensor& comb, const Numerics& num);

/// Whether D07 wants `unrounded` streams for a call of that many tokens (bf16 only).
bool hc_wants_unrounded(int64_t tokens, const Numerics& num);

/// x [T, D] act copied to n streams, [T, n, D]. Gradient: the sum over streams in order, in acc,
/// rounded once.
Tensor hc_copy(const Tensor& x, int64_t n, const Numerics& num);

/// Mean of the n streams, [T, n, D] -> [T, D] act. numerics: D58 (one rounding after an acc mean,
/// or rounded additions in stream order and a rounded division).
Tensor hc_mean(const Tensor& x, const Numerics& num);
Tensor hc_mean_reference(const Tensor& x, const Numerics& num);

}  // namespace lockstep::model
