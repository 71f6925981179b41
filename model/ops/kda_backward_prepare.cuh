#pragma once

// Preparation of a window: the forward pass's, with a place of its own in device memory for every
// record.

#include "model/ops/kda_backward_tiles.cuh"
#include "model/ops/kda_forward_prepare.cuh"

namespace lockstep::model::kda {

constexpr int kWindowPrepareThreads = 128 + kPrepareThreads;  // publishing warp, padding | group

/// One warp beside the group: starts the raw rows of each item, moves its P and M to device memory,
/// and holds the group back until they have left shared memory.
LOCKSTEP_DEVICE void publish_window(
    const BackwardParams& p, int chunk, int chunks, int step, int head, uint32_t shared, int lane) {
  if (chunk >= chunks) return;
  load_raw(shared, p.base, load_chunk_info(p.base, chunk, 0), head, lane);
  for (; chunk < chunks; chunk += step) {
    named_barrier(kGoBarrier, kPublishThreads);  // the group has read its rows
    if (chunk + step < chunks)
      load_raw(shared, p.base, load_chunk_info(p.base, chunk + step, 0), head, lane);
    named_barrier(kWrittenBarrier, kPublishThreads);
    if (lane == 0) {
      unsigned char* const out = p.base.tiles + pair_at(p, chunk, head) * kTileBytes;
      bulk_store(out + kTileP, shared + kSolve, kSlab);
      bulk_store(out + kTileM, shared + kScores, kSlab);
      bulk_commit();
      bulk_wait_read();
    }
    __syncwarp();
  }
  copy_wait<0>();
  if (lane == 0) bulk_wait_all();
}

}  // namespace lockstep::model::kda
