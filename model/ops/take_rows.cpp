#include "model/ops/take_rows.hpp"

namespace lockstep::model {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class TakeRows : public torch::autograd::Function<TakeRows> {
 public:
  static Tensor forward(AutogradContext* ctx,
                        const Tensor& x,
                        const Tensor& index,
                        at::ScalarType sum_dtype) {
    ctx->save_for_backward({index});
    ctx->saved_data["sizes"] = x.sizes().vec();
    ctx->saved_data["sum_dtype"] = static_cast<int64_t>(sum_dtype);
    return x.index_select(0, index);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto sum_dtype = static_cast<at::ScalarType>(ctx->saved_data["sum_dtype"].toInt());
    const Tensor dx =
        at::zeros(ctx->saved_data["sizes"].toIntVector(), grads[0].options().dtype(sum_dtype));
    add_rows(dx, ctx->get_saved_variables()[0], grads[0].to(sum_dtype));
    return {dx.to(grads[0].scalar_type()), {}, {}};
  }
};

}  // namespace

void add_rows(const Tensor& to, const Tensor& index, const Tensor& rows) {
  if (index.numel() == 0) return;
  // The library's index_add_ adds in no fixed order on a GPU; accumulation by sorted index does.
  Tensor target = to;
  if (to.device().is_cpu()) {
    target.index_add_(0, index, rows);
  } else {
    at::index_put_(target, {std::optional<Tensor>(index)}, rows, /*accumulate=*/true);
  }
}

Tensor take_rows(const Tensor& x, const Tensor& index, at::ScalarType sum_dtype) {
  return TakeRows::apply(x, index, sum_dtype);
}

}  // namespace lockstep::model
