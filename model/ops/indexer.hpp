// The lightning indexer with pooled keys: which keys each query attends to. Frozen: no gradient
// flows into or through it.
#pragma once

#include <vector>

#include "model/base/packing.hpp"
#include "model/config/numerics.hpp"
#include "model/ops/fp8.hpp"

namespace lockstep::model {

struct IndexerParams {
  int64_t num_heads, head_dim, kpool, topk;  ///< topk in tokens; topk / kpool pools are selected
  bool select_tail = true;

  /// Columns of a selection.
  [[nodiscard]] int64_t width() const { return select_tail ? topk + kpool - 1 : topk; }
};

/// LayerNorm of the indexer keys (eps 1e-6) with weight [d] and bias [d], statistics in acc, one
/// rounding. x [T, d] act -> act. numerics: D35 (bf16 rounds the parameters; load and fp32 take
/// them as given).
Tensor indexer_layer_norm(const Tensor& x,
                          const Tensor& weight,
                          const Tensor& bias,
                          const Numerics& num);
Tensor indexer_layer_norm_reference(const Tensor& x,
                                    const Tensor& weight,
                                    const Tensor& bias,
                                    const Numerics& num);

/// Keys of every pool of the global row. k [T, d] act after LayerNorm, gate [T, d] act, ape [kpool,
/// d]; document boundaries cu, cu.back() = T. Returns pooled keys [P, d] act, documents in order,
/// floor(length / kpool) pools each. pk[c] = sum_j softmax_j(gate[j,c] + ape[j,c]) k[j,c], in acc,
/// sums over j ascending. numerics: D33: one-rounding: num / den rounded; bf16-weights: softmax
/// weights, products and their sum rounded. A pool depends on its own rows alone.
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
/// [T_local, heads] act or acc (raw: heads^-1/2 and d^-1/2 are applied inside), pooled [P, d] act
/// for the global row. Returns int32 [T_local, params.width()]: indices into the global row;
/// selected pools ascending, each as kpool consecutive indices, then the tail, then -1.
///
/// score(t, P) = sum_h heads^-1/2 w[t,h] relu(d^-1/2 q[t,h] . pk_P) in acc, heads ascending;
/// candidates are full pools of t's document whose last token <= t; ties go to the lower pool.
/// numerics: D30 unquantised: products of act operands in acc; bf16: the product is rounded, as a
/// bf16 GEMM stores it; fp8: q and pk rotated (D31) and quantised (D32), w' = (w s_q) fp32(d^-1/2
/// heads^-1/2), score = s_k sum_h w' relu(dot). D34 shows in the dtype of head_weight. D36 always:
/// a pool that t completes is taken first. D40: rows that see at most topk / kpool full pools are
/// not scored whatever the switch says, since their selection is everything either way.
///
/// A row's selection depends on that row, its document's pools and nothing else: not on packing,
/// shard, block or threads. Cost O(T P heads d); scores exist for a few rows at a time only.
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

/// Pooled keys as fp8 scoring (D30 in bf16) multiplies them: rotated (D31) and quantised (D32).
/// What an engine keeps in its cache.
Fp8Rows quantise_pools(const Tensor& pooled, const Numerics& num);

/// select_keys for pools that were quantised before, the same bytes. Throws kConfig where the
/// policy does not score in fp8.
Tensor select_keys(const Tensor& q,
                   const Tensor& head_weight,
                   const Fp8Rows& pooled,
                   const Packing& packing,
                   const IndexerParams& params,
                   const Numerics& num);

namespace indexer {

/// Scores [n, P] in acc of n queries [n, heads, d] with head weights [n, heads] against the pools
/// [P, d] of their document: the formula of select_keys in plain tensor functions.
Tensor plain_scores(const Tensor& q_nhd,
                    const Tensor& weight_nh,
                    const Tensor& pooled_pd,
                    const Numerics& num);

/// select_keys for tensors on any device; the host waits for nothing. Scores and their sort exist
/// for a block of queries at a time.
Tensor select_keys_on_device(const Tensor& q,
                             const Tensor& head_weight,
                             const Tensor& pooled,
                             const Packing& packing,
                             const IndexerParams& params,
                             const Numerics& num);

/// First pool of each document in the order of pool_keys, and their total as last entry.
std::vector<int64_t> pool_offsets(const std::vector<int64_t>& cu, int64_t kpool);

// Argument checks shared by the fast and the plain forms; they throw kShape or kInput naming the
// argument.
void check_layer_norm(const Tensor& x,
                      const Tensor& weight,
                      const Tensor& bias,
                      const Numerics& num);
void check_pool(const Tensor& k,
                const Tensor& gate,
                const Tensor& ape,
                const std::vector<int64_t>& cu,
                int64_t kpool,
                const Numerics& num);
void check_select(const Tensor& q,
                  const Tensor& head_weight,
                  const Tensor& pooled,
                  const Packing& packing,
                  const IndexerParams& params,
                  const Numerics& num);

}  // namespace indexer

}  // namespace lockstep::model
