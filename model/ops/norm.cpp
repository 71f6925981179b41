#include "model/ops/norm.hpp"

#include "model/ops/kda_dispatch.hpp"
#include "model/ops/norm_core.hpp"
#include "model/ops/weight_support.hpp"

namespace lockstep::model {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// What the kernels need of the numerics policy.
struct NormMode {
  Width width;
  bool round_xhat;    ///< D11
  bool round_weight;  ///< D13
  double eps;
};

NormMode plain_mode(double eps, const Numerics& num) {
  return {num.width(),
          num.rounds<Switch::kNormRoundings>("2"),
          num.rounds<Switch::kNormWeights>("bf16"),
          eps};
}

NormMode gated_mode(double eps, const Numerics& num) {
  return {num.width(), false, false, num.is<Switch::kGatedNormEps>("1e-5") ? 1e-5 : eps};
}

at::ScalarType acc_of(Width width) { return width == Width::kFloat64 ? at::kDouble : at::kFloat; }

Tensor weight_as_used(const Tensor& weight, const NormMode& mode) {
  Tensor w = weight.detach().to(acc_of(mode.width));
  if (mode.round_weight) w = w.to(at::kBFloat16).to(at::kFloat);
  return w.contiguous();
}

template <typename T>
NormCall<typename T::S, typename T::R> call_of(
    T, const Tensor& x, const Tensor& gate, const Tensor& w, const NormMode& mode) {
  using S = typename T::S;
  using R = typename T::R;
  const int64_t dim = x.size(-1);
  return {dim == 0 ? 0 : x.numel() / dim,
          dim,
          data<S>(x),
          data<S>(gate),
          data<R>(w),
          static_cast<R>(mode.eps),
          mode.round_xhat};
}

Tensor forward_of(const Tensor& x, const Tensor& gate, const Tensor& weight, const NormMode& mode) {
  const Tensor w = weight_as_used(weight, mode);
  Tensor y = at::empty_like(x, at::MemoryFormat::Contiguous);
  by_width(mode.width, [&](auto types) {
    norm_forward(call_of(types, x, gate, w, mode), mutable_data<typename decltype(types)::S>(y));
  });
  return y;
}

struct NormFunction : torch::autograd::Function<NormFunction> {
  static Tensor forward(AutogradContext* ctx,
                        const Tensor& x,
                        const std::optional<Tensor>& gate_in,
                        const Tensor& weight,
                        int64_t width,
                        bool round_xhat,
                        bool round_weight,
                        double eps,
                        const ExactSum& sum) {
    const NormMode mode{static_cast<Width>(width), round_xhat, round_weight, eps};
    const Tensor gate = gate_in.value_or(Tensor());
    ctx->save_for_backward({x, gate, weight});
    ctx->saved_data["width"] = width;
    ctx->saved_data["round_xhat"] = round_xhat;
    ctx->saved_data["round_weight"] = round_weight;
    ctx->saved_data["eps"] = eps;
    stash(ctx, sum);
    return forward_of(x.contiguous(), gate.defined() ? gate.contiguous() : gate, weight, mode);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const NormMode mode{static_cast<Width>(ctx->saved_data["width"].toInt()),
                        ctx->saved_data["round_xhat"].toBool(),
                        ctx->saved_data["round_weight"].toBool(),
                        ctx->saved_data["eps"].toDouble()};
    const Tensor x = saved[0].contiguous();
    const Tensor gate = saved[1].defined() ? saved[1].contiguous() : saved[1];
    const Tensor w = weight_as_used(saved[2], mode);
    const Tensor dy = grads[0].to(x.scalar_type()).contiguous();
    const ExactSum& sum = stashed<ExactSum>(ctx);
    Tensor dx = at::empty_like(x), dgate, dw = at::empty_like(w);
    if (gate.defined()) dgate = at::empty_like(gate);
    by_width(mode.width, [&](auto types) {
      using S = typename decltype(types)::S;
      using R = typename decltype(types)::R;
      const NormCall<S, R> call = call_of(types, x, gate, w, mode);
      if (sum.defined()) {
        ExactRow exact(sum.high(), sum.low());
        norm_backward(call,
                      data<S>(dy),
                      mutable_data<S>(dx),
                      gate.defined() ? mutable_data<S>(dgate) : nullptr,
                      static_cast<R*>(nullptr),
                      &exact);
        sum.note(call.rows, exact.peak());
        return;
      }
      const int64_t blocks = norm_blocks(call.rows);
      Tensor partial = at::empty({blocks, call.dim}, w.options());
      norm_backward(call,
                    data<S>(dy),
                    mutable_data<S>(dx),
                    gate.defined() ? mutable_data<S>(dgate) : nullptr,
                    mutable_data<R>(partial));
      merge_partials(blocks, call.dim, data<R>(partial), mutable_data<R>(dw));
    });
    const Tensor dweight = sum.defined() ? Tensor() : dw.to(saved[2].scalar_type());
    return {dx, dgate, dweight, Tensor(), Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

void check(std::string_view op, const Tensor& x, const Tensor& weight, const Numerics& num) {
  check_float(x, fmt::format("{}: x", op));
  check_dtype(x, num.act(), fmt::format("{}: x", op));
  LOCKSTEP_CHECK(
      x.dim() >= 1, kShape, "{}: x: expected at least one dimension, got {}", op, describe(x));
  check_float(weight, fmt::format("{}: weight", op));
  check_shape(weight, {x.size(-1)}, fmt::format("{}: weight", op));
}

void check_gate(const Tensor& o, const Tensor& gate, const Numerics& num) {
  check_float(gate, "gated_rms_norm: gate");
  check_dtype(gate, num.act(), "gated_rms_norm: gate");
  check_shape(gate, o.sizes(), "gated_rms_norm: gate");
}

Tensor apply(const Tensor& x, const Tensor& gate, const Weight& weight, const NormMode& mode) {
  return NormFunction::apply(x,
                             present(gate),
                             weight.value,
                             static_cast<int64_t>(mode.width),
                             mode.round_xhat,
                             mode.round_weight,
                             mode.eps,
                             weight.sum);
}

Tensor xhat_of(const Tensor& x, double eps, at::ScalarType acc) {
  const Tensor wide = x.to(acc);
  return wide * (1 / (wide.square().mean(-1, /*keepdim=*/true) + eps).sqrt());
}

}  // namespace

Tensor rms_norm(const Tensor& x, const Weight& weight, double eps, const Numerics& num) {
  check("rms_norm", x, weight.value, num);
  check_exact(weight, num, "rms_norm: weight");
  if (takes_device_form(x)) return rms_norm_reference(x, weight.value, eps, num);
  return apply(x, Tensor(), weight, plain_mode(eps, num));
}

Tensor rms_norm_reference(const Tensor& x, const Tensor& weight, double eps, const Numerics& num) {
  check("rms_norm", x, weight, num);
  const NormMode mode = plain_mode(eps, num);
  const Tensor w = round_through(weight.to(num.acc()), mode.round_weight);
  return (w * round_through(xhat_of(x, eps, num.acc()), mode.round_xhat)).to(num.act());
}

Tensor gated_rms_norm(
    const Tensor& o, const Tensor& gate, const Weight& weight, double eps, const Numerics& num) {
  check("gated_rms_norm", o, weight.value, num);
  check_exact(weight, num, "gated_rms_norm: weight");
  check_gate(o, gate, num);
  if (takes_device_form(o)) return gated_rms_norm_reference(o, gate, weight.value, eps, num);
  return apply(o, gate, weight, gated_mode(eps, num));
}

Tensor gated_rms_norm_reference(
    const Tensor& o, const Tensor& gate, const Tensor& weight, double eps, const Numerics& num) {
  check("gated_rms_norm", o, weight, num);
  check_gate(o, gate, num);
  const NormMode mode = gated_mode(eps, num);
  const Tensor normed = weight.to(num.acc()) * xhat_of(o, mode.eps, num.acc());
  return (normed * gate.to(num.acc()).sigmoid()).to(num.act());
}

}  // namespace lockstep::model
