// The fast form of the hyper-connection operators: autograd functions around the kernels.
#include "model/ops/hyper_connection.hpp"

#include "model/base/parallel.hpp"
#include "model/ops/device_kernels.hpp"
#include "model/ops/hyper_connection_checks.hpp"
#include "model/ops/op_support.hpp"

namespace lockstep::model {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Everything about a call of hc_pre that has no gradient.
struct PreInfo {
  HcShape shape;
  HcProjection how;
  HcParams params;
  Numerics num;
  Tensor unrounded;                  ///< [T, n, D] acc, contiguous, or undefined
  ExactSum fn, base, scale, weight;  ///< all or none
  RowBlocks blocks;
};

/// fn as the projection multiplies with it: [terms, P, n D].
Tensor projection_terms(const Tensor& fn, const HcProjection& how) {
  if (how.operands == HcOperands::kTf32) {
    Tensor result = at::empty_like(fn);
    const float* from = cdata<float>(fn);
    float* to = data<float>(result);
    for (int64_t i = 0; i < fn.numel(); ++i) to[i] = round_tf32(from[i]);
    return result;
  }
  if (how.operands == HcOperands::kBf16x3) {
    const auto bf16 = [](const Tensor& v) { return v.to(at::kBFloat16).to(at::kFloat); };
    const Tensor first = bf16(fn), second = bf16(fn - first), third = bf16(fn - first - second);
    return at::stack({third, second, first});
  }
  return fn;
}

template <typename W>
HcPreInputs<W> pre_inputs(const PreInfo& info,
                          const Tensor& x,
                          const Tensor& fn,
                          const Tensor& terms,
                          const Tensor& base,
                          const Tensor& scale,
                          const Tensor& norm_weight) {
  using A = typename W::Acc;
  const bool tf32 = info.how.operands == HcOperands::kTf32;
  return {.shape = info.shape,
          .how = info.how,
          .sinkhorn_iters = info.params.sinkhorn_iters,
          .norm_eps = static_cast<A>(info.params.norm_eps),
          .eps = static_cast<A>(info.params.eps),
          .unrounded_statistic = info.num.is<Switch::kNormStatistic>("unrounded"),
          .two_roundings = info.num.rounds<Switch::kNormRoundings>("2"),
          .x = cdata<typename W::Act>(x),
          .unrounded = cdata<A>(info.unrounded),
          .fn = cdata<A>(tf32 ? terms : fn),
          .fn_terms = cdata<A>(terms),
          .base = cdata<A>(base),
          .scale = cdata<A>(scale),
          .norm_weight = cdata<A>(norm_weight)};
}

class PreFunction : public torch::autograd::Function<PreFunction> {
 public:
  /// Parameters in acc and contiguous, as used.
  static variable_list forward(AutogradContext* ctx,
                               const Tensor& x_TnD,
                               const Tensor& fn_PK,
                               const Tensor& base_P,
                               const Tensor& scale_3,
                               const Tensor& weight_D,
                               const PreInfo& info) {
    const int64_t T = info.shape.tokens, n = info.shape.streams;
    const auto acc = x_TnD.options().dtype(info.num.acc());
    Tensor x_normed = at::empty({T, info.shape.width}, x_TnD.options());
    Tensor post = at::empty({T, n}, acc), comb = at::empty({T, n, n}, acc);
    Tensor m = at::empty({T, info.shape.num_logits()}, acc), r = at::empty({T}, acc);
    with_width(info.num, [&]<typename W>() {
      using A = typename W::Acc;
      hc_pre_forward<W>(
          pre_inputs<W>(
              info, x_TnD, fn_PK, projection_terms(fn_PK, info.how), base_P, scale_3, weight_D),
          {.x_normed = data<typename W::Act>(x_normed),
           .post = data<A>(post),
           .comb = data<A>(comb),
           .m = data<A>(m),
           .r = data<A>(r)});
    });
    ctx->save_for_backward({x_TnD, fn_PK, base_P, scale_3, weight_D, m, r});
    stash(ctx, info);
    return {x_normed, post, comb};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const PreInfo& info = stashed<PreInfo>(ctx);
    const Tensor &x = saved[0], &fn = saved[1], &base = saved[2], &scale = saved[3],
                 &weight = saved[4];
    const Tensor dx_normed = grads[0].contiguous(), dpost = grads[1].contiguous(),
                 dcomb = grads[2].contiguous();
    const Tensor dx = at::empty_like(x);
    const auto run = [&](const Tensor& dfn,
                         const Tensor& dbase,
                         const Tensor& dscale,
                         const Tensor& dweight,
                         const HcExactSums* exact) {
      with_width(info.num, [&]<typename W>() {
        using A = typename W::Acc;
        hc_pre_backward<W>(
            pre_inputs<W>(info, x, fn, projection_terms(fn, info.how), base, scale, weight),
            {.m = cdata<A>(saved[5]),
             .r = cdata<A>(saved[6]),
             .dx_normed = cdata<typename W::Act>(dx_normed),
             .dpost = cdata<A>(dpost),
             .dcomb = cdata<A>(dcomb),
             .dx = data<typename W::Act>(dx),
             .dfn = data<A>(dfn),
             .dbase = data<A>(dbase),
             .dscale = data<A>(dscale),
             .dnorm_weight = data<A>(dweight),
             .exact = exact});
      });
    };
    if (info.fn.defined()) {
      add_exactly(info, [&](const HcExactSums& exact) { run({}, {}, {}, {}, &exact); });
      return {dx, {}, {}, {}, {}, {}};
    }
    const Tensor dfn = ctx->needs_input_grad(1) ? at::empty_like(fn) : Tensor(),
                 dbase = at::empty_like(base), dscale = at::empty_like(scale),
                 dweight = at::empty_like(weight);
    run(dfn, dbase, dscale, dweight, nullptr);
    return {dx, dfn, dbase, dscale, dweight, {}};
  }

