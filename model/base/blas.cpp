#include "model/base/blas.hpp"

#include "model/base/error.hpp"

// Fortran BLAS interface, exported by libtorch_cpu.
extern "C" {
void sgemm_(const char*,
            const char*,
            const int*,
            const int*,
            const int*,
            const float*,
            const float*,
            const int*,
            const float*,
            const int*,
            const float*,
            float*,
            const int*);
void dgemm_(const char*,
            const char*,
            const int*,
            const int*,
            const int*,
            const double*,
            const double*,
            const int*,
            const double*,
            const int*,
            const double*,
            double*,
            const int*);
}

namespace lockstep {
namespace {

int narrow(int64_t value) {
  LOCKSTEP_CHECK(value >= 0 && value <= 0x7fffffff,
                 kInternal,
                 "gemm: dimension {} does not fit the BLAS interface's 32 bits",
                 value);
  return static_cast<int>(value);
}

template <typename T, typename F>
void call(F f,
          Op op_a,
          Op op_b,
          int64_t m,
          int64_t n,
          int64_t k,
          T alpha,
          const T* a,
          int64_t lda,
          const T* b,
          int64_t ldb,
          T beta,
          T* c,
          int64_t ldc) {
  if (m == 0 || n == 0) return;
  // Column-major BLAS sees our row-major C as C^T = op(B)^T op(A)^T.
  const char ta = static_cast<char>(op_a), tb = static_cast<char>(op_b);
  const int mi = narrow(m), ni = narrow(n), ki = narrow(k);
  const int la = narrow(lda > 0 ? lda : 1), lb = narrow(ldb > 0 ? ldb : 1), lc = narrow(ldc);
  f(&tb, &ta, &ni, &mi, &ki, &alpha, b, &lb, a, &la, &beta, c, &lc);
}

}  // namespace

void gemm(Op op_a,
          Op op_b,
          int64_t m,
          int64_t n,
          int64_t k,
          float alpha,
          const float* a,
          int64_t lda,
          const float* b,
          int64_t ldb,
          float beta,
          float* c,
          int64_t ldc) {
  call(sgemm_, op_a, op_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void gemm(Op op_a,
          Op op_b,
          int64_t m,
          int64_t n,
          int64_t k,
          double alpha,
          const double* a,
          int64_t lda,
          const double* b,
          int64_t ldb,
          double beta,
          double* c,
          int64_t ldc) {
  call(dgemm_, op_a, op_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

}  // namespace lockstep
