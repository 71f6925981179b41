#pragma once

// Float64 per-token recurrence on the CPU: the truth the device kernels are compared with.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace lockstep::device_test {

inline float from_bf16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

/// One document and head. Rows are contiguous [length, 128]; state is [128 K, 128 V], updated.
struct HeadInput {
  const uint16_t *q, *k, *v, *f, *beta_logit;
  int64_t length;
  double a_log;
  const float* dt_bias;
  double lower_bound;
};

inline void kda_recurrence(const HeadInput& in, std::vector<double>& state, double* o) {
  constexpr int kD = 128;
  std::vector<double> q(kD), k(kD), alpha(kD), read(kD), delta(kD);
  const double scale = 1.0 / std::sqrt(128.0), slope = std::exp(in.a_log);
  for (int64_t t = 0; t < in.length; ++t) {
    double qq = 0, kk = 0;
    for (int c = 0; c < kD; ++c) {
      q[c] = from_bf16(in.q[t * kD + c]);
      k[c] = from_bf16(in.k[t * kD + c]);
      qq += q[c] * q[c];
      kk += k[c] * k[c];
      const double x = slope * (from_bf16(in.f[t * kD + c]) + static_cast<double>(in.dt_bias[c]));
      alpha[c] = std::exp(in.lower_bound / (1.0 + std::exp(-x)));
      read[c] = 0;
    }
    const double qn = 1.0 / std::sqrt(qq + 1e-6), kn = 1.0 / std::sqrt(kk + 1e-6);
    const double beta = 1.0 / (1.0 + std::exp(-static_cast<double>(from_bf16(in.beta_logit[t]))));
    for (int c = 0; c < kD; ++c) {
      double* row = &state[static_cast<size_t>(c) * kD];
      const double a = alpha[c], kc = k[c] * kn;
      for (int j = 0; j < kD; ++j) {
        row[j] *= a;
        read[j] += kc * row[j];
      }
    }
    for (int j = 0; j < kD; ++j) delta[j] = beta * (from_bf16(in.v[t * kD + j]) - read[j]);
    double* out = o + t * kD;
    for (int j = 0; j < kD; ++j) out[j] = 0;
    for (int c = 0; c < kD; ++c) {
      double* row = &state[static_cast<size_t>(c) * kD];
      const double kc = k[c] * kn, qc = q[c] * qn * scale;
      for (int j = 0; j < kD; ++j) {
        row[j] += kc * delta[j];
        out[j] += qc * row[j];
      }
    }
  }
}

}  // namespace lockstep::device_test
