// The lightning indexer with pooled keys: which keys each query attends to. Frozen: no gradient
// flows into or through it.
#pragma once

#include "model/base/packing.hpp"
#include "model/config/numerics.hpp"

namespace lockstep::model {

struct IndexerParams {
  int64_t num_heads, head_dim, kpool, topk;  ///< topk in tokens
  bool select_tail = true;
};

/// Keys of every pool of the global row. k [T, d] act after LayerNorm, gate [T, d] act, ape [kpool,
/// d]; document boundaries cu. Returns pooled keys [P, d] act, documents in order, floor(length /
/// kpool) pools each. pk[c] = sum_j softmax_j(gate[j,c] + ape[j,c]) k[j,c]. numerics: D33.
Tensor pool_keys(const Tensor& k,
                 const Tensor& gate,
                 const Tensor& ape,
                 const std::vector<int64_t>& cu,
                 int64_t kpool,
                 const Numerics& num);
Tensor pool_keys_reference(const Tensor& k,
                           const Tensor& gate,
                           const Tensor& ape,
                           const std::vector<int64_t>& cu,
                           int64_t kpool,
                           const Numerics& num);

/// Selected keys for the local queries of `packing`. q [T_local, heads, d] act, head_weight
/// [T_local, heads] act or acc (raw: heads^-1/2 and d^-1/2 are applied inside), pooled [P, d] for
/// the global row. Returns int32 [T_local, topk + kpool - 1] (topk without tail): indices into the
/// global row; selected pools ascending, each as kpool consecutive indices, then the tail, then -1.
/// score(t, P) = sum_h heads^-1/2 w[t,h] relu(d^-1/2 q[t,h] . pk_P); candidates are full pools
/// whose last token <= t; ties go to the lower pool. numerics: D30-D32, D34, D36, D40. Cost O(T P
/// heads d); scores are never stored for all queries.
Tensor select_keys(const Tensor& q,
                   const Tensor& head_weight,
                   const Tensor& pooled,
                   const Packing& packing,
                   const IndexerParams& params,
                   const Numerics& num);
Tensor select_keys_reference(const Tensor& q,
                             const Tensor& head_weight,
                             const Tensor& pooled,
                             const Packing& packing,
                             const IndexerParams& params,
                             const Numerics& num);

/// LayerNorm of the indexer keys (eps 1e-6) with weight and bias. numerics: D35. x [T, d] act ->
/// act.
Tensor indexer_layer_norm(const Tensor& x,
                          const Tensor& weight,
                          const Tensor& bias,
                          const Numerics& num);

}  // namespace lockstep::model
