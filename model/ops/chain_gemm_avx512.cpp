// chain_gemm for AVX-512, used only where the processor has it. Own code is otherwise built for
// AVX2; a chain of fused multiply-adds has the same bits at any vector width, so this file changes
// speed only. Nothing here may be inlined into, or shared with, code that runs elsewhere.
#include <immintrin.h>

#define LOCKSTEP_CHAIN_TARGET __attribute__((target("avx512f,avx512vl")))
#include "model/ops/chain_gemm_kernel.hpp"

namespace lockstep::model::chain {
namespace {

struct Avx512Float {
  using Reg = __m512;
  static constexpr int64_t kLanes = 16;
  static constexpr int kRegisters = 32;
  LOCKSTEP_CHAIN_INLINE static __mmask16 mask(int64_t lanes) {
    return static_cast<__mmask16>((1U << static_cast<unsigned>(lanes)) - 1U);
  }
  LOCKSTEP_CHAIN_INLINE static Reg zero() { return _mm512_setzero_ps(); }
  LOCKSTEP_CHAIN_INLINE static Reg load(const float* p) { return _mm512_loadu_ps(p); }
  LOCKSTEP_CHAIN_INLINE static Reg load(const float* p, __mmask16 m) {
    return _mm512_maskz_loadu_ps(m, p);
  }
  LOCKSTEP_CHAIN_INLINE static void store(float* p, Reg x) { _mm512_storeu_ps(p, x); }
  LOCKSTEP_CHAIN_INLINE static void store(float* p, Reg x, __mmask16 m) {
    _mm512_mask_storeu_ps(p, m, x);
  }
  LOCKSTEP_CHAIN_INLINE static Reg broadcast(float x) { return _mm512_set1_ps(x); }
  LOCKSTEP_CHAIN_INLINE static Reg fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }
};

struct Avx512Double {
  using Reg = __m512d;
  static constexpr int64_t kLanes = 8;
  static constexpr int kRegisters = 32;
  LOCKSTEP_CHAIN_INLINE static __mmask8 mask(int64_t lanes) {
    return static_cast<__mmask8>((1U << static_cast<unsigned>(lanes)) - 1U);
  }
  LOCKSTEP_CHAIN_INLINE static Reg zero() { return _mm512_setzero_pd(); }
  LOCKSTEP_CHAIN_INLINE static Reg load(const double* p) { return _mm512_loadu_pd(p); }
  LOCKSTEP_CHAIN_INLINE static Reg load(const double* p, __mmask8 m) {
    return _mm512_maskz_loadu_pd(m, p);
  }
  LOCKSTEP_CHAIN_INLINE static void store(double* p, Reg x) { _mm512_storeu_pd(p, x); }
  LOCKSTEP_CHAIN_INLINE static void store(double* p, Reg x, __mmask8 m) {
    _mm512_mask_storeu_pd(p, m, x);
  }
  LOCKSTEP_CHAIN_INLINE static Reg broadcast(double x) { return _mm512_set1_pd(x); }
  LOCKSTEP_CHAIN_INLINE static Reg fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_pd(a, b, c); }
};

}  // namespace

LOCKSTEP_CHAIN_TARGET void multiply_avx512(int64_t m,
                                           int64_t n,
                                           int64_t k,
                                           const ChainA<float>& a,
                                           const ChainB<float>& b,
                                           float* c,
                                           int64_t ldc,
                                           bool accumulate) {
  multiply<Avx512Float, float>(m, n, k, a, b, c, ldc, accumulate);
}

LOCKSTEP_CHAIN_TARGET void multiply_avx512(int64_t m,
                                           int64_t n,
                                           int64_t k,
                                           const ChainA<double>& a,
                                           const ChainB<double>& b,
                                           double* c,
                                           int64_t ldc,
                                           bool accumulate) {
  multiply<Avx512Double, double>(m, n, k, a, b, c, ldc, accumulate);
}

}  // namespace lockstep::model::chain
