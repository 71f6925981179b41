#include "parallel/comm/autograd.hpp"

#include <string>

#include "model/base/stash.hpp"

namespace lockstep::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void remember(AutogradContext* ctx, const Group& group, std::string_view what) {
  stash(ctx, group);
  ctx->saved_data["what"] = std::string(what) + " gradient";
}
Group group_of(AutogradContext* ctx) { return stashed<Group>(ctx); }
std::string what_of(AutogradContext* ctx) { return ctx->saved_data["what"].toStringRef(); }

Tensor summed(const Group& group, const Tensor& tensor, std::string_view what) {
  Tensor sum = tensor.clone(at::MemoryFormat::Contiguous);
  group.all_reduce_sum(sum, what);
  return sum;
}

class GatherRows : public torch::autograd::Function<GatherRows> {
 public:
  static Tensor forward(AutogradContext* ctx,
                        const Tensor& local,
                        const Group& group,
                        const std::vector<int64_t>& rows,
                        bool replicated,
                        std::string_view what) {
    remember(ctx, group, what);
    ctx->saved_data["rows"] = rows;
    ctx->saved_data["replicated"] = replicated;
    const Tensor all = group.all_gather_rows(local.contiguous(), rows, what);
    return all.is_same(local) ? local.view_as(local) : all;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Group group = group_of(ctx);
    const std::vector<int64_t> rows = ctx->saved_data["rows"].toIntVector();
    Tensor grad;
    if (ctx->saved_data["replicated"].toBool()) {
      int64_t first = 0;
      for (int64_t r = 0; r < group.rank(); ++r) first += rows[static_cast<size_t>(r)];
      grad = grads[0].narrow(0, first, rows[static_cast<size_t>(group.rank())]);
    } else {
      grad = group.reduce_scatter_rows(grads[0].contiguous(), rows, what_of(ctx));
    }
    return {grad, Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

class ReduceScatterRows : public torch::autograd::Function<ReduceScatterRows> {
 public:
  static Tensor forward(AutogradContext* ctx,
                        const Tensor& partial,
                        const Group& group,
                        const std::vector<int64_t>& rows,
                        std::string_view what) {
    remember(ctx, group, what);
    ctx->saved_data["rows"] = rows;
    const Tensor sum = group.reduce_scatter_rows(partial.contiguous(), rows, what);
    return sum.is_same(partial) ? partial.view_as(partial) : sum;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Tensor all = group_of(ctx).all_gather_rows(
        grads[0].contiguous(), ctx->saved_data["rows"].toIntVector(), what_of(ctx));
    return {all, Tensor(), Tensor(), Tensor()};
  }
};

class SumOverRanks : public torch::autograd::Function<SumOverRanks> {
 public:
  static Tensor forward(AutogradContext*,
                        const Tensor& partial,
                        const Group& group,
                        std::string_view what) {
    return summed(group, partial, what);
  }
  static variable_list backward(AutogradContext*, variable_list grads) {
    return {grads[0], Tensor(), Tensor()};
  }
};

class ShareWithRanks : public torch::autograd::Function<ShareWithRanks> {
 public:
  static Tensor forward(AutogradContext* ctx,
                        const Tensor& tensor,
                        const Group& group,
                        std::string_view what) {
    remember(ctx, group, what);
    return tensor.view_as(tensor);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    return {summed(group_of(ctx), grads[0], what_of(ctx)), Tensor(), Tensor()};
  }
};

class ExchangeRows : public torch::autograd::Function<ExchangeRows> {
 public:
  static Tensor forward(AutogradContext* ctx,
                        const Tensor& rows,
                        const Group& group,
                        const std::vector<int64_t>& send,
                        const std::vector<int64_t>& receive,
                        std::string_view what) {
    remember(ctx, group, what);
    ctx->saved_data["send"] = send;
    ctx->saved_data["receive"] = receive;
    const Tensor received = group.all_to_all_rows(rows.contiguous(), send, receive, what);
    return received.is_same(rows) ? rows.view_as(rows) : received;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Tensor grad = group_of(ctx).all_to_all_rows(grads[0].contiguous(),
                                                      ctx->saved_data["receive"].toIntVector(),
                                                      ctx->saved_data["send"].toIntVector(),
                                                      what_of(ctx));
    return {grad, Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

}  // namespace

Tensor gather_rows(const Group& group,
                   const Tensor& local,
                   const std::vector<int64_t>& rows,
                   GatheredUse use,
                   std::string_view what) {
  return GatherRows::apply(local, group, rows, use == GatheredUse::kReplicated, what);
}

Tensor reduce_scatter_rows(const Group& group,
                           const Tensor& partial,
                           const std::vector<int64_t>& rows,
                           std::string_view what) {
  return ReduceScatterRows::apply(partial, group, rows, what);
}

Tensor sum_over_ranks(const Group& group, const Tensor& partial, std::string_view what) {
  return SumOverRanks::apply(partial, group, what);
}

Tensor share_with_ranks(const Group& group, const Tensor& tensor, std::string_view what) {
  return ShareWithRanks::apply(tensor, group, what);
}

Tensor exchange_rows(const Group& group,
                     const Tensor& rows,
                     const std::vector<int64_t>& send,
                     const std::vector<int64_t>& receive,
                     std::string_view what) {
  return ExchangeRows::apply(rows, group, send, receive, what);
}

}  // namespace lockstep::parallel
