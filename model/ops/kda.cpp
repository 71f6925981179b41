#include "model/ops/kda.hpp"

#include "model/ops/device_kernels.hpp"
#include "model/ops/kda_core.hpp"
#include "model/ops/kda_dispatch.hpp"
#include "model/ops/kda_mode.hpp"
#include "model/ops/norm_core.hpp"
#include "model/ops/weight_support.hpp"

namespace lockstep::model {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// What a call needs besides tensors; kept for backward.
struct KdaPlan : torch::CustomClassHolder {
  KdaMode mode;
  Width width = Width::kFloat32;
  std::vector<int64_t> cu;
  ExactSum a_log, dt_bias;
  bool save_states = false;
};
using PlanPtr = c10::intrusive_ptr<KdaPlan>;

/// Tensors as the kernels take them. Tokens may lie apart (slices of a merged projection).
struct Operands {
  Tensor q, k, v, f, beta_logit, rate, dt_bias, initial_state;
};

Tensor token_rows(const Tensor& t) {
  bool dense = true;
  for (int64_t i = t.dim() - 1, expected = 1; i >= 1; expected *= t.size(i), --i) {
    dense = dense && (t.size(i) == 1 || t.stride(i) == expected);
  }
  return dense ? t : t.contiguous();
}

Operands operands_of(const variable_list& in, const KdaPlan& plan) {
  const at::ScalarType acc = plan.width == Width::kFloat64 ? at::kDouble : at::kFloat;
  const auto decay = [&](const Tensor& t) {
    const Tensor used = plan.mode.round_decay ? t.detach().to(at::kBFloat16) : t.detach();
    return used.to(acc);
  };
  return {token_rows(in[0]),
          token_rows(in[1]),
          token_rows(in[2]),
          token_rows(in[3]),
          token_rows(in[4]),
          decay(in[5]).exp().contiguous(),
          decay(in[6]).contiguous(),
          in[7].defined() ? in[7].contiguous() : in[7]};
}

template <typename T>
KdaCall<typename T::S, typename T::R> call_of(T, const Operands& x, const KdaPlan& plan) {
  using S = typename T::S;
  using R = typename T::R;
  const auto rows = [](const Tensor& t) { return TokenRows<S>{data<S>(t), t.stride(0)}; };
  return {x.q.size(0),
          x.q.size(1),
          x.q.size(2),
          rows(x.q),
          rows(x.k),
          rows(x.v),
          rows(x.f),
          rows(x.beta_logit),
          data<R>(x.rate),
          data<R>(x.dt_bias),
          data<R>(x.initial_state),
          plan.mode,
          kda_chunks(plan.cu, plan.mode.chunk)};
}

/// Rows of `to` that belong to empty segments become those of `from` (undefined: zeros).
void pass_through_empty(const std::vector<int64_t>& cu, const Tensor& from, const Tensor& to) {
  for (size_t s = 0; s + 1 < cu.size(); ++s) {
    if (cu[s] != cu[s + 1]) continue;
    const auto i = static_cast<int64_t>(s);
    if (from.defined()) {
      to[i].copy_(from[i]);
    } else {
      to[i].zero_();
    }
  }
}

struct KdaFunction : torch::autograd::Function<KdaFunction> {
  static variable_list forward(AutogradContext* ctx,
                               const Tensor& q,
                               const Tensor& k,
                               const Tensor& v,
                               const Tensor& f,
                               const Tensor& beta_logit,
                               const Tensor& a_log,
                               const Tensor& dt_bias,
                               const std::optional<Tensor>& initial_in,
                               const PlanPtr& plan) {
    const Tensor initial_state = initial_in.value_or(Tensor());
    const variable_list in = {q, k, v, f, beta_logit, a_log, dt_bias, initial_state};
    const Operands x = operands_of(in, *plan);
    const int64_t heads = q.size(1), dim = q.size(2);
    const auto segments = static_cast<int64_t>(plan->cu.size()) - 1;
    Tensor o = at::empty(q.sizes(), q.options());
    Tensor final_state = at::empty({segments, heads, dim, dim}, x.rate.options());
    pass_through_empty(plan->cu, x.initial_state, final_state);
    Tensor states;
    by_width(plan->width, [&](auto types) {
      using S = typename decltype(types)::S;
      using R = typename decltype(types)::R;
      const KdaCall<S, R> call = call_of(types, x, *plan);
      if (plan->save_states) {
        const int64_t windows = kda_windows(static_cast<int64_t>(call.chunks.size()));
        states = at::empty({windows, heads, dim, dim}, x.rate.options());
      }
      kda_forward(call,
                  mutable_data<S>(o),
                  mutable_data<R>(final_state),
                  plan->save_states ? mutable_data<R>(states) : nullptr);
    });
    if (plan->save_states) {
      variable_list saved = in;
      saved.push_back(states);
      ctx->save_for_backward(saved);
      ctx->saved_data["plan"] = at::IValue::make_capsule(plan);
      ctx->set_materialize_grads(false);
    }
    return {o, final_state};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list in = ctx->get_saved_variables();
    const auto plan =
        c10::static_intrusive_pointer_cast<KdaPlan>(ctx->saved_data["plan"].toCapsule());
    const Operands x = operands_of(in, *plan);
    const Tensor& states = in[8];
    const auto dense = [](const Tensor& g, at::ScalarType type) {
      return g.defined() ? g.to(type).contiguous() : g;
    };
    const Tensor dout = dense(grads[0], x.q.scalar_type());
    const Tensor dfinal = dense(grads[1], x.rate.scalar_type());
    const int64_t heads = x.q.size(1), dim = x.q.size(2);
    Tensor dq = at::empty(x.q.sizes(), x.q.options()), dk = at::empty_like(dq);
    Tensor dv = at::empty_like(dq), df = at::empty_like(dq);
    Tensor dbeta = at::empty(x.beta_logit.sizes(), x.q.options());
    Tensor da = at::empty_like(x.rate), ddt = at::empty_like(x.dt_bias), dinitial;
    if (x.initial_state.defined()) {
      dinitial = at::empty_like(x.initial_state);
      pass_through_empty(plan->cu, dfinal, dinitial);
    }
    by_width(plan->width, [&](auto types) {
      using S = typename decltype(types)::S;
      using R = typename decltype(types)::R;
      const KdaCall<S, R> call = call_of(types, x, *plan);
      const auto chunks = static_cast<int64_t>(call.chunks.size());
      Tensor ddt_partial = at::empty({chunks, heads * dim}, x.rate.options());
      Tensor da_partial = at::empty({chunks, heads}, x.rate.options());
      kda_backward(call,
                   data<R>(states),
                   data<S>(dout),
                   data<R>(dfinal),
                   KdaGradients<S, R>{mutable_data<S>(dq),
                                      mutable_data<S>(dk),
                                      mutable_data<S>(dv),
                                      mutable_data<S>(df),
                                      mutable_data<S>(dbeta),
                                      dinitial.defined() ? mutable_data<R>(dinitial) : nullptr,
                                      mutable_data<R>(ddt_partial),
                                      mutable_data<R>(da_partial)});
      if constexpr (std::is_same_v<R, float>) {
        if (plan->a_log.defined()) {
          const auto add = [&](const ExactSum& sum, int64_t n, const Tensor& partial) {
            sum.note(chunks, exact_merge(chunks, n, data<R>(partial), sum.high(), sum.low()));
          };
          add(plan->dt_bias, heads * dim, ddt_partial);
          add(plan->a_log, heads, da_partial);
          da = ddt = Tensor();
          return;
        }
      }
      merge_partials(chunks, heads * dim, data<R>(ddt_partial), mutable_data<R>(ddt));
      merge_partials(chunks, heads, data<R>(da_partial), mutable_data<R>(da));
    });
    return {dq,
            dk,
            dv,
            df,
            dbeta,
            da.defined() ? da.to(in[5].scalar_type()) : da,
            ddt.defined() ? ddt.to(in[6].scalar_type()) : ddt,
            dinitial,
            Tensor()};
  }
};

}  // namespace

