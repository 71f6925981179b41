// The plain form of the hyper-connection operators: ATen and autograd, one line per line of the
// mathematics in the header.
#include "model/ops/hyper_connection.hpp"
#include "model/ops/hyper_connection_checks.hpp"
#include "model/ops/op_support.hpp"

namespace lockstep::model {
namespace {

/// 10 explicit mantissa bits, gradient passed through.
Tensor as_tf32(const Tensor& x) {
  const Tensor source = x.detach().cpu().contiguous();
  Tensor result = at::empty_like(source);
  const float* from = cdata<float>(source);
  float* to = data<float>(result);
  for (int64_t i = 0; i < source.numel(); ++i) to[i] = round_tf32(from[i]);
  return x + (result - source).to(x.device());
}

/// z [T, K] times fn [P, K] transposed, in the arithmetic of D05 and the partial sums of D06.
Tensor project(Tensor z_TK, Tensor fn_PK, const HcProjection& how) {
  if (how.operands == HcOperands::kTf32) {
    z_TK = as_tf32(z_TK);
    fn_PK = as_tf32(fn_PK);
  }
  std::vector<Tensor> terms = {fn_PK};  // of descending size
  if (how.operands == HcOperands::kBf16x3) {
    const auto bf16 = [](const Tensor& v) { return v.to(at::kBFloat16).to(at::kFloat); };
    const Tensor first = bf16(fn_PK.detach());
    const Tensor second = bf16(fn_PK.detach() - first);
    const Tensor third = bf16(fn_PK.detach() - first - second);
    terms = {fn_PK + (first - fn_PK.detach()), second, third};
  }
  Tensor sum;
  for (int64_t begin = 0; begin < how.width; begin += how.slice_width) {
    const int64_t end = std::min(begin + how.slice_width, how.width);
    Tensor partial;
    for (auto term = terms.rbegin(); term != terms.rend(); ++term) {
      const Tensor product = at::matmul(z_TK.slice(1, begin, end), term->slice(1, begin, end).t());
      partial = partial.defined() ? partial + product : product;
    }
    sum = sum.defined() ? sum + partial : partial;
  }
  return sum;
}

}  // namespace

HcPre hc_pre_reference(const Tensor& x,
                       const Tensor& fn,
                       const Tensor& base,
                       const Tensor& scale,
                       const Tensor& norm_weight,
                       const HcParams& params,
                       const Numerics& num,
                       const Tensor& unrounded) {
  const HcShape shape = check_hc_pre(x, fn, base, scale, norm_weight, params, num, unrounded);
  const HcProjection how = hc_projection(shape, num);
  const int64_t T = shape.tokens, n = shape.streams, D = shape.width;
  const bool bf16_base = num.rounds<Switch::kHcBaseScale>("bf16");
  const Tensor fn_PK = param_as_used(fn, num.rounds<Switch::kHcFn>("bf16"), num);
  const Tensor base_P = param_as_used(base, bf16_base, num);
  const Tensor scale_3 = param_as_used(scale, bf16_base, num);
  const Tensor weight_D = param_as_used(norm_weight, num.rounds<Switch::kNormWeights>("bf16"), num);

  const Tensor x_TnD = x.to(num.acc());
  Tensor z_TK = x_TnD.reshape({T, n * D});
  if (unrounded.defined()) {
    const Tensor seen = z_TK.detach();
    z_TK = z_TK + (unrounded.reshape({T, n * D}) - seen);  // exact: the two are close
  }

  const Tensor r_T1 = at::rsqrt(z_TK.square().mean({1}, true) + params.norm_eps);
  const Tensor m_TP =
      how.normalise_first ? project(z_TK * r_T1, fn_PK, how) : project(z_TK, fn_PK, how) * r_T1;

  const auto logits = [&](int64_t begin, int64_t count, int64_t which) {
    return m_TP.slice(1, begin, begin + count) * scale_3[which] +
           base_P.slice(0, begin, begin + count);
  };
  const Tensor pre_Tn = at::sigmoid(logits(0, n, 0)) + params.eps;
  const Tensor post_Tn = at::sigmoid(logits(n, n, 1)) * 2;
  Tensor c_Tnn = at::softmax(logits(2 * n, n * n, 2).reshape({T, n, n}), 2) + params.eps;
  c_Tnn = c_Tnn / (c_Tnn.sum({1}, true) + params.eps);
  for (int64_t i = 1; i < params.sinkhorn_iters; ++i) {
    c_Tnn = c_Tnn / (c_Tnn.sum({2}, true) + params.eps);
    c_Tnn = c_Tnn / (c_Tnn.sum({1}, true) + params.eps);
  }

  Tensor u_TD = pre_Tn.slice(1, 0, 1) * x_TnD.select(1, 0);
  for (int64_t i = 1; i < n; ++i) {
    u_TD = u_TD + pre_Tn.slice(1, i, i + 1) * x_TnD.select(1, i);
  }
  const Tensor stored_TD = rounded(u_TD, num);
  const Tensor& measured_TD = num.is<Switch::kNormStatistic>("unrounded") ? u_TD : stored_TD;
  const Tensor inverse_T1 = at::rsqrt(measured_TD.square().mean({1}, true) + params.norm_eps);
  Tensor xhat_TD = stored_TD * inverse_T1;
  if (num.rounds<Switch::kNormRoundings>("2")) xhat_TD = rounded(xhat_TD, num);
  return {(xhat_TD * weight_D).to(num.act()), post_Tn, c_Tnn};
}

Tensor hc_post_reference(
    const Tensor& y, const Tensor& x, const Tensor& post, const Tensor& comb, const Numerics& num) {
  const HcShape shape = check_hc_post(y, x, post, comb, num);
  const HcMix mix = hc_mix(num);
  const Tensor post_Tn = mix.round_coefficients ? rounded(post, num) : post;
  const Tensor comb_Tnn = mix.round_coefficients ? rounded(comb, num) : comb;
  const Tensor x_TnD = x.to(num.acc());
  const Tensor from_y_TnD = post_Tn.unsqueeze(2) * y.to(num.acc()).unsqueeze(1);
  Tensor mixed;
  if (mix.three_roundings || !mix.post_first) {
    const Tensor from_x_TnD = at::matmul(comb_Tnn.transpose(1, 2), x_TnD);
    mixed = mix.three_roundings ? rounded(from_y_TnD, num) + rounded(from_x_TnD, num)
                                : from_x_TnD + from_y_TnD;
  } else {
    mixed = from_y_TnD;
    for (int64_t i = 0; i < shape.streams; ++i) {
      mixed = mixed + comb_Tnn.select(1, i).unsqueeze(2) * x_TnD.select(1, i).unsqueeze(1);
    }
  }
  return mixed.to(num.act());
}

Tensor hc_mean_reference(const Tensor& x, const Numerics& num) {
  check_hc_streams(x, num, "hc_mean");
  const int64_t n = x.size(1);
  if (!num.is<Switch::kFinalMean>("sequential")) return x.to(num.acc()).mean(1).to(num.act());
  const Tensor x_TnD = x.to(num.acc());
  Tensor sum_TD = x_TnD.select(1, 0);
  for (int64_t i = 1; i < n; ++i) sum_TD = rounded(sum_TD + x_TnD.select(1, i), num);
  return (sum_TD / n).to(num.act());
}

}  // namespace lockstep::model