 private:
  /// run(sums) adds to them.
  template <typename F>
  static void add_exactly(const PreInfo& info, F&& run) {
    const int64_t rest = info.shape.num_logits() + 3 + info.shape.width;
    ExactRow fn(info.fn.high(), info.fn.low());
    std::vector<double> high(static_cast<size_t>(rest)), low(high);
    ExactRow other(high.data(), low.data());
    run(HcExactSums{*info.blocks, &fn, &other});
    info.fn.note(num_blocks(info.blocks), fn.peak());
    size_t at = 0;
    for (const ExactSum* sum : {&info.base, &info.scale, &info.weight}) {
      double *to_high = sum->high(), *to_low = sum->low();
      for (int64_t i = 0; i < sum->sizes()[0]; ++i, ++at) {
        to_high[i] += high[at];
        to_low[i] += low[at];
      }
      sum->note(info.shape.tokens, other.peak());
    }
  }
};

struct PostInfo {
  HcShape shape;
  HcMix mix;
  Numerics num;
};

template <typename W>
HcPostInputs<W> post_inputs(const PostInfo& info,
                            const Tensor& y,
                            const Tensor& x,
                            const Tensor& post,
                            const Tensor& comb) {
  return {.shape = info.shape,
          .mix = info.mix,
          .y = cdata<typename W::Act>(y),
          .x = cdata<typename W::Act>(x),
          .post = cdata<typename W::Acc>(post),
          .comb = cdata<typename W::Acc>(comb)};
}

class PostFunction : public torch::autograd::Function<PostFunction> {
 public:
  static Tensor forward(AutogradContext* ctx,
                        const Tensor& y_TD,
                        const Tensor& x_TnD,
                        const Tensor& post_Tn,
                        const Tensor& comb_Tnn,
                        const PostInfo& info) {
    Tensor out = at::empty_like(x_TnD);
    with_width(info.num, [&]<typename W>() {
      hc_post_forward<W>(post_inputs<W>(info, y_TD, x_TnD, post_Tn, comb_Tnn),
                         data<typename W::Act>(out));
    });
    ctx->save_for_backward({y_TD, x_TnD, post_Tn, comb_Tnn});
    stash(ctx, info);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const PostInfo& info = stashed<PostInfo>(ctx);
    const Tensor dout = grads[0].contiguous();
    Tensor dy = at::empty_like(saved[0]), dx = at::empty_like(saved[1]),
           dpost = at::empty_like(saved[2]), dcomb = at::empty_like(saved[3]);
    with_width(info.num, [&]<typename W>() {
      using Act = typename W::Act;
      using A = typename W::Acc;
      hc_post_backward<W>(post_inputs<W>(info, saved[0], saved[1], saved[2], saved[3]),
                          cdata<Act>(dout),
                          data<Act>(dy),
                          data<Act>(dx),
                          data<A>(dpost),
                          data<A>(dcomb));
    });
    return {dy, dx, dpost, dcomb, {}};
  }
};

class CopyFunction : public torch::autograd::Function<CopyFunction> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& x_TD, int64_t n, const Numerics& num) {
    stash(ctx, num);
    return x_TD.unsqueeze(1).expand({x_TD.size(0), n, x_TD.size(1)}).contiguous();
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Numerics& num = stashed<Numerics>(ctx);
    Tensor sum = grads[0].select(1, 0).to(num.acc());
    for (int64_t i = 1; i < grads[0].size(1); ++i) sum = sum + grads[0].select(1, i).to(num.acc());
    return {sum.to(num.act()), {}, {}};
  }
};