KdaOutput kda_chunk(const KdaInput& in, const Numerics& num) {
  check_kda(in, num);
  auto plan = c10::make_intrusive<KdaPlan>();
  plan->mode = kda_mode(num, in.lower_bound, /*recurrent=*/false);
  if (plan->mode.chunk == 0) return kda_recurrent_reference(in, num);
  if (takes_device_form(in.q)) {
    const auto out = kda_chunk_kernel(in, num);
    return out ? *out : kda_chunk_reference(in, num);
  }
  plan->width = num.width();
  plan->cu = in.cu;
  check_exact({in.a_log, in.a_log_sum, nullptr}, num, "kda: a_log");
  check_exact({in.dt_bias, in.dt_bias_sum, nullptr}, num, "kda: dt_bias");
  LOCKSTEP_CHECK(in.a_log_sum.defined() == in.dt_bias_sum.defined(),
                 kShape,
                 "kda: a_log and dt_bias must both have exact sums or neither");
  plan->a_log = in.a_log_sum;
  plan->dt_bias = in.dt_bias_sum;
  const auto wants_gradient = [](const Tensor& t) { return t.defined() && t.requires_grad(); };
  plan->save_states = at::GradMode::is_enabled();
  bool any = false;
  for (const Tensor* t :
       {&in.q, &in.k, &in.v, &in.f, &in.beta_logit, &in.a_log, &in.dt_bias, &in.initial_state}) {
    any = any || wants_gradient(*t);
  }
  plan->save_states = plan->save_states && any;
  const variable_list out = KdaFunction::apply(in.q,
                                               in.k,
                                               in.v,
                                               in.f,
                                               in.beta_logit,
                                               in.a_log,
                                               in.dt_bias,
                                               present(in.initial_state),
                                               PlanPtr(plan));
  return {out[0], out[1]};
}

}  // namespace lockstep::model
