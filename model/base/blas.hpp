// Dense matrix products on raw pointers, row-major, for files with hot loops. The library is the
// BLAS inside LibTorch.
#pragma once

#include <cstdint>

namespace lockstep {

enum class Op : char { kNone = 'N', kTranspose = 'T' };

/// C[m,n] = alpha * op(A)[m,k] op(B)[k,n] + beta * C, all row-major; lda, ldb, ldc are row strides
/// in elements of the matrices as stored. Inside parallel_for it runs on the calling thread alone.
/// With beta = 0, C is not read. Empty k gives beta * C.
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
          int64_t ldc);
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
          int64_t ldc);

}  // namespace lockstep
