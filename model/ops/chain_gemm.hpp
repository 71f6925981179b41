// Matrix products whose every element is one chain of fused multiply-adds over k, ascending.
//
// A library product may add in an order that depends on how many rows and columns are computed
// together, so that a row's bits change with its neighbours. Here they cannot: element (i, j) is
// fma(a[i,k-1], b[k-1,j], ... fma(a[i,0], b[0,j], c0)), whatever the tiling, the vector width (AVX2
// or AVX-512, chosen at run time) or the thread count. Multiplying by an exact zero leaves a chain
// as it is, so masked entries may be skipped or computed.
#pragma once

#include <cstdint>

namespace lockstep::model {

/// Left operand: element (i, k) at data[i * row_stride + k * k_stride].
template <typename T>
struct ChainA {
  const T* data;
  int64_t row_stride;
  int64_t k_stride = 1;
};

/// Right operand: row k at data + rows[k] * row_stride, or data + k * row_stride without rows.
/// Columns are contiguous.
template <typename T>
struct ChainB {
  const T* data;
  int64_t row_stride;
  const int32_t* rows = nullptr;
};

/// C[m, n] (row stride ldc) = A[m, k] B[k, n], or C + A B with `accumulate`; C's value then starts
/// the chain. Runs on the calling thread. float and double.
template <typename T>
void chain_gemm(int64_t m,
                int64_t n,
                int64_t k,
                const ChainA<T>& a,
                const ChainB<T>& b,
                T* c,
                int64_t ldc,
                bool accumulate);

/// out[j, i] = rows[i][j]: gathers `count` rows (data + index[i] * row_stride, or consecutive rows
/// without index) of `width` elements as columns of out [width, ld_out]. No arithmetic.
template <typename T>
void gather_transposed(const T* data,
                       int64_t row_stride,
                       const int32_t* index,
                       int64_t count,
                       int64_t width,
                       T* out,
                       int64_t ld_out);

/// Uses AVX-512 where the processor has it (default) or AVX2 only. The bits are the same; for tests
/// and measurements. Returns whether AVX-512 is now in use.
bool chain_gemm_allow_avx512(bool allow);

}  // namespace lockstep::model
