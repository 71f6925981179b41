#include "model/ops/conv.hpp"

#include "model/ops/conv_core.hpp"
#include "model/ops/device_kernels.hpp"
#include "model/ops/kda_dispatch.hpp"
#include "model/ops/norm_core.hpp"
#include "model/ops/weight_support.hpp"

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

/// Blocks of rows as segments: which start a segment, and which rows lie before the others.
struct Tiles {
  int64_t count = 0;
  Tensor first, segment_of_first;  ///< int64 [N]
  Tensor inner;                    ///< int64 [M]
  Tensor before;                   ///< int64 [M * depth]: rows before each inner block

  Tiles(const std::vector<int64_t>& bounds, const std::vector<int64_t>& cu, int64_t depth)
      : count(static_cast<int64_t>(bounds.size()) - 1) {
    std::vector<int64_t> first_list, segment_list, inner_list, before_list;
    size_t segment = 0;
    for (size_t i = 0; i + 1 < bounds.size(); ++i) {
      const int64_t begin = bounds[i];
      while (segment + 2 < cu.size() && cu[segment + 1] <= begin) ++segment;
      const int64_t inside = begin - cu[segment];
      LOCKSTEP_CHECK(bounds[i + 1] <= cu[segment + 1] && (inside == 0 || inside >= depth),
                     kShape,
                     "conv_silu: block [{}, {}) must lie in one segment, {} rows or none after its "
                     "start, but segment {} is [{}, {})",
                     begin,
                     bounds[i + 1],
                     depth,
                     segment,
                     cu[segment],
                     cu[segment + 1]);
      if (inside == 0) {
        first_list.push_back(static_cast<int64_t>(i));
        segment_list.push_back(static_cast<int64_t>(segment));
        continue;
      }
      inner_list.push_back(static_cast<int64_t>(i));
      for (int64_t row = begin - depth; row < begin; ++row) before_list.push_back(row);
    }
    first = at::tensor(first_list, at::kLong);
    segment_of_first = at::tensor(segment_list, at::kLong);
    inner = at::tensor(inner_list, at::kLong);
    before = at::tensor(before_list, at::kLong);
  }
};

