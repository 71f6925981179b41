#include "parallel/tp/tensor_parallel.hpp"

#include <string>

#include "parallel/comm/autograd.hpp"
#include "parallel/mesh/layout.hpp"

namespace lockstep::parallel {
namespace {

class TensorParallel final : public model::TensorSplit {
 public:
  TensorParallel(Group group, bool splits_sums)
      : group_(std::move(group)), splits_sums_(splits_sums) {}

  [[nodiscard]] bool is_local() const override { return false; }
  [[nodiscard]] bool splits_sums() const override { return splits_sums_; }
  Tensor enter(const Tensor& x, std::string_view what) override {
    return share_with_ranks(group_, x, what);
  }
  Tensor leave(const Tensor& partial, std::string_view what) override {
    return sum_over_ranks(group_, partial, what);
  }
  Tensor gather_columns(const Tensor& x, bool replicated, std::string_view what) override {
    const std::vector<int64_t> columns = group_.all_gather(x.size(1), what);
    const GatheredUse use = replicated ? GatheredUse::kReplicated : GatheredUse::kDiffers;
    return parallel::gather_rows(group_, x.t(), columns, use, what).t().contiguous();
  }
  Tensor gather_rows(const Tensor& x, std::string_view what) override {
    const std::vector<int64_t> rows = group_.all_gather(x.size(0), what);
    return parallel::gather_rows(group_, x, rows, GatheredUse::kReplicated, what);
  }
  [[nodiscard]] std::pair<int64_t, int64_t> share(int64_t count) const override {
    const std::vector<int64_t> cuts = even_cuts(count, group_.size());
    return {cuts[static_cast<size_t>(group_.rank())], cuts[static_cast<size_t>(group_.rank()) + 1]};
  }

 private:
  Group group_;
  bool splits_sums_;
};

}  // namespace

std::unique_ptr<model::TensorSplit> tensor_parallel(const Group& group, bool splits_sums) {
  return std::make_unique<TensorParallel>(group, splits_sums);
}

Tensor TpSlice::of(const Tensor& whole) const {
  if (dim < 0) return whole;
  std::vector<Tensor> parts;
  for (const auto& [begin, end] : ranges) parts.push_back(whole.narrow(dim, begin, end - begin));
  return parts.size() == 1 ? parts[0] : at::cat(parts, dim);
}

std::vector<int64_t> TpSlice::shape(std::vector<int64_t> whole) const {
  if (dim < 0) return whole;
  int64_t& size = whole[static_cast<size_t>(dim)];
  size = 0;
  for (const auto& [begin, end] : ranges) size += end - begin;
  return whole;
}

TpSlice tp_slice(std::string_view name,
                 const std::vector<int64_t>& shape,
                 const TpSizes& sizes,
                 int64_t tp_rank,
                 int64_t tp_size,
                 bool splits_sums) {
  if (tp_size == 1) return {};
  const auto has = [&](std::string_view part) { return name.find(part) != std::string_view::npos; };
  const auto rank = static_cast<size_t>(tp_rank);
  // `count` things of `each` rows along dim, starting at row `base` of each block of `blocks`.
  const auto cut = [&](int64_t dim, int64_t count, int64_t each, int64_t blocks = 1) {
    LOCKSTEP_CHECK(count >= tp_size,
                   kMesh,
                   "tp = {}: {} has only {} parts to share; use tp <= {}",
                   tp_size,
                   name,
                   count,
                   count);
    const std::vector<int64_t> cuts = even_cuts(count, tp_size);
    TpSlice slice{dim, {}};
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t base = b * count * each;
      slice.ranges.emplace_back(base + cuts[rank] * each, base + cuts[rank + 1] * each);
    }
    return slice;
  };
  const auto output = [&](int64_t heads, int64_t each) {
    return splits_sums ? cut(1, heads, each) : cut(0, shape[0], 1);
  };

  if (has("indexer.")) return {};
  if (has("self_attn.A_log") || has("self_attn.b_proj.")) return cut(0, sizes.kda_heads, 1);
  if (has("self_attn.q_proj.") || has("self_attn.k_proj.") || has("self_attn.v_proj.") ||
      has("self_attn.f_b_proj.") || has("self_attn.g_b_proj.") || has("self_attn.dt_bias"))
    return cut(0, sizes.kda_heads, sizes.kda_dim);
  if (has("self_attn.conv1d.")) return cut(0, sizes.kda_heads, sizes.kda_dim, 3);
  if (has("self_attn.q_b_proj.")) return cut(0, sizes.mla_heads, sizes.nope_dim);
  if (has("self_attn.kv_b_proj.")) return cut(0, sizes.mla_heads, sizes.nope_dim + sizes.v_dim);
  if (has("self_attn.o_proj."))
    return sizes.kda ? output(sizes.kda_heads, sizes.kda_dim)
                     : output(sizes.mla_heads, sizes.v_dim);
  if (has("mlp.experts.gate_up_proj"))
    return splits_sums ? cut(1, shape[1] / 2, 1, 2) : cut(0, shape[0], 1);
  if (has("mlp.experts.down_proj")) return splits_sums ? cut(2, shape[2], 1) : cut(0, shape[0], 1);
  if (has("gate_proj.") || has("up_proj.")) return cut(0, shape[0], 1);
  if (has("down_proj.")) return output(shape[1], 1);
  return {};
}

}  // namespace lockstep::parallel
