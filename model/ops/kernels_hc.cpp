#include "model/base/stash.hpp"
#include "model/ops/hc_cuda.hpp"
#include "model/ops/hyper_connection_checks.hpp"
#include "model/ops/kernels_support.hpp"

namespace lockstep::model {
namespace {

using namespace kernels;  // NOLINT(google-build-using-namespace)
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kStreams = 4, kWidth = 4096;
constexpr int64_t kMaxIterations = 64;  // of the backward kernel

bool takes_streams(const Tensor& x) {
  return takes(x) && x.size(1) == kStreams && x.size(2) == kWidth;
}

HcForwardRounding rounding_of(const Numerics& num) {
  const HcMix mix = hc_mix(num);
  return {.bf16_fn = num.rounds<Switch::kHcFn>("bf16"),
          .bf16_base_scale = num.rounds<Switch::kHcBaseScale>("bf16"),
          .bf16_coefficients = mix.round_coefficients,
          .three_mix_roundings = mix.three_roundings,
          .two_norm_roundings = num.rounds<Switch::kNormRoundings>("2"),
          .unrounded_statistic = num.is<Switch::kNormStatistic>("unrounded"),
          .bf16_norm_weight = num.rounds<Switch::kNormWeights>("bf16")};
}

struct PreInfo {
  HcParams params;
  HcForwardRounding rounding;
};

/// Operands of a collapse as both kernels take them.
struct PreOperands {
  Tensor x, fn, base, scale, weight;

  explicit PreOperands(const variable_list& in)
      : x(dense(in[0])),
        fn(wide(in[1])),
        base(wide(in[2])),
        scale(wide(in[3])),
        weight(wide(in[4])) {}

  template <typename Args>
  [[nodiscard]] Args args(const PreInfo& info) const {
    Args args;
    args.tokens = x.size(0);
    args.x = half_in(x);
    args.fn = float_in(fn);
    args.base = float_in(base);
    args.scale = float_in(scale);
    args.norm_weight = float_in(weight);
    args.norm_eps = static_cast<float>(info.params.norm_eps);
    args.eps = static_cast<float>(info.params.eps);
    args.sinkhorn_iters = static_cast<int>(info.params.sinkhorn_iters);
    args.rounding = info.rounding;
    return args;
  }
};

/// Operands of a mix likewise.
struct PostOperands {
  Tensor y, x, post, comb;

  explicit PostOperands(const variable_list& in)
      : y(dense(in[0])), x(dense(in[1])), post(dense(in[2])), comb(dense(in[3])) {}

