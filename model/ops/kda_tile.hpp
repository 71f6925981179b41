// Small matrix products of the chunked KDA form. Each element of the result is one chain of fused
// multiply-adds over the inner index in ascending order, whatever the shape of the product: a row's
// bits never depend on which rows are computed with it. No torch headers.
#pragma once

#include <cstdint>

#include "model/ops/kda_simd.hpp"

namespace lockstep::model {

enum class Into { kSet, kAdd, kSubtract };

/// Left operand with free strides: element (i, p) at data[i * row + p * inner].
template <typename R>
struct Left {
  const R* data;
  int64_t row, inner;
};
template <typename R>
Left<R> plain(const R* data, int64_t ld) {
  return {data, ld, 1};
}
template <typename R>
Left<R> transposed(const R* data, int64_t ld) {
  return {data, 1, ld};
}

/// C[m,n] (=, +=, -=) scale * A[m,k] B[k,n]; B and C row-major with row strides ldb and ldc; m a
/// multiple of 4, n of two vectors. The sum over k starts at 0 and is combined with C at the end.
template <Into into = Into::kSet, typename R>
inline void tile_product(int64_t m,
                         int64_t n,
                         int64_t k,
                         Left<R> a,
                         const R* b,
                         int64_t ldb,
                         R* c,
                         int64_t ldc,
                         R scale = 1) {
  using simd::fma;
  using simd::load;
  using simd::splat;
  using simd::store;
  constexpr int64_t w = simd::kLanes<R>;
  for (int64_t j = 0; j < n; j += 2 * w) {
    for (int64_t i = 0; i < m; i += 4) {
      simd::Vec<R> s00{}, s01{}, s10{}, s11{}, s20{}, s21{}, s30{}, s31{};
      const R* a0 = a.data + i * a.row;
      const R* a1 = a0 + a.row;
      const R* a2 = a1 + a.row;
      const R* a3 = a2 + a.row;
      const R* bp = b + j;
      for (int64_t p = 0; p < k; ++p, bp += ldb) {
        const auto b0 = load(bp), b1 = load(bp + w);
        const int64_t at = p * a.inner;
        const auto x0 = splat(a0[at]), x1 = splat(a1[at]);
        s00 = fma(x0, b0, s00);
        s01 = fma(x0, b1, s01);
        s10 = fma(x1, b0, s10);
        s11 = fma(x1, b1, s11);
        const auto x2 = splat(a2[at]), x3 = splat(a3[at]);
        s20 = fma(x2, b0, s20);
        s21 = fma(x2, b1, s21);
        s30 = fma(x3, b0, s30);
        s31 = fma(x3, b1, s31);
      }
      const auto put = [&](R* dst, simd::Vec<R> v) {
        v = v * splat(scale);
        if constexpr (into == Into::kAdd) v = load(dst) + v;
        if constexpr (into == Into::kSubtract) v = load(dst) - v;
        store(dst, v);
      };
      R* dst = c + i * ldc + j;
      put(dst, s00);
      put(dst + w, s01);
      put(dst + ldc, s10);
      put(dst + ldc + w, s11);
      put(dst + 2 * ldc, s20);
      put(dst + 2 * ldc + w, s21);
      put(dst + 3 * ldc, s30);
      put(dst + 3 * ldc + w, s31);
    }
  }
}

/// dst[cols, rows] = src[rows, cols]^T.
template <typename R>
inline void transpose_into(
    int64_t rows, int64_t cols, const R* src, int64_t ld_src, R* dst, int64_t ld_dst) {
  constexpr int64_t block = 8;
  for (int64_t r0 = 0; r0 < rows; r0 += block) {
    for (int64_t c = 0; c < cols; ++c) {
      for (int64_t r = r0; r < r0 + block && r < rows; ++r) {
        dst[c * ld_dst + r] = src[r * ld_src + c];
      }
    }
  }
}

}  // namespace lockstep::model
