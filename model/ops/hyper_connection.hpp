// Manifold-constrained hyper-connections: several residual streams mixed by token-dependent
// weights.
#pragma once

#include "model/config/numerics.hpp"

namespace lockstep::model {

struct HcParams {
  double norm_eps;  ///< rms_norm_eps, of the statistic over all n * D values
  double eps;       ///< added to pre and to every Sinkhorn denominator
  int64_t sinkhorn_iters;
};

struct HcPre {
  Tensor x_normed;  ///< [T, D] act: RMSNorm of the collapsed stream, what the sublayer reads
  Tensor post;      ///< [T, n] acc
  Tensor comb;      ///< [T, n, n] acc; row = source stream
};

/// Collapse n streams into the sublayer's normalised input. x [T, n, D] act; fn [(2 + n) * n, n *
/// D]; base [(2 + n) * n]; scale [3] (pre, post, comb); norm_weight [D]. numerics: D01, D02,
/// D04-D07, D11-D13. Gradients for x, fn, base, scale, norm_weight.
HcPre hc_pre(const Tensor& x,
             const Tensor& fn,
             const Tensor& base,
             const Tensor& scale,
             const Tensor& norm_weight,
             const HcParams& params,
             const Numerics& num);
HcPre hc_pre_reference(const Tensor& x,
                       const Tensor& fn,
                       const Tensor& base,
                       const Tensor& scale,
                       const Tensor& norm_weight,
                       const HcParams& params,
                       const Numerics& num);

/// X'_j = post_j y + sum_i comb_ij X_i. y [T, D] act; returns [T, n, D] act. numerics: D08, D09,
/// D10.
Tensor hc_post(
    const Tensor& y, const Tensor& x, const Tensor& post, const Tensor& comb, const Numerics& num);
Tensor hc_post_reference(
    const Tensor& y, const Tensor& x, const Tensor& post, const Tensor& comb, const Numerics& num);

/// Mean of the n streams, [T, n, D] -> [T, D] act. numerics: D58.
Tensor hc_mean(const Tensor& x, const Numerics& num);

}  // namespace lockstep::model
