#pragma once

// What persistent matrix products share: 128 x 256 x 64 tiles for each block of a cluster of two,
// the ring of stages that operands come through, tiles handed out in order, the way of results to
// device memory.

#include "model/ops/hopper_tensor.cuh"

namespace lockstep::model::gemm {

using namespace hopper;

constexpr int kTileRows = 128, kTileColumns = 256, kTileDepth = 64;
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
constexpr int kTilesEnd = kTurnAt + kTurns * 4;

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
  LOCKSTEP_DEVICE static void hand_out(int count, int* next, uint32_t shared) {
    for (Turns t;; t.next()) {
      barrier_wait(empty(shared, t.slot), t.parity ^ 1);
      const int index = atomicAdd(next, 1);
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

/// A math warpgroup: 64 rows of a tile, all columns. Sums d[4 j ...] of a thread: columns 8 j + 2
/// (lane % 4) + {0, 1} of row lane / 4 of its warp's 16, then of the row 8 further.
struct Group {
  uint32_t shared;
  int index, thread, lane;

  LOCKSTEP_DEVICE Group(uint32_t shared_at, int group, int in_group)
      : shared(shared_at), index(group), thread(in_group), lane(in_group & 31) {}
  LOCKSTEP_DEVICE void sync() const { named_barrier(1 + index, 128); }
  /// Where this lane points for columns 16 p .. 16 p + 15 of its warp's rows in a slab.
  LOCKSTEP_DEVICE uint32_t at(uint32_t slab, int p) const {
    const int row = (thread >> 5) * 16 + (lane & 15), chunk = 2 * p + (lane >> 4);
    return slab + row * 128 + ((chunk ^ (row & 7)) << 4);
  }
  LOCKSTEP_DEVICE uint32_t full(int stage) const { return shared + kFullAt + stage * 8; }
  LOCKSTEP_DEVICE uint32_t empty(int stage) const { return shared + kEmptyAt + stage * 8; }
  /// Every warp: it has read the stage.
  LOCKSTEP_DEVICE void release(int stage) const {
    if (lane < 2) barrier_arrive_at(empty(stage), lane, 1);
  }
  /// One thread for the four warps.
  LOCKSTEP_DEVICE void release_for_all(int stage) const {
    barrier_arrive_at(empty(stage), 0, 4);
    barrier_arrive_at(empty(stage), 1, 4);
  }
  /// `fill(p, words)` gives packed columns 16 p .. 16 p + 15; the slab goes to (x, y, z) of `map`
  /// through staging slab `buffer`, which the store before the last one used.
  template <class Fill>
  LOCKSTEP_DEVICE void store(
      int buffer, const CUtensorMap* map, int x, int y, int z, const Fill& fill) const {
    const uint32_t slab = shared + kStagingAt + (2 * index + buffer) * kSlabBytes;
    if (thread == 0) bulk_wait_read_but<1>();
    __syncwarp();
    sync();
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      uint32_t w[4];
      fill(p, w);
      store_matrix4(at(slab, p), w[0], w[1], w[2], w[3]);
    }
    fence_async_shared();
    sync();
    if (thread == 0) {
      tensor_store(map, x, y, z, slab);
      bulk_commit();
    }
    __syncwarp();
  }
};

}  // namespace lockstep::model::gemm
