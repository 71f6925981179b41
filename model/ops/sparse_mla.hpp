// Multi-head latent attention without positions, over selected keys only.
#pragma once

#include "model/config/numerics.hpp"

namespace lockstep::model {

/// q [T, H, d_n] act; latent [S, R] act (keys and values share it; S rows of the global row, T
/// local queries); kv_b [H * (d_n + d_v), R]: per head d_n key rows then d_v value rows; selection
/// int32 [T, width] of rows of latent, -1 unused anywhere in a row. Returns o [T, H, d_v] act.
/// scale = d_n^-1/2. A query without a valid key gives 0 and no gradient. numerics: D42 (expanded
/// or absorbed), D43, D44, D46; softmax in acc, max-subtracted. Gradients for q, latent, kv_b;
/// latent gradient added in a fixed order. Memory O(T (width + H d)), never T * S.
Tensor sparse_mla(const Tensor& q,
                  const Tensor& latent,
                  const Tensor& kv_b,
                  const Tensor& selection,
                  int64_t d_v,
                  const Numerics& num);
Tensor sparse_mla_reference(const Tensor& q,
                            const Tensor& latent,
                            const Tensor& kv_b,
                            const Tensor& selection,
                            int64_t d_v,
                            const Numerics& num);

}  // namespace lockstep::model