struct ConvFunction : torch::autograd::Function<ConvFunction> {
  static Tensor forward(AutogradContext* ctx,
                        const Tensor& x_in,
                        const Tensor& weight,
                        const std::optional<Tensor>& halo_arg,
                        const std::vector<int64_t>& cu,
                        int64_t width,
                        bool round_weight,
                        bool product_form,
                        const Weight& exact) {
    const ConvMode mode{static_cast<Width>(width), round_weight, product_form};
    const Tensor halo_in = halo_arg.value_or(Tensor());
    ctx->save_for_backward({x_in, weight, halo_in});
    ctx->saved_data["cu"] = cu;
    ctx->saved_data["width"] = width;
    ctx->saved_data["round_weight"] = round_weight;
    ctx->saved_data["product_form"] = product_form;
    stash(ctx, exact);
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
    const Weight& exact = stashed<Weight>(ctx);
    const std::vector<int64_t> cu = ctx->saved_data["cu"].toIntVector();
    if (exact.blocks != nullptr) {
      variable_list result = backward_of_tiles(x, w, halo, dy, cu, mode, exact);
      if (!exact.sum.defined()) result[1] = result[1].to(saved[1].scalar_type());
      result.resize(8);
      return result;
    }
    const auto blocks = conv_blocks(cu);
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
            Tensor(),
            Tensor()};
  }

 private:
  /// dx, dw [C, W], dhalo with every block as a segment of its own.
  static variable_list backward_of_tiles(const Tensor& x,
                                         const Tensor& w,
                                         const Tensor& halo,
                                         const Tensor& dy,
                                         const std::vector<int64_t>& cu,
                                         const ConvMode& mode,
                                         const Weight& exact) {
    const std::vector<int64_t>& bounds = *exact.blocks;
    const int64_t depth = w.size(0) - 1, channels = w.size(1);
    const Tiles tiles(bounds, cu, depth);
    Tensor tile_halo = at::zeros({tiles.count, depth, channels}, x.options());
    const auto copy_rows = [](const Tensor& to, const Tensor& at, const Tensor& rows) {
      if (at.numel() > 0) to.index_copy_(0, at, rows);
    };
    copy_rows(tile_halo,
              tiles.inner,
              x.index_select(0, tiles.before).view({tiles.inner.size(0), depth, channels}));
    if (halo.defined())
      copy_rows(tile_halo, tiles.first, halo.index_select(0, tiles.segment_of_first));

    const auto blocks = conv_blocks(bounds);
    const auto count = static_cast<int64_t>(blocks.size());
    Tensor dx = at::empty(x.sizes(), x.options()), dtile_halo = at::zeros_like(tile_halo), dw;
    by_width(mode.width, [&](auto types) {
      using S = typename decltype(types)::S;
      using R = typename decltype(types)::R;
      Tensor partial = at::empty({count, w.numel()}, w.options());
      conv_backward(call_of(types, x, w, tile_halo, mode.product_form),
                    blocks,
                    data<S>(dy),
                    mutable_data<S>(dx),
                    mutable_data<S>(dtile_halo),
                    mutable_data<R>(partial));
      if constexpr (std::is_same_v<R, float>) {
        if (exact.sum.defined()) {
          const ExactSum by_tap(w.sizes(), "conv_silu: weight gradient");
          const float peak =
              exact_merge(count, w.numel(), data<R>(partial), by_tap.high(), by_tap.low());
          double *high = exact.sum.high(), *low = exact.sum.low();
          for (int64_t j = 0; j <= depth; ++j) {
            for (int64_t c = 0; c < channels; ++c) {
              high[c * (depth + 1) + j] += by_tap.high()[j * channels + c];
              low[c * (depth + 1) + j] += by_tap.low()[j * channels + c];
            }
          }
          exact.sum.note(count, peak);
          return;
        }
      }
      dw = at::empty_like(w);
      merge_partials(count, w.numel(), data<R>(partial), mutable_data<R>(dw));
    });
    const Tensor from_next =
        dtile_halo.index_select(0, tiles.inner).view({tiles.before.size(0), channels});
    copy_rows(dx, tiles.before, dx.index_select(0, tiles.before) + from_next);
    Tensor dhalo;
    if (halo.defined()) {
      dhalo = at::zeros_like(halo);
      copy_rows(dhalo, tiles.segment_of_first, dtile_halo.index_select(0, tiles.first));
    }
    return {dx, dw.defined() ? dw.t().contiguous() : dw, dhalo};
  }
};

void check(const Tensor& x,
           const Tensor& weight,
           std::span<const int64_t> cu,
           const Tensor& halo,
           const Numerics& num) {
  check_float(x, "conv_silu: x");
  check_dtype(x, num.act(), "conv_silu: x");
  check_shape(x, {-1, -1}, "conv_silu: x");
  check_float(weight, "conv_silu: weight");
  check_shape(weight, {x.size(1), -1}, "conv_silu: weight");
  LOCKSTEP_CHECK(weight.size(1) >= 1,
                 kShape,
                 "conv_silu: weight: expected a width of at least 1, got {}",
                 describe(weight));
  check_boundaries(cu, x.size(0), "conv_silu: cu");
  if (!halo.defined()) return;
  const auto segments = static_cast<int64_t>(cu.size()) - 1;
  check_float(halo, "conv_silu: halo");
  check_dtype(halo, num.act(), "conv_silu: halo");
  check_shape(halo, {segments, weight.size(1) - 1, x.size(1)}, "conv_silu: halo");
}

}  // namespace

Tensor conv_silu(const Tensor& x,
                 const Weight& weight,
                 std::span<const int64_t> cu,
                 const Tensor& halo,
                 const Numerics& num) {
  check(x, weight.value, cu, halo, num);
  check_exact(weight, x.size(0), num, "conv_silu: weight");
  if (takes_device_form(x)) {
    const auto y = conv_silu_kernel(x, weight.value, cu, halo, num);
    return y ? *y : conv_silu_reference(x, weight.value, cu, halo, num);
  }
  const ConvMode mode = mode_of(num);
  return ConvFunction::apply(x,
                             weight.value,
                             present(halo),
                             std::vector<int64_t>(cu.begin(), cu.end()),
                             static_cast<int64_t>(mode.width),
                             mode.round_weight,
                             mode.product_form,
                             Weight(Tensor(), weight.sum, weight.blocks));
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
