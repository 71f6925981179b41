// Matrix products over a fixed grid of tiles: each tile is one product on one thread, so that the
// result does not depend on how many threads there are.
#pragma once

#include <cstdint>

#include "model/base/blas.hpp"
#include "model/base/scalar.hpp"

namespace lockstep::model {

/// Whether a row's bits may depend on how many rows are computed with it.
enum class RowTiles : uint8_t {
  kLibrary,  ///< tiles chosen from the shape
  kFixed,    ///< every element is one chain over k (chain_gemm.hpp), whatever surrounds it
};

/// C[m,n] = op(A)[m,k] op(B)[k,n], row-major, accumulated in A's type and rounded once to Out. The
/// grid of tiles depends on m, n and k only. kFixed needs op_a = kNone. With op_a = kTranspose,
/// which is a sum over rows, k is cut as in sum_over_rows; otherwise it is not cut.
template <typename A, typename Out>
void tiled_product(Op op_a,
                   Op op_b,
                   int64_t m,
                   int64_t n,
                   int64_t k,
                   const A* a,
                   int64_t lda,
                   const A* b,
                   int64_t ldb,
                   Out* c,
                   int64_t ldc,
                   RowTiles rows = RowTiles::kLibrary);

/// C[m,n] = A[m,k] op(B)[k,n] on the calling thread, for callers inside their own parallel loop.
/// kFixed takes at most 64 rows and needs 64 * (k + n) values of scratch.
template <typename A>
void rows_product(Op op_b,
                  int64_t m,
                  int64_t n,
                  int64_t k,
                  const A* a,
                  int64_t lda,
                  const A* b,
                  int64_t ldb,
                  A* c,
                  int64_t ldc,
                  RowTiles rows,
                  A* scratch);

/// C[m,n] = or += A[k,m]^T B[k,n], one tile: runs of 256 rows of A and B, added in order. Short
/// runs are faster than one long product, whose strided reads of A miss the translation buffer. k =
/// 0 gives zeros (or C).
template <typename A>
void sum_over_rows(int64_t m,
                   int64_t n,
                   int64_t k,
                   const A* a,
                   int64_t lda,
                   const A* b,
                   int64_t ldb,
                   bool add,
                   A* c,
                   int64_t ldc);

inline constexpr int64_t kFixedTileRows = 64;

}  // namespace lockstep::model
