// Multi-head latent attention without positions, over selected keys only.
#pragma once

#include "model/base/weight.hpp"
#include "model/config/numerics.hpp"

namespace lockstep::model {

/// q [T, H, d_n] act; latent [S, R] act (keys and values share it; S rows of the global row, T
/// local queries); kv_b [H * (d_n + d_v), R] act or acc, taken as given: per head d_n key rows then
/// d_v value rows; selection int32 [T, width] of rows of latent, -1 unused anywhere in a row.
/// Returns o [T, H, d_v] act. scale = d_n^-1/2. A query without a valid key gives 0 and no
/// gradient.
///
/// absorbed (D42): qa_h = act(q_h Wk_h); s = scale (qa_h . c_j); a_h = act(sum_j P_j c_j); o_h =
/// act(Wv_h a_h). expanded: k, v = act(c Wk_h^T), act(c Wv_h^T); s = scale (q_h . k_j); o_h =
/// act(sum_j P_j v_j). Softmax in acc, max-subtracted. numerics in bf16 policies: D43 bf16: the
/// product and its scaling are rounded; D44 normalised: P = bf16(e / sum), unnormalised: P =
/// bf16(e), divided by the unrounded sum, fp32: not rounded.
///
/// Gradients for q and latent (act) and kv_b (its dtype); P is recomputed. Absorbed: delta = da .
/// a; dS = scale P (dP - delta) and P rounded for the products; dqa rounded; the latent's gradient
/// is one acc sum over queries, then heads (key role, then value role), rounded once. Expanded: the
/// expanded graph with every bf16 node's gradient rounded. D46: the order is always fixed.
///
/// Every element of o, dq and dlatent is one chain of fused multiply-adds in the order of the
/// selection (o, dq) or of the queries (dlatent): bits do not depend on threads, on the other rows,
/// on which shard a query is in (o, dq), or on documents packed around its own. Memory beyond
/// arguments and results: tens of MB for runs of queries, plus S H (d_n + d_v) when expanded. Cost
/// 4 T width H R forward (absorbed). Throws kShape for wrong arguments, kInput for an index outside
/// [-1, S).
///
/// With exact sums (of both or neither; absorbed form only, kConfig otherwise) the gradients of
/// latent and kv_b are one such chain per block of queries (kv_b.blocks), blocks added exactly.
Tensor sparse_mla(const Tensor& q,
                  const Weight& latent,
                  const Weight& kv_b,
                  const Tensor& selection,
                  int64_t d_v,
                  const Numerics& num);
/// Gathers [T, width, R] and leaves the rest to autograd.
Tensor sparse_mla_reference(const Tensor& q,
                            const Tensor& latent,
                            const Tensor& kv_b,
                            const Tensor& selection,
                            int64_t d_v,
                            const Numerics& num);

/// The absorbed forward over a cache, with the two parts of kv_b kept apart: w_k [H, d_n, R] and
/// w_v [H, R, d_v] (transposed), act or acc. latent [S, R] act is all slots of the cache and
/// `selection` holds slots. The same bits as sparse_mla; no gradient. A cache narrower than acc is
/// widened only where it is selected. D42 is not read. Throws like sparse_mla.
Tensor sparse_mla_absorbed(const Tensor& q,
                           const Tensor& latent,
                           const Tensor& w_k,
                           const Tensor& w_v,
                           const Tensor& selection,
                           const Numerics& num);

namespace mla {
/// Argument checks of both forms, all but the range of the indices.
void check_arguments(const Tensor& q,
                     const Tensor& latent,
                     const Tensor& kv_b,
                     const Tensor& selection,
                     int64_t d_v,
                     const Numerics& num);
}  // namespace mla

}  // namespace lockstep::model
