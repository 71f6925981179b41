// Plain form of sparse MLA: gather, multiply, softmax, multiply, with the policy's roundings as
// dtype conversions, so that autograd rounds the gradients of bf16 nodes by itself.
#include <cmath>
#include <limits>

#include "model/ops/sparse_mla.hpp"
#include "model/ops/take_rows.hpp"

namespace lockstep::model {
namespace mla {

void check_arguments(const Tensor& q,
                     const Tensor& latent,
                     const Tensor& kv_b,
                     const Tensor& selection,
                     int64_t d_v,
                     const Numerics& num) {
  check_shape(q, {-1, -1, -1}, "sparse_mla: q [T, H, d_n]");
  check_shape(latent, {-1, -1}, "sparse_mla: latent [S, R]");
  LOCKSTEP_CHECK(
      q.size(1) >= 1 && q.size(2) >= 1 && d_v >= 1 && latent.size(1) >= 1,
      kShape,
      "sparse_mla: heads, d_n, d_v and R must be at least 1, got q {}, d_v {}, latent {}",
      describe(q),
      d_v,
      describe(latent));
  check_shape(kv_b,
              {q.size(1) * (q.size(2) + d_v), latent.size(1)},
              "sparse_mla: kv_b [H * (d_n + d_v), R]");
  check_shape(selection, {q.size(0), -1}, "sparse_mla: selection [T, width]");
  check_dtype(q, num.act(), "sparse_mla: q");
  check_dtype(latent, num.act(), "sparse_mla: latent");
  check_dtype(selection, at::kInt, "sparse_mla: selection");
  LOCKSTEP_CHECK(kv_b.scalar_type() == num.act() || kv_b.scalar_type() == num.acc(),
                 kShape,
                 "sparse_mla: kv_b: expected dtype {} or {}, got {}",
                 dtype_name(num.act()),
                 dtype_name(num.acc()),
                 describe(kv_b));
  LOCKSTEP_CHECK(latent.size(0) <= std::numeric_limits<int32_t>::max(),
                 kShape,
                 "sparse_mla: indices are int32, latent is {}",
                 describe(latent));
}

}  // namespace mla

namespace {

/// Identity whose gradient is rounded to bfloat16, as an operand of the backward products is.
struct RoundGradient : torch::autograd::Function<RoundGradient> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x.view_as(x); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& d) {
    return {d[0].to(at::kBFloat16).to(d[0].scalar_type())};
  }
};

/// Probabilities as they multiply the values [T, H, width], and what the result is divided by.
struct Softmax {
  Tensor p, divisor;
};

Softmax softmax_over_selected(const Tensor& dots_thw,
                              const Tensor& valid_tw,
                              double scale,
                              const Numerics& num) {
  const Tensor rounded = num.rounds<Switch::kMlaScores>("bf16")
                             ? (dots_thw.to(at::kBFloat16) * scale).to(num.acc())
                             : dots_thw * scale;
  const Tensor invalid = valid_tw.logical_not().unsqueeze(1);
  const Tensor none = valid_tw.any(-1, true).logical_not().unsqueeze(1);
  const Tensor scores = rounded.masked_fill(invalid, -std::numeric_limits<double>::infinity());
  const Tensor top = scores.size(-1) == 0
                         ? at::zeros({scores.size(0), scores.size(1), 1}, scores.options())
                         : scores.detach().amax(-1, true).masked_fill(none, 0);
  const Tensor e = (scores - top).exp();
  const Tensor sum = e.sum(-1, true).masked_fill(none, 1);
  if (num.rounds<Switch::kMlaProbabilities>("normalised")) {
    return {(e / sum).to(at::kBFloat16).to(num.acc()), at::ones_like(sum)};
  }
  if (num.rounds<Switch::kMlaProbabilities>("unnormalised")) {
    // The rounding moves values only: the gradient passes through unrounded.
    return {e + (e.detach().to(at::kBFloat16).to(num.acc()) - e.detach()), sum};
  }
  return {e, sum};
}

}  // namespace

Tensor sparse_mla_reference(const Tensor& q,
                            const Tensor& latent,
                            const Tensor& kv_b,
                            const Tensor& selection,
                            int64_t d_v,
                            const Numerics& num) {
  mla::check_arguments(q, latent, kv_b, selection, d_v, num);
  const int64_t tokens = q.size(0), heads = q.size(1), d_n = q.size(2), rank = latent.size(1);
  const int64_t width = selection.size(1);
  const double scale = std::pow(static_cast<double>(d_n), -0.5);
  const Tensor valid = selection >= 0;
  const Tensor index = selection.clamp_min(0).to(at::kLong).flatten();
  const Tensor w = kv_b.to(num.acc()).reshape({heads, d_n + d_v, rank});
  const Tensor wk = w.slice(1, 0, d_n), wv = w.slice(1, d_n);
  const auto act = [&](const Tensor& x) { return x.to(num.act()); };
  const auto acc = [&](const Tensor& x) { return x.to(num.acc()); };
  if (num.is<Switch::kMlaForm>("expanded")) {
    const Tensor kv = act(at::einsum("sr,hdr->shd", {acc(latent), w}));
    const Tensor selected =
        take_rows(acc(kv), index, num.acc()).reshape({tokens, width, heads, d_n + d_v});
    const Tensor k = selected.slice(3, 0, d_n), v = selected.slice(3, d_n);
    const Softmax softmax =
        softmax_over_selected(at::einsum("thd,twhd->thw", {acc(q), k}), valid, scale, num);
    return act(at::einsum("thw,twhv->thv", {softmax.p, v}) / softmax.divisor);
  }
  const Tensor qa = act(at::einsum("thd,hdr->thr", {acc(q), wk}));
  const Tensor c = take_rows(acc(latent), index, num.acc()).reshape({tokens, width, rank});
  const Tensor dots = at::einsum("thr,twr->thw", {acc(qa), c});
  const Softmax softmax =
      softmax_over_selected(num.is_bf16() ? RoundGradient::apply(dots) : dots, valid, scale, num);
  const Tensor a = act(at::einsum("thw,twr->thr", {softmax.p, c}) / softmax.divisor);
  return act(at::einsum("thr,hvr->thv", {acc(a), wv}));
}

}  // namespace lockstep::model
