// chain_gemm for AVX2.
#include <immintrin.h>

#define LOCKSTEP_CHAIN_TARGET
#include "model/ops/chain_gemm_kernel.hpp"

namespace lockstep::model::chain {
namespace {

alignas(32) constexpr int32_t kMask32[16] = {
    -1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
alignas(32) constexpr int64_t kMask64[8] = {-1, -1, -1, -1, 0, 0, 0, 0};

struct Avx2Float {
  using Reg = __m256;
  static constexpr int64_t kLanes = 8;
  static constexpr int kRegisters = 16;
  static __m256i mask(int64_t lanes) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kMask32 + 8 - lanes));
  }
  static Reg zero() { return _mm256_setzero_ps(); }
  static Reg load(const float* p) { return _mm256_loadu_ps(p); }
  static Reg load(const float* p, __m256i m) { return _mm256_maskload_ps(p, m); }
  static void store(float* p, Reg x) { _mm256_storeu_ps(p, x); }
  static void store(float* p, Reg x, __m256i m) { _mm256_maskstore_ps(p, m, x); }
  static Reg broadcast(float x) { return _mm256_set1_ps(x); }
  static Reg fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }
};

struct Avx2Double {
  using Reg = __m256d;
  static constexpr int64_t kLanes = 4;
  static constexpr int kRegisters = 16;
  static __m256i mask(int64_t lanes) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kMask64 + 4 - lanes));
  }
  static Reg zero() { return _mm256_setzero_pd(); }
  static Reg load(const double* p) { return _mm256_loadu_pd(p); }
  static Reg load(const double* p, __m256i m) { return _mm256_maskload_pd(p, m); }
  static void store(double* p, Reg x) { _mm256_storeu_pd(p, x); }
  static void store(double* p, Reg x, __m256i m) { _mm256_maskstore_pd(p, m, x); }
  static Reg broadcast(double x) { return _mm256_set1_pd(x); }
  static Reg fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_pd(a, b, c); }
};

}  // namespace

void multiply_avx2(int64_t m,
                   int64_t n,
                   int64_t k,
                   const ChainA<float>& a,
                   const ChainB<float>& b,
                   float* c,
                   int64_t ldc,
                   bool accumulate) {
  multiply<Avx2Float, float>(m, n, k, a, b, c, ldc, accumulate);
}

void multiply_avx2(int64_t m,
                   int64_t n,
                   int64_t k,
                   const ChainA<double>& a,
                   const ChainB<double>& b,
                   double* c,
                   int64_t ldc,
                   bool accumulate) {
  multiply<Avx2Double, double>(m, n, k, a, b, c, ldc, accumulate);
}

}  // namespace lockstep::model::chain