  template <typename Args>
  [[nodiscard]] Args args(const HcForwardRounding& rounding) const {
    Args args;
    args.tokens = x.size(0);
    args.x = half_in(x);
    args.y = half_in(y);
    args.post = float_in(post);
    args.comb = float_in(comb);
    args.rounding = rounding;
    return args;
  }
};

void run(const HcForwardArgs& args, const Tensor& x) {
  const size_t bytes = hc_forward_workspace_bytes();
  const Tensor scratch = workspace(bytes, x);
  must_run(hc_forward(args, scratch.mutable_data_ptr(), bytes, stream_of(x)), "hc_forward");
}
void run(const HcBackwardArgs& args, const Tensor& x) {
  const size_t bytes = hc_backward_workspace_bytes(args.tokens);
  const Tensor scratch = workspace(bytes, x);
  must_run(hc_backward(args, scratch.mutable_data_ptr(), bytes, stream_of(x)), "hc_backward");
}

Tensor like(const Tensor& t) { return at::empty(t.sizes(), t.options()); }

/// Collapse of the streams alone: the kernel's first boundary.
class PreKernel : public torch::autograd::Function<PreKernel> {
 public:
  static variable_list forward(AutogradContext* ctx,
                               const Tensor& x_in,
                               const Tensor& fn_in,
                               const Tensor& base_in,
                               const Tensor& scale_in,
                               const Tensor& weight_in,
                               const PreInfo& info) {
    const PreOperands in({x_in, fn_in, base_in, scale_in, weight_in});
    const int64_t tokens = in.x.size(0), logits = in.fn.size(0);
    const auto floats = [&](at::IntArrayRef sizes) { return at::empty(sizes, in.fn.options()); };
    Tensor x_normed = at::empty({tokens, kWidth}, in.x.options());
    Tensor post = floats({tokens, kStreams}), comb = floats({tokens, kStreams, kStreams});
    const Tensor m = floats({tokens, logits}), r = floats({tokens});
    auto args = in.args<HcForwardArgs>(info);
    args.x_normed = half_out(x_normed);
    args.post_next = float_out(post);
    args.comb_next = float_out(comb);
    args.m_next = float_out(m);
    args.r_next = float_out(r);
    run(args, in.x);
    ctx->save_for_backward({x_in, fn_in, base_in, scale_in, weight_in, m, r});
    stash(ctx, info);
    return {x_normed, post, comb};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const PreInfo& info = stashed<PreInfo>(ctx);
    const PreOperands in(saved);
    const Tensor &m = saved[5], &r = saved[6];
    const Tensor dx_normed = dense(grads[0]), dpost = wide(grads[1]), dcomb = wide(grads[2]);
    // What reads the streams later has its own node in the graph.
    const Tensor none = at::zeros_like(in.x), dx = like(in.x), dfn = like(in.fn),
                 dbase = like(in.base), dscale = like(in.scale), dweight = like(in.weight);
    auto args = in.args<HcBackwardArgs>(info);
    args.m = float_in(m);
    args.r = float_in(r);
    args.dx_next = half_in(none);
    args.dx_normed = half_in(dx_normed);
    args.dpost_next = float_in(dpost);
    args.dcomb_next = float_in(dcomb);
    args.dx = half_out(dx);
    args.dfn = float_out(dfn);
    args.dbase = float_out(dbase);
    args.dscale = float_out(dscale);
    args.dnorm_weight = float_out(dweight);
    run(args, in.x);
    return {dx,
            dfn.to(saved[1].scalar_type()),
            dbase.to(saved[2].scalar_type()),
            dscale.to(saved[3].scalar_type()),
            dweight.to(saved[4].scalar_type()),
            Tensor()};
  }
};

/// Mix alone: the kernel's last boundary.
class PostKernel : public torch::autograd::Function<PostKernel> {
 public:
  static Tensor forward(AutogradContext* ctx,
                        const Tensor& y_in,
                        const Tensor& x_in,
                        const Tensor& post_in,
                        const Tensor& comb_in,
                        const HcForwardRounding& rounding) {
    const PostOperands in({y_in, x_in, post_in, comb_in});
    Tensor out = like(in.x);
    auto args = in.args<HcForwardArgs>(rounding);
    args.x_next = half_out(out);
    run(args, in.x);
    ctx->save_for_backward({y_in, x_in, post_in, comb_in});
    stash(ctx, rounding);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const PostOperands in(saved);
    const Tensor dout = dense(grads[0]);
    const Tensor dy = like(in.y), dx = like(in.x), dpost = like(in.post), dcomb = like(in.comb);
    auto args = in.args<HcBackwardArgs>(stashed<HcForwardRounding>(ctx));
    args.dx_next = half_in(dout);
    args.dx = half_out(dx);
    args.dy = half_out(dy);
    args.dpost = float_out(dpost);
    args.dcomb = float_out(dcomb);
    run(args, in.x);
    return {dy, dx, dpost, dcomb, Tensor()};
  }
};

}  // namespace

std::optional<HcPre> hc_pre_kernel(const Tensor& x,
                                   const Tensor& fn,
                                   const Tensor& base,
                                   const Tensor& scale,
                                   const Tensor& norm_weight,
                                   const HcParams& params,
                                   const Numerics& num,
                                   const Tensor& unrounded) {
  if (!takes_streams(x) || unrounded.defined() || params.sinkhorn_iters > kMaxIterations ||
      hc_projection({x.size(0), x.size(1), x.size(2)}, num).operands == HcOperands::kTf32)
    return std::nullopt;
  const variable_list out =
      PreKernel::apply(x, fn, base, scale, norm_weight, PreInfo{params, rounding_of(num)});
  return HcPre{out[0], out[1], out[2]};
}

std::optional<Tensor> hc_post_kernel(
    const Tensor& y, const Tensor& x, const Tensor& post, const Tensor& comb, const Numerics& num) {
  const HcForwardRounding rounding = rounding_of(num);
  if (!takes_streams(x) || (!rounding.three_mix_roundings && !hc_mix(num).post_first))
    return std::nullopt;
  return PostKernel::apply(y, x, post, comb, rounding);
}

}  // namespace lockstep::model
