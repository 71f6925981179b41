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

void transpose_block(const float* const* rows, int64_t column, float* out, int64_t ld_out) {
  __m256 r[8], s[8];
  for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(rows[i] + column);
  for (int i = 0; i < 8; i += 2) {
    s[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    s[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(s[i], s[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(s[i], s[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(out + i * ld_out, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps(out + (i + 4) * ld_out, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
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
  for (int64_t i = 0; i < count; i += 8) {
    const int64_t n = std::min<int64_t>(8, count - i);
    const T* rows[8];
    for (int64_t l = 0; l < n; ++l)
      rows[l] = data + (index != nullptr ? index[i + l] : i + l) * row_stride;
    int64_t j = 0;
    if (n == 8) {
      for (; j + 8 <= width; j += 8) transpose_block(rows, j, out + j * ld_out + i, ld_out);
    }
    for (; j < width; ++j) {
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
