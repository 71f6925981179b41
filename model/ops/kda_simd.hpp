// Vectors of float and double for the hot loops of KDA, convolution and norms: a thin layer over
// the compiler's vector types, so that order of operations and use of fused multiply-add are in the
// source and not the compiler's choice. No torch headers.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#endif

namespace lockstep::model::simd {

/// bfloat16 as it lies in memory.
struct Bf16 {
  uint16_t bits;
};

template <typename R>
struct VecOf;
template <>
struct VecOf<float> {
  typedef float type __attribute__((vector_size(32)));
  typedef int32_t mask __attribute__((vector_size(32)));
};
template <>
struct VecOf<double> {
  typedef double type __attribute__((vector_size(32)));
  typedef int64_t mask __attribute__((vector_size(32)));
};
template <typename R>
using Vec = typename VecOf<R>::type;
template <typename R>
inline constexpr int64_t kLanes = 32 / static_cast<int64_t>(sizeof(R));
/// Row lengths are padded to this many elements: two vectors, the width of a product tile.
template <typename R>
inline constexpr int64_t kPad = 2 * kLanes<R>;

template <typename R>
inline Vec<R> load(const R* p) {
  Vec<R> v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <typename R>
inline void store(R* p, Vec<R> v) {
  std::memcpy(p, &v, sizeof v);
}
template <typename R>
inline Vec<R> splat(R x) {
  return Vec<R>{} + x;
}

inline Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) {
#if defined(__AVX2__) && defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  for (int i = 0; i < 8; ++i) c[i] = std::fma(a[i], b[i], c[i]);
  return c;
#endif
}
inline Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) {
#if defined(__AVX2__) && defined(__FMA__)
  return _mm256_fmadd_pd(a, b, c);
#else
  for (int i = 0; i < 4; ++i) c[i] = std::fma(a[i], b[i], c[i]);
  return c;
#endif
}

/// Sum of the lanes, pairwise: always the same order.
inline float sum(Vec<float> v) {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}
inline double sum(Vec<double> v) { return (v[0] + v[2]) + (v[1] + v[3]); }

namespace detail {
/// e^r for |r| <= 0.35 times 2^n, n integral and -126 <= n <= 127. Error below 1 ulp.
inline Vec<float> exp_reduced(Vec<float> r, Vec<float> n) {
  Vec<float> p = splat(1.0f / 5040);
  p = fma(p, r, splat(1.0f / 720));
  p = fma(p, r, splat(1.0f / 120));
  p = fma(p, r, splat(1.0f / 24));
  p = fma(p, r, splat(1.0f / 6));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  typedef VecOf<float>::mask Int;
  // n + 1.5 * 2^23 holds n in its low mantissa bits.
  const Vec<float> shifted = n + 12582912.0f;
  Int bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits - 0x4b400000 + 127) << 23;
  Vec<float> scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}
inline Vec<float> round_to_integer(Vec<float> x) { return (x + 12582912.0f) - 12582912.0f; }
}  // namespace detail

/// e^x. float: below 1.5 ulp, 0 under -87.3 (no denormals), clamped above 88. double: std::exp.
inline Vec<float> exp(Vec<float> x) {
  const auto tiny = x < -87.3f;
  x = x < -87.3f ? splat(-87.3f) : x;
  x = x > 88.0f ? splat(88.0f) : x;
  const Vec<float> n = detail::round_to_integer(x * 1.44269504088896341f);
  Vec<float> r = fma(n, splat(-0.693145751953125f), x);
  r = fma(n, splat(-1.42860682030941723e-6f), r);
  return tiny ? Vec<float>{} : detail::exp_reduced(r, n);
}
inline Vec<double> exp(Vec<double> x) {
  for (int i = 0; i < 4; ++i) x[i] = std::exp(x[i]);
  return x;
}

/// 2^x, with the same bounds.
inline Vec<float> exp2(Vec<float> x) {
  const auto tiny = x < -125.9f;
  x = x < -125.9f ? splat(-125.9f) : x;
  x = x > 126.9f ? splat(126.9f) : x;
  const Vec<float> n = detail::round_to_integer(x);
  return tiny ? Vec<float>{} : detail::exp_reduced((x - n) * 0.693147180559945309f, n);
}
inline Vec<double> exp2(Vec<double> x) {
  for (int i = 0; i < 4; ++i) x[i] = std::exp2(x[i]);
  return x;
}

/// 1 / (1 + e^-x). Relative error stays small at both ends: 1 - sigmoid(x) is sigmoid(-x).
template <typename V>
inline V sigmoid(V x) {
  return 1 / (1 + exp(-x));
}

/// x rounded to bfloat16 (nearest even), as a float. NaN stays NaN.
inline float round_bf16(float x) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  if ((u & 0x7fffffffu) > 0x7f800000u) return x;
  u = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
  std::memcpy(&x, &u, sizeof x);
  return x;
}
inline Vec<float> round_bf16(Vec<float> x) {
  typedef VecOf<float>::mask Int;
  Int u;
  std::memcpy(&u, &x, sizeof u);
  const Int rounded = (u + 0x7fff + ((u >> 16) & 1)) & static_cast<int32_t>(0xffff0000u);
  Vec<float> y;
  std::memcpy(&y, &rounded, sizeof y);
  return x == x ? y : x;
}
/// Activations of the float64 policy are never rounded.
inline double round_bf16(double x) { return x; }
inline Vec<double> round_bf16(Vec<double> x) { return x; }

/// Activation types in memory: reading widens, writing rounds once.
inline float widen(float x) { return x; }
inline double widen(double x) { return x; }
inline float widen(Bf16 x) {
  const uint32_t u = static_cast<uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &u, sizeof y);
  return y;
}
inline void narrow(float* p, float x) { *p = x; }
inline void narrow(double* p, double x) { *p = x; }
inline void narrow(Bf16* p, float x) {
  x = round_bf16(x);
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  p->bits = static_cast<uint16_t>(u >> 16);
}

/// dst[0..padded) = src[0..n) widened, then zeros.
template <typename S, typename R>
inline void load_row(const S* src, int64_t n, R* dst, int64_t padded) {
  for (int64_t i = 0; i < n; ++i) dst[i] = widen(src[i]);
  for (int64_t i = n; i < padded; ++i) dst[i] = 0;
}
template <typename S, typename R>
inline void store_row(const R* src, int64_t n, S* dst) {
  for (int64_t i = 0; i < n; ++i) narrow(dst + i, src[i]);
}

/// sum_i a_i b_i over a padded row, in four running sums.
template <typename R>
inline R dot(const R* a, const R* b, int64_t padded) {
  constexpr int64_t kStep = kLanes<R>;
  Vec<R> s0{}, s1{};
  for (int64_t i = 0; i < padded; i += 2 * kStep) {
    s0 = fma(load(a + i), load(b + i), s0);
    s1 = fma(load(a + i + kStep), load(b + i + kStep), s1);
  }
  return sum(s0 + s1);
}

/// Flushes denormals to zero on this thread while alive: a product of many decays would otherwise
/// run through them at a hundredth of the speed.
class FlushDenormals {
 public:
#if defined(__SSE__)
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040u); }
  ~FlushDenormals() { _mm_setcsr(saved_); }
#else
  FlushDenormals() = default;
#endif
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
#if defined(__SSE__)
  unsigned saved_;
#endif
};

}  // namespace lockstep::model::simd
