#pragma once

// Backward of the hyper-connection boundary for one token in float64 on the CPU. The forward part
// has the rounding points of HcForwardRounding (or none); gradients are exact, beside them the ones
// that operators which round every gradient to bf16 would pass on.

#include "tests/device/hc_reference.hpp"

namespace lockstep::device_test {

struct HcTokenInputs {  // null where the boundary has no such part
  const uint16_t *x, *y, *dx_next, *dx_normed;
  const float *post, *comb, *dpost_next, *dcomb_next;
};

struct HcTokenGradients {
  std::vector<double> dx, dy, dpost, dcomb;
};

/// Sums over tokens.
struct HcParameterGradients {
  std::vector<double> fn, base, scale, norm_weight;
  HcParameterGradients()
      : fn(size_t{kLogits} * kRow), base(kLogits), scale(3), norm_weight(kWidth) {}
  void add(const HcParameterGradients& o) {
    const auto sum = [](std::vector<double>& to, const std::vector<double>& from) {
      for (size_t i = 0; i < to.size(); ++i) to[i] += from[i];
    };
    sum(fn, o.fn), sum(base, o.base), sum(scale, o.scale), sum(norm_weight, o.norm_weight);
  }
};

/// Gradient of the logits' 4x4 part through Sinkhorn and softmax; a: logits, d: gradient of comb.
inline std::array<double, 16> hc_undo_sinkhorn(const double* a,
                                               const HcParameters& p,
                                               std::array<double, 16> d) {
  const double eps = p.eps;
  std::array<double, 16> softmax, c;
  for (int i = 0; i < 4; ++i) {
    const double largest = *std::max_element(a + 4 * i, a + 4 * i + 4);
    double sum = 0;
    for (int j = 0; j < 4; ++j) sum += softmax[4 * i + j] = std::exp(a[4 * i + j] - largest);
    for (int j = 0; j < 4; ++j) softmax[4 * i + j] /= sum, c[4 * i + j] = softmax[4 * i + j] + eps;
  }
  std::vector<std::array<double, 16>> results;
  std::vector<std::array<double, 4>> sums;
  const auto strides = [](int step, int& member, int& group) {
    step % 2 == 0 ? (member = 4, group = 1) : (member = 1, group = 4);
  };
  const int steps = 2 * p.sinkhorn_iters - 1;
  for (int step = 0, member, group; step < steps; ++step) {
    strides(step, member, group);
    std::array<double, 4> sum;
    for (int g = 0; g < 4; ++g) {
      sum[g] = eps;
      for (int e = 0; e < 4; ++e) sum[g] += c[g * group + e * member];
      for (int e = 0; e < 4; ++e) c[g * group + e * member] /= sum[g];
    }
    results.push_back(c), sums.push_back(sum);
  }
  for (int step = steps - 1, member, group; step >= 0; --step) {
    strides(step, member, group);
    for (int g = 0; g < 4; ++g) {
      double along = 0;
      for (int e = 0; e < 4; ++e)
        along += d[g * group + e * member] * results[step][g * group + e * member];
      for (int e = 0; e < 4; ++e)
        d[g * group + e * member] = (d[g * group + e * member] - along) / sums[step][g];
    }
  }
  for (int i = 0; i < 4; ++i) {
    double along = 0;
    for (int j = 0; j < 4; ++j) along += d[4 * i + j] * softmax[4 * i + j];
    for (int j = 0; j < 4; ++j) d[4 * i + j] = softmax[4 * i + j] * (d[4 * i + j] - along);
  }
  return d;
}

/// `rounded`: the forward part has its rounding points. `plain` receives what operators give that
/// round the gradient of X' through the collapse, its sum with dx_next, and dx and dy.
inline void hc_backward_token(const HcTokenInputs& in,
                              const HcParameters& p,
                              bool rounded,
                              HcTokenGradients& exact,
                              HcTokenGradients& plain,
                              HcParameterGradients& sums) {
  const auto& rounding = p.rounding;
  const auto bf16_if = [&](bool wanted, double v) { return rounded && wanted ? to_bf16(v) : v; };
  std::vector<double> z(kRow);
  if (in.y != nullptr) {
    hc_mix(in.x, in.y, in.post, in.comb, rounding, rounded, z.data());
  } else {
    for (int k = 0; k < kRow; ++k) z[k] = from_bf16(in.x[k]);
  }
  std::vector<double> d(kRow), d_plain(kRow);
  for (int k = 0; k < kRow; ++k) d[k] = d_plain[k] = from_bf16(in.dx_next[k]);
  if (in.dx_normed != nullptr) {
    double square = 0;
    for (int k = 0; k < kRow; ++k) square += z[k] * z[k];
    const double r = 1 / std::sqrt(square / kRow + p.norm_eps);
    std::vector<double> fn(p.fn.begin(), p.fn.end());
    if (rounded && rounding.bf16_fn)
      for (double& v : fn) v = to_bf16(v);
    std::array<double, kLogits> m, logit, dlogit, dm;
    std::array<double, 3> scale;
    for (int k = 0; k < 3; ++k) scale[k] = bf16_if(rounding.bf16_base_scale, p.scale[k]);
    for (int row = 0; row < kLogits; ++row) {
      double sum = 0;
      for (int k = 0; k < kRow; ++k) sum += fn[size_t(row) * kRow + k] * z[k];
      m[row] = sum * r;
      logit[row] = m[row] * scale[row < 4   ? 0
                                  : row < 8 ? 1
                                            : 2] +
                   bf16_if(rounding.bf16_base_scale, p.base[row]);
    }
    const auto sigmoid = [](double v) { return 1 / (1 + std::exp(-v)); };
    std::array<double, 4> pre, dpre{};
    for (int i = 0; i < 4; ++i) pre[i] = sigmoid(logit[i]) + p.eps;
    std::vector<double> u(kWidth), stored(kWidth), du(kWidth), dxhat(kWidth);
    double measure = 0;
    for (int c = 0; c < kWidth; ++c) {
      for (int i = 0; i < 4; ++i) u[c] += pre[i] * z[i * kWidth + c];
      stored[c] = bf16_if(true, u[c]);
      if (!rounding.unrounded_statistic) u[c] = stored[c];
      measure += u[c] * u[c];
    }
    const double inverse = 1 / std::sqrt(measure / kWidth + p.norm_eps);
    double along = 0;
    for (int c = 0; c < kWidth; ++c) {
      const double g = from_bf16(in.dx_normed[c]);
      sums.norm_weight[c] += g * bf16_if(rounding.two_norm_roundings, stored[c] * inverse);
      dxhat[c] = g * bf16_if(rounding.bf16_norm_weight, p.norm_weight[c]);
      along += dxhat[c] * stored[c];
    }
    along *= inverse * inverse * inverse / kWidth;
    for (int c = 0; c < kWidth; ++c) {
      du[c] = inverse * dxhat[c] - along * u[c];
      for (int i = 0; i < 4; ++i) dpre[i] += du[c] * z[i * kWidth + c];
    }
    std::array<double, 16> dcomb;
    for (int k = 0; k < 16; ++k) dcomb[k] = in.dcomb_next[k];
    dcomb = hc_undo_sinkhorn(&logit[8], p, dcomb);
    for (int i = 0; i < 4; ++i) {
      dlogit[i] = dpre[i] * sigmoid(logit[i]) * sigmoid(-logit[i]);
      dlogit[4 + i] = 2 * in.dpost_next[i] * sigmoid(logit[4 + i]) * sigmoid(-logit[4 + i]);
    }
    std::copy(dcomb.begin(), dcomb.end(), dlogit.begin() + 8);
    double dr = 0;
    for (int row = 0; row < kLogits; ++row) {
      const int which = row < 4 ? 0 : row < 8 ? 1 : 2;
      sums.base[row] += dlogit[row];
      sums.scale[which] += dlogit[row] * m[row];
      dm[row] = dlogit[row] * scale[which] * r;
      dr += dm[row] * m[row] / (r * r);
      for (int k = 0; k < kRow; ++k) sums.fn[size_t(row) * kRow + k] += dm[row] * z[k];
    }
    const double through_r = r * r * r * dr / kRow;
    std::vector<double> dz(kRow);
    for (int row = 0; row < kLogits; ++row)
      for (int k = 0; k < kRow; ++k) dz[k] += dm[row] * fn[size_t(row) * kRow + k];
    for (int k = 0; k < kRow; ++k) {
      const double collapse = pre[k / kWidth] * du[k % kWidth] + dz[k] - through_r * z[k];
      d[k] += collapse;
      d_plain[k] = to_bf16(d_plain[k] + to_bf16(collapse));
    }
  }
  if (in.y == nullptr) {
    exact.dx = d;
    plain.dx = d_plain;
    return;
  }
  const auto coefficient = [&](float v) { return bf16_if(rounding.bf16_coefficients, v); };
  const auto through_mix = [&](const std::vector<double>& grad, bool store, HcTokenGradients& to) {
    to.dx.assign(kRow, 0), to.dy.assign(kWidth, 0), to.dpost.assign(4, 0), to.dcomb.assign(16, 0);
    for (int j = 0; j < 4; ++j) {
      const double* g = &grad[j * kWidth];
      for (int c = 0; c < kWidth; ++c) {
        to.dy[c] += coefficient(in.post[j]) * g[c];
        to.dpost[j] += g[c] * from_bf16(in.y[c]);
      }
      for (int i = 0; i < 4; ++i)
        for (int c = 0; c < kWidth; ++c) {
          to.dx[i * kWidth + c] += coefficient(in.comb[i * 4 + j]) * g[c];
          to.dcomb[i * 4 + j] += g[c] * from_bf16(in.x[i * kWidth + c]);
        }
    }
    if (!store) return;
    for (double& v : to.dx) v = to_bf16(v);
    for (double& v : to.dy) v = to_bf16(v);
  };
  through_mix(d, false, exact);
  through_mix(d_plain, true, plain);
}

}  // namespace lockstep::device_test