class MeanFunction : public torch::autograd::Function<MeanFunction> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& x_TnD, const Numerics& num) {
    const int64_t T = x_TnD.size(0), n = x_TnD.size(1), D = x_TnD.size(2);
    const bool sequential = num.is<Switch::kFinalMean>("sequential");
    Tensor out = at::empty({T, D}, x_TnD.options());
    with_width(num, [&]<typename W>() {
      using A = typename W::Acc;
      const auto* x = cdata<typename W::Act>(x_TnD);
      auto* to = data<typename W::Act>(out);
      parallel_for(0, T, 32, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
          for (int64_t d = 0; d < D; ++d) {
            A sum = load(x + t * n * D + d);
            for (int64_t i = 1; i < n; ++i) {
              sum += load(x + (t * n + i) * D + d);
              if (sequential) sum = W::round(sum);
            }
            store(to + t * D + d, sum / static_cast<A>(n));
          }
        }
      });
    });
    ctx->saved_data["n"] = n;
    ctx->saved_data["acc"] = static_cast<int64_t>(num.acc());
    return out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const int64_t n = ctx->saved_data["n"].toInt();
    const auto acc = static_cast<at::ScalarType>(ctx->saved_data["acc"].toInt());
    const Tensor each = (grads[0].to(acc) / n).to(grads[0].scalar_type());
    return {each.unsqueeze(1).expand({each.size(0), n, each.size(1)}), {}};
  }
};

}  // namespace

HcPre hc_pre(const Tensor& x,
             const Weight& fn_weight,
             const Weight& base_weight,
             const Weight& scale_weight,
             const Weight& norm,
             const HcParams& params,
             const Numerics& num,
             const Tensor& unrounded) {
  const Tensor &fn = fn_weight.value, &base = base_weight.value, &scale = scale_weight.value,
               &norm_weight = norm.value;
  const HcShape shape = check_hc_pre(x, fn, base, scale, norm_weight, params, num, unrounded);
  for (const Weight* w : {&fn_weight, &base_weight, &scale_weight, &norm}) {
    check_exact(*w, x.size(0), num, "hc_pre: weight");
    LOCKSTEP_CHECK(w->sum.defined() == fn_weight.sum.defined(),
                   kShape,
                   "hc_pre: all weights must have exact sums or none");
  }
  if (takes_device_form(x)) {
    const auto pre = hc_pre_kernel(x, fn, base, scale, norm_weight, params, num, unrounded);
    return pre ? *pre : hc_pre_reference(x, fn, base, scale, norm_weight, params, num, unrounded);
  }
  const bool bf16_base = num.rounds<Switch::kHcBaseScale>("bf16");
  const bool bf16_weight = num.rounds<Switch::kNormWeights>("bf16");
  const auto results =
      PreFunction::apply(x.contiguous(),
                         param_as_used(fn, num.rounds<Switch::kHcFn>("bf16"), num).contiguous(),
                         param_as_used(base, bf16_base, num).contiguous(),
                         param_as_used(scale, bf16_base, num).contiguous(),
                         param_as_used(norm_weight, bf16_weight, num).contiguous(),
                         PreInfo{shape,
                                 hc_projection(shape, num),
                                 params,
                                 num,
                                 unrounded.defined() ? unrounded.detach().contiguous() : unrounded,
                                 fn_weight.sum,
                                 base_weight.sum,
                                 scale_weight.sum,
                                 norm.sum,
                                 fn_weight.blocks});
  return {results[0], results[1], results[2]};
}

Tensor hc_post(
    const Tensor& y, const Tensor& x, const Tensor& post, const Tensor& comb, const Numerics& num) {
  const HcShape shape = check_hc_post(y, x, post, comb, num);
  if (takes_device_form(x)) {
    const auto mixed = hc_post_kernel(y, x, post, comb, num);
    return mixed ? *mixed : hc_post_reference(y, x, post, comb, num);
  }
  return PostFunction::apply(y.contiguous(),
                             x.contiguous(),
                             post.contiguous(),
                             comb.contiguous(),
                             PostInfo{shape, hc_mix(num), num});
}

Tensor hc_post_unrounded(
    const Tensor& y, const Tensor& x, const Tensor& post, const Tensor& comb, const Numerics& num) {
  const HcShape shape = check_hc_post(y, x, post, comb, num);
  const Tensor y_TD = y.detach().contiguous(), x_TnD = x.detach().contiguous(),
               post_Tn = post.detach().contiguous(), comb_Tnn = comb.detach().contiguous();
  Tensor out = at::empty(x.sizes(), x_TnD.options().dtype(num.acc()));
  const PostInfo info{shape, hc_mix(num), num};
  with_width(num, [&]<typename W>() {
    hc_post_forward<W>(post_inputs<W>(info, y_TD, x_TnD, post_Tn, comb_Tnn),
                       data<typename W::Acc>(out));
  });
  return out;
}

Tensor hc_copy(const Tensor& x, int64_t n, const Numerics& num) {
  check_shape(x, {-1, -1}, "hc_copy: x");
  check_dtype(x, num.act(), "hc_copy: x");
  return CopyFunction::apply(x, n, num);
}

Tensor hc_mean(const Tensor& x, const Numerics& num) {
  check_hc_streams(x, num, "hc_mean");
  if (takes_device_form(x)) return hc_mean_reference(x, num);
  return MeanFunction::apply(x.contiguous(), num);
}

}  // namespace lockstep::model
