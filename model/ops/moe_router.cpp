// Router and the way between token order and expert order, fast form.
#include "model/ops/device_kernels.hpp"
#include "model/ops/linear.hpp"
#include "model/ops/moe_checks.hpp"
#include "model/ops/op_support.hpp"

namespace lockstep::model {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct ChooseInfo {
  RouterForm form;
  Tensor bias, replay;  ///< replay may be undefined
};

/// logits [T, E] acc -> experts [T, k], weights [T, k].
class ChooseFunction : public torch::autograd::Function<ChooseFunction> {
 public:
  static variable_list forward(AutogradContext* ctx,
                               const Tensor& logits_TE,
                               const ChooseInfo& info) {
    const RouterForm& form = info.form;
    const bool replay = info.replay.defined();
    Tensor experts = replay ? info.replay.clone(at::MemoryFormat::Contiguous)
                            : at::empty({form.tokens, form.top_k}, at::kLong);
    Tensor weights = at::empty({form.tokens, form.top_k}, logits_TE.options());
    const auto run = [&]<typename A>(A) {
      router_forward<A>(form,
                        cdata<A>(logits_TE),
                        cdata<A>(info.bias),
                        replay,
                        data<int64_t>(experts),
                        data<A>(weights));
    };
    logits_TE.scalar_type() == at::kDouble ? run(double{}) : run(float{});
    ctx->mark_non_differentiable({experts});
    ctx->save_for_backward({logits_TE, experts});
    stash(ctx, form);
    return {experts, weights};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const RouterForm& form = stashed<RouterForm>(ctx);
    const Tensor dweights = grads[1].contiguous();
    Tensor dlogits = at::empty_like(saved[0]);
    const auto run = [&]<typename A>(A) {
      router_backward<A>(
          form, cdata<A>(saved[0]), cdata<int64_t>(saved[1]), cdata<A>(dweights), data<A>(dlogits));
    };
    saved[0].scalar_type() == at::kDouble ? run(double{}) : run(float{});
    return {dlogits, {}};
  }
};

struct CombineInfo {
  CombineForm form;
  Tensor slot, place;
  Numerics num;
};

class CombineFunction : public torch::autograd::Function<CombineFunction> {
 public:
  static Tensor forward(AutogradContext* ctx,
                        const Tensor& rows_RD,
                        const Tensor& weights_Tk,
                        const CombineInfo& info) {
    Tensor out = at::empty({info.form.tokens, info.form.width}, rows_RD.options());
    with_width(info.num, [&]<typename W>() {
      combine_forward<W>(info.form,
                         cdata<typename W::Act>(rows_RD),
                         cdata<int64_t>(info.place),
                         cdata<int64_t>(info.slot),
                         cdata<typename W::Acc>(weights_Tk),
                         data<typename W::Act>(out));
    });
    ctx->save_for_backward({rows_RD, weights_Tk});
    stash(ctx, info);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const CombineInfo& info = stashed<CombineInfo>(ctx);
    const Tensor dout = grads[0].contiguous();
    Tensor drows = at::empty_like(saved[0]), dweights = at::empty_like(saved[1]);
    with_width(info.num, [&]<typename W>() {
      combine_backward<W>(info.form,
                          cdata<typename W::Act>(saved[0]),
                          cdata<int64_t>(info.slot),
                          cdata<typename W::Acc>(saved[1]),
                          cdata<typename W::Act>(dout),
                          data<typename W::Act>(drows),
                          data<typename W::Acc>(dweights));
    });
    return {drows, dweights, {}};
  }
};

class GatherFunction : public torch::autograd::Function<GatherFunction> {
 public:
  static Tensor forward(AutogradContext* ctx,
                        const Tensor& x_TD,
                        const ExpertOrder& order,
                        const Numerics& num) {
    ctx->saved_data["tokens"] = x_TD.size(0);
    stash(ctx, std::make_pair(order.slot, num));
    return x_TD.index_select(0, order.token);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto& [slot, num] = stashed<std::pair<Tensor, Numerics>>(ctx);
    const Tensor drows = grads[0].contiguous();
    const int64_t T = ctx->saved_data["tokens"].toInt(), k = T > 0 ? slot.size(0) / T : 0;
    if (takes_device_form(drows)) {
      const Tensor place_Tk = ascending_places(slot, T, k);
      Tensor sum = at::zeros({T, drows.size(1)}, drows.options().dtype(num.acc()));
      for (int64_t j = 0; j < k; ++j) sum += drows.index_select(0, place_Tk.select(1, j));
      return {sum.to(num.act()), {}, {}};
    }
    const Tensor place = at::empty_like(slot);
    places_of_tokens(T, k, cdata<int64_t>(slot), data<int64_t>(place));
    Tensor dx = at::empty({T, drows.size(1)}, drows.options());
    with_width(num, [&]<typename W>() {
      sum_places<W>(T,
                    k,
                    drows.size(1),
                    cdata<typename W::Act>(drows),
                    cdata<int64_t>(place),
                    data<typename W::Act>(dx));
    });
    return {dx, {}, {}};
  }
};

}  // namespace

Routing route(const Tensor& x,
              const Weight& gate,
              const Tensor& bias,
              const Tensor& replay,
              const RouterParams& params,
              const Numerics& num) {
  if (takes_device_form(x)) return route_reference(x, gate.value, bias, replay, params, num);
  const RouterForm form = check_route(x, gate.value, bias, replay, params, num);
  Tensor logits_TE = linear_acc(x, gate.with(router_gate(gate.value, num)), num);
  if (form.round_scores) logits_TE = rounded(logits_TE, num);
  const auto chosen = ChooseFunction::apply(
      logits_TE.contiguous(), ChooseInfo{form, router_bias(bias, num).contiguous(), replay});
  return {chosen[0], chosen[1]};
}

Tensor gather_rows(const Tensor& x, const ExpertOrder& order, const Numerics& num) {
  check_shape(x, {-1, -1}, "gather_rows: x");
  check_dtype(x, num.act(), "gather_rows: x");
  const int64_t rows = order.token.size(0);
  LOCKSTEP_CHECK(x.size(0) == 0 ? rows == 0 : rows % x.size(0) == 0,
                 kShape,
                 "gather_rows: {} rows are not a multiple of the {} tokens of x",
                 rows,
                 x.size(0));
  if (const auto gathered = gather_rows_kernel(x, order)) return *gathered;
  return GatherFunction::apply(x.contiguous(), order, num);
}

Tensor combine_experts(const Tensor& rows,
                       const ExpertOrder& order,
                       const Tensor& weights,
                       const Numerics& num) {
  const CombineForm form = check_combine(rows, order, weights, num);
  if (takes_device_form(rows)) {
    const auto y = combine_experts_kernel(rows, order, weights, num);
    return y ? *y : combine_experts_reference(rows, order, weights, num);
  }
  const Tensor slot = order.slot.contiguous(), place = at::empty_like(slot);
  places_of_tokens(form.tokens, form.slots, cdata<int64_t>(slot), data<int64_t>(place));
  return CombineFunction::apply(
      rows.contiguous(), weights.contiguous(), CombineInfo{form, slot, place, num});
}

}  // namespace lockstep::model
