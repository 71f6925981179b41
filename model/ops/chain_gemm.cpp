#include "model/ops/chain_gemm.hpp"

#include <immintrin.h>

#include <atomic>

#define LOCKSTEP_CHAIN_TARGET
#include "model/ops/chain_gemm_kernel.hpp"

namespace lockstep::model {
namespace {

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl");
}

std::atomic<bool> use_avx512{has_avx512()};

/// 8 x 8. Joining row i with row i + 4 while loading leaves only transposes of 4 x 4 within lanes,
/// which halves the shuffles, of which one a cycle is possible.
void transpose_block(const float* const* rows, int64_t column, float* out, int64_t ld_out) {
  for (int64_t half = 0; half < 8; half += 4) {
    __m256 r[4], s[4];
    for (int i = 0; i < 4; ++i) {
      r[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(rows[i] + column + half)),
                                  _mm_loadu_ps(rows[i + 4] + column + half),
                                  1);
    }
    s[0] = _mm256_unpacklo_ps(r[0], r[1]);
    s[1] = _mm256_unpackhi_ps(r[0], r[1]);
    s[2] = _mm256_unpacklo_ps(r[2], r[3]);
    s[3] = _mm256_unpackhi_ps(r[2], r[3]);
    float* at = out + half * ld_out;
    _mm256_storeu_ps(at, _mm256_shuffle_ps(s[0], s[2], 0x44));
    _mm256_storeu_ps(at + ld_out, _mm256_shuffle_ps(s[0], s[2], 0xee));
    _mm256_storeu_ps(at + 2 * ld_out, _mm256_shuffle_ps(s[1], s[3], 0x44));
    _mm256_storeu_ps(at + 3 * ld_out, _mm256_shuffle_ps(s[1], s[3], 0xee));
  }
}

void transpose_block(const double* const* rows, int64_t column, double* out, int64_t ld_out) {
  for (int64_t j = 0; j < 8; ++j) {
    for (int i = 0; i < 8; ++i) out[j * ld_out + i] = rows[i][column + j];
  }
}

}  // namespace

bool chain_gemm_allow_avx512(bool allow) {
  use_avx512 = allow && has_avx512();
  return use_avx512;
}

template <typename T>
void chain_gemm(int64_t m,
                int64_t n,
                int64_t k,
                const ChainA<T>& a,
                const ChainB<T>& b,
                T* c,
                int64_t ldc,
                bool accumulate) {
  if (use_avx512.load(std::memory_order_relaxed))
    chain::multiply_avx512(m, n, k, a, b, c, ldc, accumulate);
  else
    chain::multiply_avx2(m, n, k, a, b, c, ldc, accumulate);
}

template <typename T>
void gather_transposed(const T* data,
                       int64_t row_stride,
                       const int32_t* index,
                       int64_t count,
                       int64_t width,
                       T* out,
                       int64_t ld_out) {
  // Sixteen rows at a time: whole cache lines of the output are written together.
  for (int64_t i = 0; i < count; i += 16) {
    const int64_t n = std::min<int64_t>(16, count - i);
    const T* rows[16];
    for (int64_t l = 0; l < n; ++l) {
      rows[l] = data + (index != nullptr ? index[i + l] : i + l) * row_stride;
    }
    const int64_t blocked = n / 8 * 8;
    const int64_t blocked_width = blocked > 0 ? width / 8 * 8 : 0;
    for (int64_t j = 0; j < blocked_width; j += 8) {
      T* at = out + j * ld_out + i;
      for (int64_t l = 0; l < blocked; l += 8) transpose_block(rows + l, j, at + l, ld_out);
      for (int64_t c = 0; c < 8; ++c) {
        for (int64_t l = blocked; l < n; ++l) at[c * ld_out + l] = rows[l][j + c];
      }
    }
    for (int64_t j = blocked_width; j < width; ++j) {
      for (int64_t l = 0; l < n; ++l) out[j * ld_out + i + l] = rows[l][j];
    }
  }
}

template void chain_gemm<float>(
    int64_t, int64_t, int64_t, const ChainA<float>&, const ChainB<float>&, float*, int64_t, bool);
template void chain_gemm<double>(int64_t,
                                 int64_t,
                                 int64_t,
                                 const ChainA<double>&,
                                 const ChainB<double>&,
                                 double*,
                                 int64_t,
                                 bool);
template void gather_transposed<float>(
    const float*, int64_t, const int32_t*, int64_t, int64_t, float*, int64_t);
template void gather_transposed<double>(
    const double*, int64_t, const int32_t*, int64_t, int64_t, double*, int64_t);

}  // namespace lockstep::model
