#pragma once

// Hyper-connection boundary of one token in float64 on the CPU, with the rounding points of
// HcForwardRounding or with none.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "model/ops/hc_cuda.hpp"

namespace lockstep::device_test {

constexpr int kStreams = 4, kWidth = 4096, kRow = kStreams * kWidth, kLogits = 24;

inline double from_bf16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}
/// Nearest bf16, ties to even, straight from float64.
inline double to_bf16(double value) {
  if (value == 0 || !std::isfinite(value)) return value;
  int exponent;
  std::frexp(value, &exponent);
  const double unit = std::ldexp(1.0, std::max(exponent - 8, -133));
  return std::nearbyint(value / unit) * unit;
}

struct HcParameters {
  std::vector<float> fn, base, scale, norm_weight;
  float norm_eps, eps;
  int sinkhorn_iters;
  model::HcForwardRounding rounding;
};

struct HcToken {
  std::array<double, 4> pre, post;
  std::array<double, 16> comb;
  std::vector<double> x_normed;
  std::array<double, kLogits> m;
  double r;
};

/// X' of one token. `rounded`: with the rounding points of the mix and its store.
inline void hc_mix(const uint16_t* x,
                   const uint16_t* y,
                   const float* post,
                   const float* comb,
                   const model::HcForwardRounding& r,
                   bool rounded,
                   double* to) {
  const auto coefficient = [&](float v) {
    return rounded && r.bf16_coefficients ? to_bf16(v) : double(v);
  };
  for (int j = 0; j < kStreams; ++j)
    for (int d = 0; d < kWidth; ++d) {
      double from_x = 0;
      for (int i = 0; i < kStreams; ++i)
        from_x += coefficient(comb[i * 4 + j]) * from_bf16(x[i * kWidth + d]);
      double from_y = coefficient(post[j]) * from_bf16(y[d]);
      if (rounded && r.three_mix_roundings) from_x = to_bf16(from_x), from_y = to_bf16(from_y);
      to[j * kWidth + d] = rounded ? to_bf16(from_x + from_y) : from_x + from_y;
    }
}

/// Everything after the mix, from streams z [4, 4096].
inline HcToken hc_collapse(const double* z, const HcParameters& p, bool rounded) {
  const auto& r = p.rounding;
  const auto bf16_if = [&](bool wanted, double v) { return rounded && wanted ? to_bf16(v) : v; };
  double square = 0;
  for (int k = 0; k < kRow; ++k) square += z[k] * z[k];
  const double norm = 1 / std::sqrt(square / kRow + p.norm_eps);
  HcToken out;
  out.r = norm;
  std::array<double, kLogits> m;
  for (int row = 0; row < kLogits; ++row) {
    double sum = 0;
    const float* fn = p.fn.data() + size_t(row) * kRow;
    if (rounded && r.bf16_fn) {
      for (int k = 0; k < kRow; ++k) sum += to_bf16(fn[k]) * z[k];
    } else {
      for (int k = 0; k < kRow; ++k) sum += double(fn[k]) * z[k];
    }
    const int which = row < 4 ? 0 : row < 8 ? 1 : 2;
    out.m[row] = sum * norm;
    m[row] = sum * norm * bf16_if(r.bf16_base_scale, p.scale[which]) +
             bf16_if(r.bf16_base_scale, p.base[row]);
  }
  const double eps = p.eps;
  for (int i = 0; i < 4; ++i) out.pre[i] = 1 / (1 + std::exp(-m[i])) + eps;
  for (int i = 0; i < 4; ++i) out.post[i] = 2 / (1 + std::exp(-m[4 + i]));
  auto& c = out.comb;
  for (int i = 0; i < 4; ++i) {
    const double* a = &m[8 + 4 * i];
    const double largest = std::max({a[0], a[1], a[2], a[3]});
    double sum = 0;
    for (int j = 0; j < 4; ++j) sum += c[4 * i + j] = std::exp(a[j] - largest);
    for (int j = 0; j < 4; ++j) c[4 * i + j] = c[4 * i + j] / sum + eps;
  }
  const auto normalise = [&](int step, int other) {
    for (int a = 0; a < 4; ++a) {
      double sum = eps;
      for (int b = 0; b < 4; ++b) sum += c[a * other + b * step];
      for (int b = 0; b < 4; ++b) c[a * other + b * step] /= sum;
    }
  };
  normalise(4, 1);  // columns
  for (int k = 1; k < p.sinkhorn_iters; ++k) normalise(1, 4), normalise(4, 1);
  out.x_normed.resize(kWidth);
  double collapsed = 0;
  for (int d = 0; d < kWidth; ++d) {
    double u = 0;
    for (int i = 0; i < 4; ++i) u += out.pre[i] * z[i * kWidth + d];
    out.x_normed[d] = bf16_if(true, u);
    const double seen = r.unrounded_statistic ? u : out.x_normed[d];
    collapsed += seen * seen;
  }
  const double inverse = 1 / std::sqrt(collapsed / kWidth + p.norm_eps);
  for (int d = 0; d < kWidth; ++d) {
    const double xhat = bf16_if(r.two_norm_roundings, out.x_normed[d] * inverse);
    out.x_normed[d] = bf16_if(true, xhat * bf16_if(r.bf16_norm_weight, p.norm_weight[d]));
  }
  return out;
}

}  // namespace lockstep::device_test
