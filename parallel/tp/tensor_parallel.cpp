#include "parallel/tp/tensor_parallel.hpp"

#include <string>

#include "parallel/mesh/layout.hpp"

namespace lockstep::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Call {
  const Group* group;
  std::string_view what;
};

void remember(AutogradContext* ctx, const Call& call) {
  ctx->saved_data["group"] = reinterpret_cast<int64_t>(call.group);
  ctx->saved_data["what"] = std::string(call.what);
}
const Group& group_of(AutogradContext* ctx) {
  return *reinterpret_cast<const Group*>(ctx->saved_data["group"].toInt());
}
std::string what_of(AutogradContext* ctx) {
  return ctx->saved_data["what"].toStringRef() + " gradient";
}

Tensor summed(const Group& group, const Tensor& tensor, std::string_view what) {
  Tensor sum = tensor.contiguous().clone();
  group.all_reduce_sum(sum, what);
  return sum;
}

class Enter : public torch::autograd::Function<Enter> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Call& call) {
    remember(ctx, call);
    return x.view_as(x);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    return {summed(group_of(ctx), grads[0], what_of(ctx)), Tensor()};
  }
};

class Leave : public torch::autograd::Function<Leave> {
 public:
  static Tensor forward(AutogradContext*, const Tensor& partial, const Call& call) {
    return summed(*call.group, partial, call.what);
  }
  static variable_list backward(AutogradContext*, variable_list grads) {
    return {grads[0], Tensor()};
  }
};

/// Rows of every rank; backward: this rank's rows of the gradient, summed over ranks first if they
/// differ.
class GatherRows : public torch::autograd::Function<GatherRows> {
 public:
  static Tensor forward(AutogradContext* ctx,
                        const Tensor& x,
                        const std::vector<int64_t>& rows,
                        bool replicated,
                        const Call& call) {
    remember(ctx, call);
    ctx->saved_data["rows"] = rows;
    ctx->saved_data["replicated"] = replicated;
    return call.group->all_gather_rows(x.contiguous(), rows, call.what);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Group& group = group_of(ctx);
    const std::vector<int64_t> rows = ctx->saved_data["rows"].toIntVector();
    Tensor grad;
    if (ctx->saved_data["replicated"].toBool()) {
      int64_t first = 0;
      for (int64_t r = 0; r < group.rank(); ++r) first += rows[static_cast<size_t>(r)];
      grad = grads[0].narrow(0, first, rows[static_cast<size_t>(group.rank())]);
    } else {
      grad = group.reduce_scatter_rows(grads[0].contiguous(), rows, what_of(ctx));
    }
    return {grad, Tensor(), Tensor(), Tensor()};
  }
};

class TensorParallel final : public model::TensorSplit {
 public:
  TensorParallel(Group group, bool splits_sums)
      : group_(std::move(group)), splits_sums_(splits_sums) {}

  [[nodiscard]] bool is_local() const override { return false; }
  [[nodiscard]] bool splits_sums() const override { return splits_sums_; }
  Tensor enter(const Tensor& x, std::string_view what) override {
    return Enter::apply(x, Call{&group_, what});
  }
  Tensor leave(const Tensor& partial, std::string_view what) override {
    return Leave::apply(partial, Call{&group_, what});
  }
  Tensor gather_columns(const Tensor& x, bool replicated, std::string_view what) override {
    const std::vector<int64_t> columns = group_.all_gather(x.size(1), what);
    return GatherRows::apply(x.t(), columns, replicated, Call{&group_, what}).t().contiguous();
  }
  Tensor gather_rows(const Tensor& x, std::string_view what) override {
    const std::vector<int64_t> rows = group_.all_gather(x.size(0), what);
    return GatherRows::apply(x, rows, true, Call{&group_, what});
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
