#pragma once

// What the grouped products share: kinds, parameters, tiles and who computes which.

#include "model/ops/hopper_tensor.cuh"

namespace lockstep::model::moe {

using namespace hopper;

enum class Product {
  kGateUp,   // products and h = x gate_up^T
  kDown,     // out = h down^T
  kHidden,   // dh = dout down, and from it dproducts and h
  kInput,    // dx = dproducts gate_up
  kWeights,  // dgate_up = dproducts^T x, ddown = dout^T h
};

constexpr int kTileRows = 128, kTileColumns = 256, kTileDepth = 64;
constexpr int kMaxExperts = 512;
constexpr int kThreads = 384;  // a warpgroup that copies, two that multiply

/// Everything moves in slabs: 64 rows of 128 bytes, 128-byte swizzle. Contraction-major operands
/// have the contraction index along the 128 bytes, outer-major ones along the rows.
constexpr int kSlabBytes = 64 * 128;
constexpr int kSlabsA = kTileRows / 64, kSlabsB = kTileColumns / 64;
constexpr int kStageBytes = (kSlabsA + kSlabsB) * kSlabBytes;
constexpr int kStages = 4;
/// Two slabs for each of the two math warpgroups, on the way to device memory.
constexpr int kStagingAt = kStages * kStageBytes;
constexpr int kFullAt = kStagingAt + 4 * kSlabBytes;
constexpr int kEmptyAt = kFullAt + kStages * 8;
constexpr int kTurns = 2;  // tiles handed out ahead
constexpr int kTurnFullAt = kEmptyAt + kStages * 8, kTurnEmptyAt = kTurnFullAt + kTurns * 8;
constexpr int kTurnAt = kTurnEmptyAt + kTurns * 8;
constexpr int kFirstAt = kTurnAt + kTurns * 4;
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

/// Tiles are handed out in order, so that those at work at one time are neighbours and share
/// operands in L2. Block 0 of a cluster draws the next index and sends it to both blocks; each
/// reader (the copying thread and the math warps) says when it has read a turn.
struct Turns {
  int slot = 0;
  uint32_t parity = 0;

  LOCKSTEP_DEVICE static uint32_t full(uint32_t shared, int s) {
    return shared + kTurnFullAt + s * 8;
  }
  LOCKSTEP_DEVICE static uint32_t empty(uint32_t shared, int s) {
    return shared + kTurnEmptyAt + s * 8;
  }
  LOCKSTEP_DEVICE static uint32_t at(uint32_t shared, int s) { return shared + kTurnAt + s * 4; }
  LOCKSTEP_DEVICE static void init(uint32_t shared) {
    for (int s = 0; s < kTurns; ++s) {
      barrier_init(full(shared, s), 1);
      barrier_init(empty(shared, s), 2 * (8 + 1));
      barrier_expect_bytes(full(shared, s), 4);
    }
  }
  LOCKSTEP_DEVICE void next() {
    if (++slot == kTurns) slot = 0, parity ^= 1;
  }
  /// Block 0, one thread.
  LOCKSTEP_DEVICE static void hand_out(const ProductParams& p, const int* first, uint32_t shared) {
    const int count = first[p.experts];
    for (Turns t;; t.next()) {
      barrier_wait(empty(shared, t.slot), t.parity ^ 1);
      const int index = atomicAdd(p.next, 1);
      for (int rank = 0; rank < 2; ++rank)
        store_shared_at(at(shared, t.slot), index, full(shared, t.slot), rank);
      if (index >= count) return;
    }
  }
  /// The copying thread.
  LOCKSTEP_DEVICE int take(uint32_t shared) {
    barrier_wait(full(shared, slot), parity);
    const int index = static_cast<int>(load_shared4(at(shared, slot)));
    barrier_expect_bytes(full(shared, slot), 4);  // of the turn after the next
    barrier_arrive_at(empty(shared, slot), 0, 1);
    next();
    return index;
  }
  /// A math warp.
  LOCKSTEP_DEVICE int take_warp(uint32_t shared, int lane) {
    barrier_wait(full(shared, slot), parity);
    const int index = static_cast<int>(load_shared4(at(shared, slot)));
    __syncwarp();
    if (lane == 0) barrier_arrive_at(empty(shared, slot), 0, 1);
    __syncwarp();
    next();
    return index;
  }
};

/// Position in the ring of stages.
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  LOCKSTEP_DEVICE void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
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
