#include <bit>

#include "model/ops/indexer.hpp"

namespace lockstep::model::indexer {
namespace {

void check_act_or_acc(const Tensor& x, const Numerics& num, std::string_view what) {
  LOCKSTEP_CHECK(x.defined() && (x.scalar_type() == num.act() || x.scalar_type() == num.acc()),
                 kShape,
                 "{}: expected dtype {} or {}, got {}",
                 what,
                 dtype_name(num.act()),
                 dtype_name(num.acc()),
                 describe(x));
}

}  // namespace

std::vector<int64_t> pool_offsets(const std::vector<int64_t>& cu, int64_t kpool) {
  std::vector<int64_t> offsets{0};
  for (size_t d = 1; d < cu.size(); ++d) {
    offsets.push_back(offsets.back() + (cu[d] - cu[d - 1]) / kpool);
  }
  return offsets;
}

void check_layer_norm(const Tensor& x,
                      const Tensor& weight,
                      const Tensor& bias,
                      const Numerics& num) {
  check_shape(x, {-1, -1}, "indexer_layer_norm: x [T, d]");
  check_dtype(x, num.act(), "indexer_layer_norm: x");
  check_shape(weight, {x.size(1)}, "indexer_layer_norm: weight [d]");
  check_shape(bias, {x.size(1)}, "indexer_layer_norm: bias [d]");
  check_act_or_acc(weight, num, "indexer_layer_norm: weight");
  check_act_or_acc(bias, num, "indexer_layer_norm: bias");
}

void check_pool(const Tensor& k,
                const Tensor& gate,
                const Tensor& ape,
                const std::vector<int64_t>& cu,
                int64_t kpool,
                const Numerics& num) {
  LOCKSTEP_CHECK(kpool >= 1, kConfig, "pool_keys: kpool must be at least 1, got {}", kpool);
  LOCKSTEP_CHECK(!cu.empty(), kInput, "pool_keys: cu must hold at least the boundary 0");
  check_shape(k, {cu.back(), -1}, "pool_keys: k [T, d], T from cu");
  check_shape(gate, {cu.back(), k.size(1)}, "pool_keys: gate [T, d]");
  check_shape(ape, {kpool, k.size(1)}, "pool_keys: ape [kpool, d]");
  check_dtype(k, num.act(), "pool_keys: k");
  check_dtype(gate, num.act(), "pool_keys: gate");
  check_act_or_acc(ape, num, "pool_keys: ape");
}

void check_select(const Tensor& q,
                  const Tensor& head_weight,
                  const Tensor& pooled,
                  const Packing& packing,
                  const IndexerParams& params,
                  const Numerics& num) {
  LOCKSTEP_CHECK(
      params.kpool >= 1 && params.topk >= 0 && params.num_heads >= 1 && params.head_dim >= 1,
      kConfig,
      "select_keys: heads {}, head_dim {}, kpool {} must be at least 1 and topk {} not "
      "negative",
      params.num_heads,
      params.head_dim,
      params.kpool,
      params.topk);
  LOCKSTEP_CHECK(packing.global_tokens() <= 0x7fffffff,
                 kShape,
                 "select_keys: indices are int32, the row has {} tokens",
                 packing.global_tokens());
  check_shape(q,
              {packing.local_tokens(), params.num_heads, params.head_dim},
              "select_keys: q [T_local, heads, d]");
  check_shape(head_weight,
              {packing.local_tokens(), params.num_heads},
              "select_keys: head_weight [T_local, heads]");
  check_shape(pooled,
              {pool_offsets(packing.cu_seqlens(), params.kpool).back(), params.head_dim},
              "select_keys: pooled [P, d], P the full pools of the global row");
  check_dtype(q, num.act(), "select_keys: q");
  check_act_or_acc(head_weight, num, "select_keys: head_weight");
  check_dtype(pooled, num.act(), "select_keys: pooled");
  LOCKSTEP_CHECK(!(num.rounds<Switch::kIndexerScoring>("fp8") && num.is<Switch::kHadamard>("on")) ||
                     std::has_single_bit(static_cast<uint64_t>(params.head_dim)),
                 kConfig,
                 "select_keys: fp8 scoring with the Hadamard rotation (D30, D31) needs a head_dim "
                 "that is a power of two, got {}",
                 params.head_dim);
}

}  // namespace lockstep::model::indexer
