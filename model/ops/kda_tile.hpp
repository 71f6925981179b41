// Small matrix products of the chunked KDA form, on top of chain_gemm: each element of a result is
// one chain of fused multiply-adds over the inner index in ascending order, whatever the shape of
// the product, so a row's bits never depend on which rows are computed with it.
#pragma once

#include <cstdint>

#include "model/ops/chain_gemm.hpp"

namespace lockstep::model {

/// Left operands: row-major with row stride ld, or the transpose of such a matrix.
template <typename R>
ChainA<R> plain(const R* data, int64_t ld) {
  return {data, ld, 1};
}
template <typename R>
ChainA<R> transposed(const R* data, int64_t ld) {
  return {data, 1, ld};
}

/// C[m,n] = A[m,k] B[k,n]; B and C row-major with row strides ldb and ldc.
template <typename R>
inline void set_product(
    int64_t m, int64_t n, int64_t k, ChainA<R> a, const R* b, int64_t ldb, R* c, int64_t ldc) {
  chain_gemm(m, n, k, a, ChainB<R>{b, ldb}, c, ldc, /*accumulate=*/false);
}

/// C[m,n] += A[m,k] B[k,n], C's value starting the chain.
template <typename R>
inline void add_product(
    int64_t m, int64_t n, int64_t k, ChainA<R> a, const R* b, int64_t ldb, R* c, int64_t ldc) {
  chain_gemm(m, n, k, a, ChainB<R>{b, ldb}, c, ldc, /*accumulate=*/true);
}

/// dst[cols, rows] = src[rows, cols]^T.
template <typename R>
inline void transpose_into(
    int64_t rows, int64_t cols, const R* src, int64_t ld_src, R* dst, int64_t ld_dst) {
  gather_transposed(src, ld_src, nullptr, rows, cols, dst, ld_dst);
}

}  // namespace lockstep::model
