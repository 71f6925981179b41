// Scalar formats and the few vector helpers that files with hot loops share. No torch header.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace lockstep {

/// bfloat16 as stored; same bytes as torch's.
struct Bf16 {
  uint16_t bits;
};

/// Exact.
inline float to_float(Bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

/// Round to nearest, ties to even; NaN becomes the quiet NaN 0x7fc0.
inline Bf16 to_bf16(float x) {
  const auto u = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const bool is_nan = (u & 0x7fffffffu) > 0x7f800000u;
  return {static_cast<uint16_t>(is_nan ? 0x7fc0u : rounded)};
}

inline float round_bf16(float x) {
  const auto u = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
  const bool is_nan = (u & 0x7fffffffu) > 0x7f800000u;
  return std::bit_cast<float>(is_nan ? 0x7fc00000u : rounded);
}

/// 10 explicit mantissa bits, round to nearest, ties to even; infinities and NaN are kept.
inline float round_tf32(float x) {
  const auto u = std::bit_cast<uint32_t>(x);
  const bool finite = (u & 0x7f800000u) != 0x7f800000u;
  return std::bit_cast<float>(finite ? (u + 0xfffu + ((u >> 13) & 1u)) & 0xffffe000u : u);
}

/// The three widths as types: what activations are stored in and what is computed in. `round` is
/// the conversion to the activation dtype, seen from the accumulation dtype.
struct WidthF64 {
  using Act = double;
  using Acc = double;
  static double round(double x) { return x; }
};
struct WidthF32 {
  using Act = float;
  using Acc = float;
  static float round(float x) { return x; }
};
struct WidthBf16 {
  using Act = Bf16;
  using Acc = float;
  static float round(float x) { return round_bf16(x); }
};

inline double load(const double* p) { return *p; }
inline float load(const float* p) { return *p; }
inline float load(const Bf16* p) { return to_float(*p); }
inline void store(double* p, double x) { *p = x; }
inline void store(float* p, float x) { *p = x; }
inline void store(Bf16* p, float x) { *p = to_bf16(x); }

/// `count` values at src in the accumulation dtype: src itself, or a copy in scratch (which must
/// hold count values) where the stored dtype is narrower.
inline const double* widen(const double* src, double*, int64_t) { return src; }
inline const float* widen(const float* src, float*, int64_t) { return src; }
inline const float* widen(const Bf16* src, float* scratch, int64_t count) {
  for (int64_t i = 0; i < count; ++i) scratch[i] = to_float(src[i]);
  return scratch;
}

/// e^x within 0.7 ulp, with selects on bit patterns instead of branches, so that loops over it
/// vectorise. Below -87.33 (where a float result would be denormal) it is 0; above 88.72 infinity;
/// NaN stays NaN. The double form is the library's.
inline float exp_fast(float x) {
  constexpr float kLog2E = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer
  const auto u = std::bit_cast<uint32_t>(x);
  // All ones where true. As masks, not as conditions: the compiler would turn conditions into
  // jumps.
  const uint32_t below = 0u - static_cast<uint32_t>(u > std::bit_cast<uint32_t>(-87.33f));
  const uint32_t above =
      0u - static_cast<uint32_t>(static_cast<int32_t>(u) > std::bit_cast<int32_t>(89.0f));
  const uint32_t is_nan = 0u - static_cast<uint32_t>((u & 0x7fffffffu) > 0x7f800000u);
  const uint32_t inside = (u & ~(below | above)) | (std::bit_cast<uint32_t>(-87.33f) & below) |
                          (std::bit_cast<uint32_t>(89.0f) & above);
  const float clamped = std::bit_cast<float>(inside);
  const float shifted = clamped * kLog2E + kMagic;
  const float n = shifted - kMagic;
  float r = std::fma(n, -kLn2High, clamped);
  r = std::fma(n, -kLn2Low, r);
  float p = 1.0f / 5040.0f;
  p = std::fma(p, r, 1.0f / 720.0f);
  p = std::fma(p, r, 1.0f / 120.0f);
  p = std::fma(p, r, 1.0f / 24.0f);
  p = std::fma(p, r, 1.0f / 6.0f);
  p = std::fma(p, r, 0.5f);
  p = std::fma(p, r, 1.0f);
  p = std::fma(p, r, 1.0f);
  // 2^n in two factors: n = 128 is reached just below the overflow threshold.
  const int32_t k = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(kMagic);
  const int32_t half = k >> 1;
  const float scale_a = std::bit_cast<float>((half + 127) << 23);
  const float scale_b = std::bit_cast<float>((k - half + 127) << 23);
  const auto y = std::bit_cast<uint32_t>(p * scale_a * scale_b);
  return std::bit_cast<float>((y & ~below) | (0x7fc00000u & is_nan));
}
inline double exp_fast(double x) { return std::exp(x); }

/// 1 / (1 + e^-x).
template <typename A>
inline A sigmoid(A x) {
  return A(1) / (A(1) + exp_fast(-x));
}

/// 32 bytes of floats or doubles; arithmetic is the compiler's vector extension.
template <typename A>
struct Vec {
  static constexpr int64_t kLanes = 32 / static_cast<int64_t>(sizeof(A));
  typedef A Type __attribute__((vector_size(32)));
  static Type load(const A* p) {
    Type v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  static void store(A* p, Type v) { std::memcpy(p, &v, sizeof v); }
  /// Pairwise over lanes: lane i with lane i + half, then halves again.
  static A sum(Type v) {
    A x[kLanes];
    std::memcpy(x, &v, sizeof v);
    for (int64_t half = kLanes / 2; half > 0; half /= 2) {
      for (int64_t i = 0; i < half; ++i) x[i] += x[i + half];
    }
    return x[0];
  }
};

/// sum of a[i] * b[i]. The order is fixed by n alone: four vectors of lanes in turn, merged
/// pairwise, then the tail in sequence.
template <typename A>
inline A dot(const A* a, const A* b, int64_t n) {
  using V = Vec<A>;
  constexpr int64_t kStep = V::kLanes;
  typename V::Type s0{}, s1{}, s2{}, s3{};
  int64_t i = 0;
  for (; i + 4 * kStep <= n; i += 4 * kStep) {
    s0 += V::load(a + i) * V::load(b + i);
    s1 += V::load(a + i + kStep) * V::load(b + i + kStep);
    s2 += V::load(a + i + 2 * kStep) * V::load(b + i + 2 * kStep);
    s3 += V::load(a + i + 3 * kStep) * V::load(b + i + 3 * kStep);
  }
  A total = V::sum((s0 + s1) + (s2 + s3));
  for (; i < n; ++i) total += a[i] * b[i];
  return total;
}

}  // namespace lockstep
