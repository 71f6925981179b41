// Gates and norms of one token, which the chunked and the recurrent form share. Rows are padded to
// whole vectors.
#pragma once

#include <cmath>

#include "model/ops/kda_core.hpp"

namespace lockstep::model {

/// g of one row, in place over f.
template <typename R>
inline void log_decay_row(const KdaMode& mode, R rate, const R* dt, int64_t width, R* f) {
  const R lb = static_cast<R>(mode.lower_bound);
  for (int64_t c = 0; c < width; c += simd::kLanes<R>) {
    const simd::Vec<R> z = simd::load(f + c) + simd::load(dt + c), x = simd::splat(rate) * z;
    simd::Vec<R> g{};
    switch (mode.gate) {
      case KdaMode::Gate::kSigmoid:
        g = simd::splat(lb) * simd::sigmoid(x);
        break;
      case KdaMode::Gate::kQuotient:
        g = simd::splat(lb) / (1 + simd::exp(-x));
        break;
      case KdaMode::Gate::kTanh:
        for (int64_t i = 0; i < simd::kLanes<R>; ++i) {
          g[i] = lb * (R(0.5) * std::tanh(R(0.5) * x[i]) + R(0.5));
        }
        break;
      case KdaMode::Gate::kSoftplus:
        for (int64_t i = 0; i < simd::kLanes<R>; ++i) {
          g[i] = -rate * (z[i] > 20 ? z[i] : std::log1p(std::exp(z[i])));
        }
        break;
    }
    simd::store(f + c, g);
  }
}

template <typename R>
inline R beta_of(const KdaMode& mode, R logit) {
  const R beta = mode.beta_tanh ? R(0.5) * std::tanh(R(0.5) * logit) + R(0.5)
                                : R(1) / (R(1) + std::exp(-logit));
  return mode.round_beta ? simd::round_bf16(beta) : beta;
}

template <typename R>
inline void normalise_row(const KdaMode& mode, int64_t width, R* x) {
  const R root = std::sqrt(simd::dot(x, x, width) + static_cast<R>(kL2Eps));
  const simd::Vec<R> divisor = simd::splat(root), factor = simd::splat(1 / root);
  for (int64_t c = 0; c < width; c += simd::kLanes<R>) {
    simd::Vec<R> v = simd::load(x + c);
    v = mode.l2_divides ? v / divisor : v * factor;
    simd::store(x + c, mode.round_normalised ? simd::round_bf16(v) : v);
  }
}

/// e^x, or 2^x when log2(e) is folded into the gate (D71).
template <typename R>
inline simd::Vec<R> power(const KdaMode& mode, simd::Vec<R> x) {
  return mode.base2 ? simd::exp2(x) : simd::exp(x);
}

}  // namespace lockstep::model
