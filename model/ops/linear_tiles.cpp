#include "model/ops/linear_tiles.hpp"

#include <algorithm>
#include <type_traits>
#include <vector>

#include "model/base/parallel.hpp"
#include "model/ops/chain_gemm.hpp"

namespace lockstep::model {
namespace {

constexpr int64_t kFixedTileColumns = 256;
constexpr int64_t kRunRows = 256;
constexpr int64_t kMinTiles = 8;         // work for a few cores ...
constexpr int64_t kMinTileSide = 64;     // ... without tiles too small for BLAS to be fast
constexpr int64_t kSmallWork = 1 << 16;  // multiply-adds below which a second tile does not pay

struct Grid {
  int64_t tile_m, tile_n;
};

Grid choose_grid(int64_t m, int64_t n, int64_t k, RowTiles rows) {
  if (rows == RowTiles::kFixed) return {kFixedTileRows, std::min(n, kFixedTileColumns)};
  Grid g{std::min<int64_t>(m, 256), std::min<int64_t>(n, 1024)};
  const auto tiles = [&] {
    return ((m + g.tile_m - 1) / g.tile_m) * ((n + g.tile_n - 1) / g.tile_n);
  };
  // Rows are halved first: wide tiles keep BLAS fast.
  while (tiles() < kMinTiles && g.tile_m * g.tile_n * k > kSmallWork) {
    const bool halve_n = g.tile_n > 512 || g.tile_m <= kMinTileSide;
    int64_t& side = halve_n ? g.tile_n : g.tile_m;
    if (side <= kMinTileSide) break;
    side = std::max(kMinTileSide, (side / 2 + 15) / 16 * 16);
  }
  return g;
}

}  // namespace

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
                  A* scratch) {
  if (rows == RowTiles::kLibrary) {
    gemm(Op::kNone, op_b, m, n, k, A(1), a, lda, b, ldb, A(0), c, ldc);
    return;
  }
  if (op_b == Op::kNone) {
    chain_gemm<A>(m, n, k, {a, lda}, {b, ldb}, c, ldc, false);
    return;
  }
  // C^T = B A^T: the rows are what is transposed, not the larger weight.
  A* a_t = scratch;
  A* c_t = scratch + m * k;
  gather_transposed<A>(a, lda, nullptr, m, k, a_t, m);
  chain_gemm<A>(n, m, k, {b, ldb}, {a_t, m}, c_t, m, false);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) c[i * ldc + j] = c_t[j * m + i];
  }
}

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
                   int64_t ldc) {
  for (int64_t i = 0; k == 0 && !add && i < m; ++i) std::fill_n(c + i * ldc, n, A(0));
  for (int64_t r = 0; r < k; r += kRunRows) {
    gemm(Op::kTranspose,
         Op::kNone,
         m,
         n,
         std::min(kRunRows, k - r),
         A(1),
         a + r * lda,
         lda,
         b + r * ldb,
         ldb,
         add || r > 0 ? A(1) : A(0),
         c,
         ldc);
  }
}

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
                   RowTiles rows) {
  if (m == 0 || n == 0) return;
  constexpr bool kRounds = !std::is_same_v<A, Out>;
  const Grid g = choose_grid(m, n, k, rows);
  const int64_t tiles_n = (n + g.tile_n - 1) / g.tile_n;
  const int64_t tiles = ((m + g.tile_m - 1) / g.tile_m) * tiles_n;
  const bool fixed = rows == RowTiles::kFixed;
  parallel_for(0, tiles, 1, [&](int64_t begin, int64_t end) {
    std::vector<A> out(kRounds ? static_cast<size_t>(g.tile_m * g.tile_n) : 0);
    std::vector<A> scratch(fixed ? static_cast<size_t>(kFixedTileRows * (k + g.tile_n)) : 0);
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t i0 = tile / tiles_n * g.tile_m, j0 = tile % tiles_n * g.tile_n;
      const int64_t mt = std::min(g.tile_m, m - i0), nt = std::min(g.tile_n, n - j0);
      const A* at = a + (op_a == Op::kNone ? i0 * lda : i0);
      const A* bt = b + (op_b == Op::kNone ? j0 : j0 * ldb);
      A* target = nullptr;
      int64_t ld = ldc;
      if constexpr (kRounds) {
        target = out.data();
        ld = nt;
      } else {
        target = c + i0 * ldc + j0;
      }
      if (fixed) {
        rows_product(op_b, mt, nt, k, at, lda, bt, ldb, target, ld, rows, scratch.data());
      } else if (op_a == Op::kTranspose && op_b == Op::kNone) {
        sum_over_rows(mt, nt, k, at, lda, bt, ldb, false, target, ld);
      } else {
        gemm(op_a, op_b, mt, nt, k, A(1), at, lda, bt, ldb, A(0), target, ld);
      }
      if constexpr (kRounds) {
        for (int64_t i = 0; i < mt; ++i) {
          Out* row = c + (i0 + i) * ldc + j0;
          for (int64_t j = 0; j < nt; ++j) store(row + j, target[i * nt + j]);
        }
      }
    }
  });
}

template void sum_over_rows(
    int64_t, int64_t, int64_t, const float*, int64_t, const float*, int64_t, bool, float*, int64_t);
template void sum_over_rows(int64_t,
                            int64_t,
                            int64_t,
                            const double*,
                            int64_t,
                            const double*,
                            int64_t,
                            bool,
                            double*,
                            int64_t);
template void rows_product(Op,
                           int64_t,
                           int64_t,
                           int64_t,
                           const float*,
                           int64_t,
                           const float*,
                           int64_t,
                           float*,
                           int64_t,
                           RowTiles,
                           float*);
template void rows_product(Op,
                           int64_t,
                           int64_t,
                           int64_t,
                           const double*,
                           int64_t,
                           const double*,
                           int64_t,
                           double*,
                           int64_t,
                           RowTiles,
                           double*);
template void tiled_product(Op,
                            Op,
                            int64_t,
                            int64_t,
                            int64_t,
                            const float*,
                            int64_t,
                            const float*,
                            int64_t,
                            float*,
                            int64_t,
                            RowTiles);
template void tiled_product(Op,
                            Op,
                            int64_t,
                            int64_t,
                            int64_t,
                            const float*,
                            int64_t,
                            const float*,
                            int64_t,
                            Bf16*,
                            int64_t,
                            RowTiles);
template void tiled_product(Op,
                            Op,
                            int64_t,
                            int64_t,
                            int64_t,
                            const double*,
                            int64_t,
                            const double*,
                            int64_t,
                            double*,
                            int64_t,
                            RowTiles);

}  // namespace lockstep::model
