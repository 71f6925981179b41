#include "model/ops/hyper_connection_checks.hpp"

namespace lockstep::model {
namespace {

constexpr int64_t kStep = 64;       // values per step of the device kernel's loop
constexpr int64_t kSmallCall = 32;  // tokens up to which the engine uses another kernel
constexpr int64_t kSmallCallSlices = 8;
constexpr int64_t kProcessors = 132;  // of the device whose split is reproduced

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

void check_parameter(const Tensor& t,
                     at::IntArrayRef sizes,
                     const Numerics& num,
                     const char* what) {
  check_shape(t, sizes, what);
  LOCKSTEP_CHECK(t.scalar_type() == num.act() || t.scalar_type() == num.acc(),
                 kShape,
                 "{}: expected dtype {} or {} under policy {}, got {}",
                 what,
                 dtype_name(num.act()),
                 dtype_name(num.acc()),
                 num.name(),
                 describe(t));
}

}  // namespace

HcShape check_hc_streams(const Tensor& x, const Numerics& num, const char* what) {
  const std::string name = std::string(what) + ": x";
  check_shape(x, {-1, -1, -1}, name);
  check_dtype(x, num.act(), name);
  LOCKSTEP_CHECK(x.size(1) >= 1 && x.size(2) >= 1,
                 kShape,
                 "{}: needs at least one stream and one channel, got {}",
                 name,
                 describe(x));
  return {x.size(0), x.size(1), x.size(2)};
}

HcShape check_hc_pre(const Tensor& x,
                     const Tensor& fn,
                     const Tensor& base,
                     const Tensor& scale,
                     const Tensor& norm_weight,
                     const HcParams& params,
                     const Numerics& num,
                     const Tensor& unrounded) {
  const HcShape shape = check_hc_streams(x, num, "hc_pre");
  check_parameter(fn, {shape.num_logits(), shape.row()}, num, "hc_pre: fn");
  check_parameter(base, {shape.num_logits()}, num, "hc_pre: base");
  check_parameter(scale, {3}, num, "hc_pre: scale");
  check_parameter(norm_weight, {shape.width}, num, "hc_pre: norm_weight");
  if (unrounded.defined()) {
    check_shape(unrounded, x.sizes(), "hc_pre: unrounded");
    check_dtype(unrounded, num.acc(), "hc_pre: unrounded");
  }
  LOCKSTEP_CHECK(params.sinkhorn_iters >= 1,
                 kConfig,
                 "hc_pre: hc_sinkhorn_iters must be at least 1, got {}",
                 params.sinkhorn_iters);
  LOCKSTEP_CHECK(params.norm_eps >= 0 && params.eps >= 0,
                 kConfig,
                 "hc_pre: epsilons must not be negative, got rms_norm_eps {} and hc_eps {}",
                 params.norm_eps,
                 params.eps);
  return shape;
}

HcShape check_hc_post(
    const Tensor& y, const Tensor& x, const Tensor& post, const Tensor& comb, const Numerics& num) {
  const HcShape shape = check_hc_streams(x, num, "hc_post");
  check_shape(y, {shape.tokens, shape.width}, "hc_post: y");
  check_dtype(y, num.act(), "hc_post: y");
  check_shape(post, {shape.tokens, shape.streams}, "hc_post: post");
  check_dtype(post, num.acc(), "hc_post: post");
  check_shape(comb, {shape.tokens, shape.streams, shape.streams}, "hc_post: comb");
  check_dtype(comb, num.acc(), "hc_post: comb");
  return shape;
}

int64_t hc_projection_slices(int64_t tokens, int64_t width, const Numerics& num) {
  if (num.is<Switch::kHcSplitK>("one")) return 1;
  if (num.is<Switch::kHcSplitK>("fixed") || tokens <= kSmallCall) return kSmallCallSlices;
  const int64_t filling = kProcessors / ceil_div(tokens, 64);
  return std::max<int64_t>(1, std::min(filling, ceil_div(width, kStep) / 4));
}

HcProjection hc_projection(const HcShape& shape, const Numerics& num) {
  HcProjection how{};
  how.normalise_first = num.is<Switch::kHcNormOrder>("norm-then-project");
  how.width = shape.row();
  const int64_t slices = hc_projection_slices(shape.tokens, how.width, num);
  how.slice_width = slices == 1 ? how.width : ceil_div(ceil_div(how.width, slices), kStep) * kStep;
  how.operands = HcOperands::kPlain;
  if (num.width() != Width::kFloat64) {
    const bool above = num.is<Switch::kHcProjection>("tf32-above-32") && shape.tokens > kSmallCall;
    if (above || num.is<Switch::kHcProjection>("tf32")) how.operands = HcOperands::kTf32;
    if (num.is<Switch::kHcProjection>("bf16x3")) how.operands = HcOperands::kBf16x3;
  }
  how.rows = num.is<Switch::kGemmRows>("fixed-tiles") ? RowTiles::kFixed : RowTiles::kLibrary;
  return how;
}

HcMix hc_mix(const Numerics& num) {
  return {num.rounds<Switch::kHcMixCoefficients>("bf16"),
          num.rounds<Switch::kHcMixRoundings>("3"),
          num.is<Switch::kHcMixOrder>("post-first")};
}

bool hc_wants_unrounded(int64_t tokens, const Numerics& num) {
  if (num.rounds<Switch::kHcStreamInput>("unrounded")) return true;
  return num.rounds<Switch::kHcStreamInput>("unrounded-upto-32") && tokens <= kSmallCall;
}

}  // namespace lockstep::model
