// Register-blocked tiles behind chain_gemm, written once over a vector type. Included by one source
// per instruction set, which defines LOCKSTEP_CHAIN_TARGET and the vector types.
#pragma once

#include <algorithm>
#include <cstdint>

#include "model/ops/chain_gemm.hpp"

#define LOCKSTEP_CHAIN_INLINE LOCKSTEP_CHAIN_TARGET inline __attribute__((always_inline))

namespace lockstep::model::chain {

/// Values of k per pass over a tile: the pass's slice of B stays in the first-level cache.
inline constexpr int64_t kPassK = 192;

template <typename V, typename T>
struct Tile {
  int64_t k;
  ChainA<T> a;
  ChainB<T> b;  ///< data already points at the tile's first column
  T* c;
  int64_t ldc;
  int64_t tail;  ///< valid lanes of the last vector
  bool accumulate;
};

template <typename V, typename T, int kRows, int kVecs, bool kTail, bool kIndexed>
LOCKSTEP_CHAIN_TARGET void run_tile(const Tile<V, T>& t) {
  using R = typename V::Reg;
  const auto mask = V::mask(kTail ? t.tail : V::kLanes);
  R acc[kRows][kVecs];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      const T* p = t.c + i * t.ldc + v * V::kLanes;
      if (!t.accumulate)
        acc[i][v] = V::zero();
      else if (kTail && v == kVecs - 1)
        acc[i][v] = V::load(p, mask);
      else
        acc[i][v] = V::load(p);
    }
  }
  const T* a = t.a.data;
  for (int64_t k = 0; k < t.k; ++k, a += t.a.k_stride) {
    const T* row = t.b.data + (kIndexed ? static_cast<int64_t>(t.b.rows[k]) : k) * t.b.row_stride;
    R b[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      b[v] = kTail && v == kVecs - 1 ? V::load(row + v * V::kLanes, mask)
                                     : V::load(row + v * V::kLanes);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const R x = V::broadcast(a[i * t.a.row_stride]);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) acc[i][v] = V::fma(x, b[v], acc[i][v]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      T* p = t.c + i * t.ldc + v * V::kLanes;
      if (kTail && v == kVecs - 1)
        V::store(p, acc[i][v], mask);
      else
        V::store(p, acc[i][v]);
    }
  }
}

template <typename V, typename T, int kVecs, bool kTail, bool kIndexed>
LOCKSTEP_CHAIN_TARGET void run_rows(int64_t m, Tile<V, T> t) {
  while (m > 0) {
    int64_t done;
    if (m >= 8 && V::kRegisters >= 8 * kVecs + kVecs + 1) {
      run_tile<V, T, 8, kVecs, kTail, kIndexed>(t);
      done = 8;
    } else if (m >= 6 && V::kRegisters >= 6 * kVecs + kVecs + 1) {
      run_tile<V, T, 6, kVecs, kTail, kIndexed>(t);
      done = 6;
    } else if (m >= 4 && V::kRegisters >= 4 * kVecs + kVecs + 1) {
      run_tile<V, T, 4, kVecs, kTail, kIndexed>(t);
      done = 4;
    } else if (m >= 2) {
      run_tile<V, T, 2, kVecs, kTail, kIndexed>(t);
      done = 2;
    } else {
      run_tile<V, T, 1, kVecs, kTail, kIndexed>(t);
      done = 1;
    }
    m -= done;
    t.a.data += done * t.a.row_stride;
    t.c += done * t.ldc;
  }
}

template <typename V, typename T, int kVecs, bool kIndexed>
LOCKSTEP_CHAIN_TARGET void run_columns(int64_t m, bool tail, const Tile<V, T>& t) {
  if (tail)
    run_rows<V, T, kVecs, true, kIndexed>(m, t);
  else
    run_rows<V, T, kVecs, false, kIndexed>(m, t);
}

/// Number of vectors of the next column tile. Few rows need more vectors to have enough independent
/// chains.
template <typename V>
LOCKSTEP_CHAIN_INLINE int64_t tile_vecs(int64_t m, int64_t vecs) {
  if (V::kRegisters >= 32) {
    if (m < 8) return vecs == 5 ? 3 : vecs < 4 ? vecs : 4;
    return vecs == 4 ? 2 : vecs < 3 ? vecs : 3;
  }
  if (m < 4) return vecs < 4 ? vecs : 4;
  return vecs == 4 ? 2 : vecs < 3 ? vecs : 3;
}

template <typename V, typename T, bool kIndexed>
LOCKSTEP_CHAIN_TARGET void multiply(int64_t m,
                                    int64_t n,
                                    int64_t k,
                                    const ChainA<T>& a,
                                    const ChainB<T>& b,
                                    T* c,
                                    int64_t ldc,
                                    bool accumulate) {
  for (int64_t k0 = 0; k0 < k || k0 == 0; k0 += kPassK) {
    Tile<V, T> t;
    t.k = k - k0 < kPassK ? k - k0 : kPassK;
    t.ldc = ldc;
    t.accumulate = accumulate || k0 > 0;
    t.a = {a.data + k0 * a.k_stride, a.row_stride, a.k_stride};
    for (int64_t j = 0; j < n;) {
      const int64_t vecs = tile_vecs<V>(m, (n - j + V::kLanes - 1) / V::kLanes);
      const int64_t columns = vecs * V::kLanes;
      const bool tail = j + columns > n;
      t.tail = n - j - (vecs - 1) * V::kLanes;
      t.c = c + j;
      t.b = {(kIndexed ? b.data : b.data + k0 * b.row_stride) + j,
             b.row_stride,
             kIndexed ? b.rows + k0 : nullptr};
      if (vecs == 1)
        run_columns<V, T, 1, kIndexed>(m, tail, t);
      else if (vecs == 2)
        run_columns<V, T, 2, kIndexed>(m, tail, t);
      else if (vecs == 3)
        run_columns<V, T, 3, kIndexed>(m, tail, t);
      else
        run_columns<V, T, 4, kIndexed>(m, tail, t);
      j += columns;
    }
  }
}

template <typename V, typename T>
LOCKSTEP_CHAIN_TARGET void multiply(int64_t m,
                                    int64_t n,
                                    int64_t k,
                                    const ChainA<T>& a,
                                    const ChainB<T>& b,
                                    T* c,
                                    int64_t ldc,
                                    bool accumulate) {
  if (m <= 0 || n <= 0) return;
  if (b.rows != nullptr)
    multiply<V, T, true>(m, n, k, a, b, c, ldc, accumulate);
  else
    multiply<V, T, false>(m, n, k, a, b, c, ldc, accumulate);
}

// One entry point per instruction set and element type.
void multiply_avx2(int64_t m,
                   int64_t n,
                   int64_t k,
                   const ChainA<float>& a,
                   const ChainB<float>& b,
                   float* c,
                   int64_t ldc,
                   bool accumulate);
void multiply_avx2(int64_t m,
                   int64_t n,
                   int64_t k,
                   const ChainA<double>& a,
                   const ChainB<double>& b,
                   double* c,
                   int64_t ldc,
                   bool accumulate);
void multiply_avx512(int64_t m,
                     int64_t n,
                     int64_t k,
                     const ChainA<float>& a,
                     const ChainB<float>& b,
                     float* c,
                     int64_t ldc,
                     bool accumulate);
void multiply_avx512(int64_t m,
                     int64_t n,
                     int64_t k,
                     const ChainA<double>& a,
                     const ChainB<double>& b,
                     double* c,
                     int64_t ldc,
                     bool accumulate);

}  // namespace lockstep::model::chain
