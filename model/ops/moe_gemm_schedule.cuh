#pragma once

// What the grouped products share: kinds, parameters, tiles and who computes which.

#include "model/ops/gemm_tiles.cuh"

namespace lockstep::model::moe {

using namespace gemm;

enum class Product {
  kGateUp,   // products and h = x gate_up^T
  kDown,     // out = h down^T
  kHidden,   // dh = dout down, and from it dproducts and h
  kInput,    // dx = dproducts gate_up
  kWeights,  // dgate_up = dproducts^T x, ddown = dout^T h
};

constexpr int kMaxExperts = 512;
constexpr int kFirstAt = kTilesEnd;
constexpr int kSharedBytes = kFirstAt + (kMaxExperts + 1) * 4;

struct ProductParams {
  CUtensorMap weights;        // of an expert's weights, z = expert; kWeights: where the sums go
  const CUtensorMap* a;       // [E] rows of the first operand
  const CUtensorMap* b;       // [E] kWeights: rows of the second
  const CUtensorMap* out;     // [E] kDown, kInput: result; kHidden: dproducts
  const CUtensorMap* kept;    // [E] products: kGateUp writes them, kHidden reads them
  const CUtensorMap* hidden;  // [E] h: kGateUp and kHidden write it
  const int64_t* offsets;
  int* next;  // 0 at launch: next tile to hand out
  int experts;
  int outer;         // kWeights: rows of the result, else 0
  int column_tiles;  // of the result; kGateUp: of 128 gate and 128 up columns
  int depth_tiles;   // unless kWeights
  int inner;
  float limit;
  bool keep;  // kGateUp: products are wanted
};

/// What one block does; its partner in the cluster has the same rows of B and the next rows of A,
/// or (wide) the same rows of A and the next columns.
struct Tile {
  int row, column;  // first row; column tile
  bool wide;
};

/// Pairs of row tiles of an expert, then, if at most one row tile is left, pairs of column tiles
/// with it. Row pairs in bands: within a band all rows before the next columns, so that what 66
/// clusters work on at a time fits L2.
struct Layout {
  int pairs, tail;
  LOCKSTEP_DEVICE Layout(const ProductParams& p, int rows) {
    const int count = p.outer > 0 ? p.outer : rows, over = count % (2 * kTileRows);
    pairs = count / (2 * kTileRows) + (over > kTileRows ? 1 : 0);
    tail = over > 0 && over <= kTileRows ? 1 : 0;
  }
  LOCKSTEP_DEVICE int tiles(const ProductParams& p) const {
    return pairs * p.column_tiles + tail * ((p.column_tiles + 1) / 2);
  }
  LOCKSTEP_DEVICE Tile at(const ProductParams& p, int index, int rank) const {
    constexpr int kBand = 8;
    const int wide = index - pairs * p.column_tiles;
    if (wide >= 0) return {pairs * 2 * kTileRows, 2 * wide + rank, true};
    const int first = index / (kBand * p.column_tiles) * kBand;
    const int band = min(kBand, pairs - first), in_band = index - first * p.column_tiles;
    return {(first + in_band % band) * 2 * kTileRows + rank * kTileRows, in_band / band, false};
  }
};

LOCKSTEP_DEVICE int rows_of(const ProductParams& p, int expert) {
  return static_cast<int>(p.offsets[expert + 1] - p.offsets[expert]);
}

/// One warp: first[e] = tiles of the experts before e.
LOCKSTEP_DEVICE void count_tiles(const ProductParams& p, int* first, int lane) {
  int before = 0;
  for (int start = 0; start < p.experts; start += 32) {
    const int e = start + lane;
    int sum = e < p.experts ? Layout(p, rows_of(p, e)).tiles(p) : 0;
    const int own = sum;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (e < p.experts) first[e] = before + sum - own;
    before += __shfl_sync(~0u, sum, 31);
  }
  if (lane == 0) first[p.experts] = before;
}

/// From the index of a tile to the tile; indices must not decrease.
class Walk {
 public:
  LOCKSTEP_DEVICE Walk(const ProductParams& p, const int* first, int rank)
      : p_(p), first_(first), rank_(rank) {}
  /// False: there is no such tile, nor any later one.
  LOCKSTEP_DEVICE bool at(int index) {
    if (index >= first_[p_.experts]) return false;
    int e = expert_ < 0 ? 0 : expert_;
    while (index >= first_[e + 1]) ++e;
    if (e != expert_) rows_ = rows_of(p_, e);
    expert_ = e;
    index_ = index;
    return true;
  }
  LOCKSTEP_DEVICE int expert() const { return expert_; }
  LOCKSTEP_DEVICE int rows() const { return rows_; }
  LOCKSTEP_DEVICE Tile tile() const {
    return Layout(p_, rows_).at(p_, index_ - first_[expert_], rank_);
  }

 private:
  const ProductParams& p_;
  const int* first_;
  int rank_, index_ = 0, expert_ = -1, rows_ = 0;
};

template <Product kProduct>
LOCKSTEP_DEVICE int depth_tiles(const ProductParams& p, int rows) {
  return kProduct == Product::kWeights ? (rows + kTileDepth - 1) / kTileDepth : p.depth_tiles;
}
/// kHidden: how often 64 columns of gate and up pass through the ring after a tile; the same for
/// both blocks of the cluster, whatever columns each has.
LOCKSTEP_DEVICE int kept_steps(const ProductParams& p, const Tile& t, int rank) {
  const int column = t.wide ? t.column - rank : t.column;
  return min(kSlabsB, (p.inner - column * kTileColumns) / 64);
}

}  // namespace lockstep::model::moe
