// The indexer on the CPU as device tests compare with it: pooling, rotation and quantisation with
// the operations of the CPU forms (their headers are used), scores in float64, selection by
// sorting.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "model/ops/fp8_kernel.hpp"
#include "model/ops/vector_exp.hpp"

namespace lockstep::device_test {

constexpr int kDim = 128, kHeads = 32;

inline float bf16_value(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}
inline uint16_t bf16_bits(float x) {
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(model::round_bf16(x)) >> 16);
}

inline double e4m3_value(uint8_t byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  const double value =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (byte & 0x80) != 0 ? -value : value;
}

/// One pool from its rows of k and gate.
inline void pool_row(const uint16_t* k,
                     const uint16_t* gate,
                     const float* ape,
                     int64_t kpool,
                     bool bf16_weights,
                     float* out) {
  for (int c = 0; c < kDim; ++c) {
    const auto score = [&](int64_t j) {
      return bf16_value(gate[j * kDim + c]) + ape[j * kDim + c];
    };
    float top = score(0), den = 0, sum = 0;
    for (int64_t j = 1; j < kpool; ++j) top = std::max(top, score(j));
    for (int64_t j = 0; j < kpool; ++j) {
      const float e = model::exp_of(score(j) - top);
      den += e;
      if (!bf16_weights) sum += e * bf16_value(k[j * kDim + c]);
    }
    if (bf16_weights)
      for (int64_t j = 0; j < kpool; ++j) {
        const float weight = model::round_bf16(model::exp_of(score(j) - top) / den);
        sum += model::round_bf16(weight * bf16_value(k[j * kDim + c]));
      }
    out[c] = model::round_bf16(bf16_weights ? sum : sum / den);
  }
}

/// x [128] bf16 values, in place if rotated; bytes [128]; returns the scale.
inline float quantise_row(float* x, bool rotate, bool pow2, uint8_t* bytes) {
  if (rotate) {
    for (int stride = 1; stride < kDim; stride *= 2)
      for (int base = 0; base < kDim; base += 2 * stride)
        for (int i = base; i < base + stride; ++i) {
          const float a = x[i], b = x[i + stride];
          x[i] = a + b;
          x[i + stride] = a - b;
        }
    const float scale = static_cast<float>(std::pow(128.0, -0.5));
    for (int i = 0; i < kDim; ++i) x[i] = model::round_bf16(x[i] * scale);
  }
  float top = 0;
  for (int i = 0; i < kDim; ++i) top = std::max(top, std::fabs(x[i]));
  const float scale =
      model::fp8_scale(top, pow2 ? model::Fp8Scale::kPow2 : model::Fp8Scale::kExact);
  for (int i = 0; i < kDim; ++i) bytes[i] = model::e4m3_encode(x[i] / scale);
  return scale;
}

/// The `budget` largest of scores [n], ascending; ties to the lower index, NaN largest.
inline std::vector<int64_t> best(const float* scores, int64_t n, int64_t budget, int64_t forced) {
  std::vector<int64_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), int64_t{0});
  if (n > budget) {
    const auto above = [&](int64_t i) { return i == forced || scores[i] != scores[i]; };
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      if (above(a) || above(b)) return above(a) && !above(b);
      return scores[a] > scores[b];
    });
    order.resize(static_cast<size_t>(budget));
    std::sort(order.begin(), order.end());
  }
  return order;
}

}  // namespace lockstep::device_test
