#include "model/ops/conv.hpp"

#include "model/ops/conv_core.hpp"
#include "model/ops/kda_dispatch.hpp"
#include "model/ops/norm_core.hpp"

namespace lockstep::model {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct ConvMode {
  Width width;
  bool round_weight;  ///< D14
  bool product_form;  ///< D16
};

ConvMode mode_of(const Numerics& num) {
  return {num.width(),
          num.rounds<Switch::kConvWeight>("bf16"),
          num.is<Switch::kSiluForm>("x*sigmoid(x)")};
}

/// [W, C] in the accumulation dtype, rounded as the policy says.
Tensor weight_as_used(const Tensor& weight, const ConvMode& mode) {
  Tensor w = weight.detach();
  if (mode.round_weight) w = w.to(at::kBFloat16);
  return w.to(mode.width == Width::kFloat64 ? at::kDouble : at::kFloat).t().contiguous();
}

/// Rows may lie apart (a slice of a merged projection); channels must be adjacent.
Tensor rows_of(const Tensor& x) { return x.stride(1) == 1 || x.size(1) <= 1 ? x : x.contiguous(); }

template <typename T>
ConvCall<typename T::S, typename T::R> call_of(
    T, const Tensor& x, const Tensor& w, const Tensor& halo, bool product_form) {
  using S = typename T::S;
  using R = typename T::R;
  return {w.size(1), w.size(0), data<S>(x), x.stride(0), data<S>(halo), data<R>(w), product_form};
}

struct ConvFunction : torch::autograd::Function<ConvFunction> {
  static Tensor forward(AutogradContext* ctx,
                        const Tensor& x_in,
                        const Tensor& weight,
                        const std::optional<Tensor>& halo_arg,
                        const std::vector<int64_t>& cu,
                        int64_t width,
                        bool round_weight,
                        bool product_form) {
    const ConvMode mode{static_cast<Width>(width), round_weight, product_form};
    const Tensor halo_in = halo_arg.value_or(Tensor());
    ctx->save_for_backward({x_in, weight, halo_in});
    ctx->saved_data["cu"] = cu;
    ctx->saved_data["width"] = width;
    ctx->saved_data["round_weight"] = round_weight;
    ctx->saved_data["product_form"] = product_form;
    const Tensor x = rows_of(x_in), w = weight_as_used(weight, mode);
    const Tensor halo = halo_in.defined() ? halo_in.contiguous() : halo_in;
    Tensor y = at::empty(x.sizes(), x.options());
    by_width(mode.width, [&](auto types) {
      conv_forward(call_of(types, x, w, halo, product_form),
                   conv_blocks(cu),
                   mutable_data<typename decltype(types)::S>(y));
    });
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const ConvMode mode{static_cast<Width>(ctx->saved_data["width"].toInt()),
                        ctx->saved_data["round_weight"].toBool(),
                        ctx->saved_data["product_form"].toBool()};
    const Tensor x = rows_of(saved[0]), w = weight_as_used(saved[1], mode);
    const Tensor halo = saved[2].defined() ? saved[2].contiguous() : saved[2];
    const Tensor dy = grads[0].to(x.scalar_type()).contiguous();
    const auto blocks = conv_blocks(ctx->saved_data["cu"].toIntVector());
    Tensor dx = at::empty(x.sizes(), x.options()), dw = at::empty_like(w), dhalo;
    if (halo.defined()) dhalo = at::zeros_like(halo);
    by_width(mode.width, [&](auto types) {
      using S = typename decltype(types)::S;
      using R = typename decltype(types)::R;
      const auto count = static_cast<int64_t>(blocks.size());
      Tensor partial = at::empty({count, w.numel()}, w.options());
      conv_backward(call_of(types, x, w, halo, mode.product_form),
                    blocks,
                    data<S>(dy),
                    mutable_data<S>(dx),
                    halo.defined() ? mutable_data<S>(dhalo) : nullptr,
                    mutable_data<R>(partial));
      merge_partials(count, w.numel(), data<R>(partial), mutable_data<R>(dw));
    });
    return {dx,
            dw.t().to(saved[1].scalar_type()).contiguous(),
            dhalo,
            Tensor(),
            Tensor(),
            Tensor(),
            Tensor()};
  }
};

void check(const Tensor& x,
           const Tensor& weight,
           std::span<const int64_t> cu,
           const Tensor& halo,
           const Numerics& num) {
  check_float_cpu(x, "conv_silu: x");
  check_dtype(x, num.act(), "conv_silu: x");
  check_shape(x, {-1, -1}, "conv_silu: x");
  check_float_cpu(weight, "conv_silu: weight");
  check_shape(weight, {x.size(1), -1}, "conv_silu: weight");
  LOCKSTEP_CHECK(weight.size(1) >= 1,
                 kShape,
                 "conv_silu: weight: expected a width of at least 1, got {}",
                 describe(weight));
  check_boundaries(cu, x.size(0), "conv_silu: cu");
  if (!halo.defined()) return;
  const auto segments = static_cast<int64_t>(cu.size()) - 1;
  check_float_cpu(halo, "conv_silu: halo");
  check_dtype(halo, num.act(), "conv_silu: halo");
  check_shape(halo, {segments, weight.size(1) - 1, x.size(1)}, "conv_silu: halo");
}

}  // namespace

Tensor conv_silu(const Tensor& x,
                 const Tensor& weight,
                 std::span<const int64_t> cu,
                 const Tensor& halo,
                 const Numerics& num) {
  check(x, weight, cu, halo, num);
  const ConvMode mode = mode_of(num);
  return ConvFunction::apply(x,
                             weight,
                             present(halo),
                             std::vector<int64_t>(cu.begin(), cu.end()),
                             static_cast<int64_t>(mode.width),
                             mode.round_weight,
                             mode.product_form);
}

Tensor conv_silu_reference(const Tensor& x,
                           const Tensor& weight,
                           std::span<const int64_t> cu,
                           const Tensor& halo,
                           const Numerics& num) {
  check(x, weight, cu, halo, num);
  const ConvMode mode = mode_of(num);
  const Tensor w = round_through(weight.to(num.acc()), mode.round_weight);
  const int64_t channels = x.size(1), width = w.size(1);
  std::vector<Tensor> segments;
  for (size_t s = 0; s + 1 < cu.size(); ++s) {
    const int64_t length = cu[s + 1] - cu[s];
    const Tensor before = halo.defined() ? halo[static_cast<int64_t>(s)].to(num.acc())
                                         : at::zeros({width - 1, channels}, w.options());
    const Tensor in = at::cat({before, x.slice(0, cu[s], cu[s + 1]).to(num.acc())});
    Tensor pre = at::zeros({length, channels}, w.options());
    for (int64_t j = 0; j < width; ++j) {
      pre = pre + w.select(1, j) * in.slice(0, j, j + length);
    }
    segments.push_back(mode.product_form ? pre * pre.sigmoid() : pre / (1 + (-pre).exp()));
  }
  return at::cat(segments).to(num.act());
}

}  // namespace lockstep::model
