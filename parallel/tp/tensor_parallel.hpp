// Tensor parallelism: heads, inner dimensions and experts of a layer split over the ranks of a
// group.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "model/seams/tensor_split.hpp"
#include "parallel/comm/group.hpp"

namespace lockstep::parallel {

/// splits_sums: D61 = tp.
std::unique_ptr<model::TensorSplit> tensor_parallel(const Group& group, bool splits_sums);

/// The part of a parameter that one rank computes with: these ranges along `dim`, one after
/// another. dim < 0: all of it.
struct TpSlice {
  int64_t dim = -1;
  std::vector<std::pair<int64_t, int64_t>> ranges;
  [[nodiscard]] Tensor of(const Tensor& whole) const;
  [[nodiscard]] std::vector<int64_t> shape(std::vector<int64_t> whole) const;
};

/// Sizes that decide where a parameter may be cut.
struct TpSizes {
  bool kda;  ///< the parameter's layer has a KDA mixer, else sparse attention
  int64_t kda_heads, kda_dim, mla_heads, nope_dim, v_dim;
};

/// Split by heads: KDA q, k, v, b, f_b and g_b projections, convolution, A_log, dt_bias; MLA q_b
/// and kv_b. Split by inner dimension: gate, up, down. Output projections: by columns where sums
/// are split, by rows where not; routed experts: their inner dimension, or whole experts.
/// Everything else (norms, hyper-connections, indexer, router, low-rank inputs, embedding, head) is
/// whole on every rank. Throws kMesh when there are fewer heads than ranks.
TpSlice tp_slice(std::string_view name,
                 const std::vector<int64_t>& shape,
                 const TpSizes& sizes,
                 int64_t tp_rank,
                 int64_t tp_size,
                 bool splits_sums);

}  // namespace lockstep::parallel
