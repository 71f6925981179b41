#pragma once

// The two chains of a window, one warpgroup per (head, V half) and direction. Forward: the states
// again, from the window's checkpoint. Reverse: the gradient of the state,
//   dN = M^T do + K- dS,  dv = s P^T dN,  dS <- exp(b_C) dS + Q~^T do - W^T dN,
// (K~^T P^T dN = W^T dN), the forward chain with W and K- in each other's place. dS and dN are
// divided by s here (they are linear in do), so that Q~ and M need no s. dN enters its products as
// a sum of two bf16 terms: dv leaves with one rounding, and the tensor cores have time. As
// there, everything is computed transposed, accumulators of one product being the left operand of
// the next. Neither chain needs the other, so they run beside each other, two blocks to a
// multiprocessor.

#include "model/ops/kda_backward_tiles.cuh"
#include "model/ops/kda_forward_chain.cuh"

namespace lockstep::model::kda {

// Shared memory of a block, forward: two stages of W, half of U, K-, exp(b_C).
constexpr int kReplayStage = 2 * kTile + kSlab + 1024;
constexpr int kReplayU = kTile, kReplayK = kTile + kSlab, kReplayDecay = 2 * kTile + kSlab;
// Reverse: each tile once.
constexpr int kReverseM = 0;
constexpr int kReverseK = kReverseM + kSlab;
constexpr int kReverseQ = kReverseK + kTile;
constexpr int kReverseW = kReverseQ + kTile;
constexpr int kReverseP = kReverseW + kTile;
constexpr int kReverseOut = kReverseP + kSlab;  // half of do
constexpr int kReverseDecay = kReverseOut + kSlab;
constexpr int kReverseEnd = kReverseDecay + 1024;
// Both: what goes out.
constexpr int kPatchState = 2 * kReplayStage;
static_assert(kReverseEnd <= kPatchState);
constexpr int kPatchTile = kPatchState + kStateHalf;
constexpr int kWindowBarriers = kPatchTile + kSlab;
constexpr int kWindowChainBytes = kWindowBarriers + 128;
static_assert(kWindowChainBytes <= 113 * 1024, "two blocks to a multiprocessor");
constexpr int kWindowChainThreads = 256;
constexpr int kChainGroupBarrier = 1;

struct WindowBarriers {
  uint32_t base;
  LOCKSTEP_DEVICE uint32_t full(int i) const { return base + 16 * i; }
  LOCKSTEP_DEVICE uint32_t used(int i) const { return base + 16 * i + 8; }
};
enum ReverseTile { kBarM, kBarK, kBarQ, kBarW, kBarP, kBarOut, kBarCount };
constexpr int kOutThreads = 64;  // that copy do

LOCKSTEP_DEVICE void window_chain_init(uint32_t shared) {
  const WindowBarriers bar{shared + kWindowBarriers};
  for (int i = 0; i < kBarCount; ++i) {
    barrier_init(bar.full(i), i == kBarOut ? kOutThreads : 1);
    barrier_init(bar.used(i), 128);
  }
  fence_barrier_init();
}

/// fp32 state in memory [K, V] to and from a warp's accumulators of the transposed state.
LOCKSTEP_DEVICE void load_state(float (&s)[64], const float* from, int64_t at, float factor) {
#pragma unroll
  for (int j = 0; j < 16; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      s[4 * j + e] =
          from == nullptr ? 0.0f : from[at + (8 * j + (e & 1)) * kDim + (e >> 1) * 8] * factor;
}

/// Packed 16 V x 128 K of a warp into the state patch.
LOCKSTEP_DEVICE void store_state_patch(const uint32_t (&sb)[32],
                                       uint32_t shared,
                                       int warp,
                                       int lane) {
  const uint32_t matrix = lane >> 3, in = lane & 7;
  const uint32_t row = 16 * warp + 8 * (matrix & 1) + in;
#pragma unroll
  for (int j = 0; j < 16; j += 2)
    store_matrix4(
        shared + kPatchState + (j >> 3) * kSlab + slab_offset(row, (j & 7) + (matrix >> 1)),
        sb[2 * j],
        sb[2 * j + 1],
        sb[2 * j + 2],
        sb[2 * j + 3]);
}
/// Packed 16 V x 64 tokens of a warp into the tile patch [64 tokens, 64 V].
LOCKSTEP_DEVICE void store_tile_patch(const uint32_t (&nb)[16],
                                      uint32_t shared,
                                      int warp,
                                      int lane) {
  const uint32_t matrix = lane >> 3, in = lane & 7;
#pragma unroll
  for (int j = 0; j < 4; ++j)
    store_matrix4_transposed(
        shared + kPatchTile + slab_offset(16 * j + 8 * (matrix >> 1) + in, 2 * warp + (matrix & 1)),
        nb[4 * j],
        nb[4 * j + 1],
        nb[4 * j + 2],
        nb[4 * j + 3]);
}
/// Both patches to device memory, by thread 0 once all of the group have written.
LOCKSTEP_DEVICE void send_patches(unsigned char* state,
                                  unsigned char* tile,
                                  uint32_t shared,
                                  int thread) {
  fence_async_shared();
  named_barrier(kChainGroupBarrier, 128);
  if (thread == 0) {
    bulk_store(state, shared + kPatchState, kStateHalf);
    bulk_store(tile, shared + kPatchTile, kSlab);
    bulk_commit();
  }
}
/// Before the patches are written again.
LOCKSTEP_DEVICE void reclaim_patches(int thread) {
  if (thread == 0) bulk_wait_read();
  named_barrier(kChainGroupBarrier, 128);
}

LOCKSTEP_DEVICE void replay_fetch(const BackwardParams& p, int head, int half, uint32_t shared) {
  const WindowBarriers bar{shared + kWindowBarriers};
  const int last = window_end(p);
  for (int chunk = p.first; chunk < last; ++chunk) {
    const int i = chunk - p.first, stage = i & 1;
    const uint32_t to = shared + stage * kReplayStage, full = bar.full(stage);
    const unsigned char* const source = p.base.tiles + pair_at(p, chunk, head) * kTileBytes;
    barrier_wait(bar.used(stage), ((i >> 1) & 1) ^ 1);
    barrier_expect_bytes(full, 2 * kTile + kSlab + 512);
    bulk_load(to, source + kTileW, kTile, full);
    bulk_load(to + kReplayU, source + kTileU + half * kSlab, kSlab, full);
    bulk_load(to + kReplayK, source + kTileK, kTile, full);
    bulk_load(to + kReplayDecay, source + kTileDecay, 512, full);
  }
}

LOCKSTEP_DEVICE void replay_consume(
    const BackwardParams& p, int head, int half, unsigned char* base, int thread) {
  const uint32_t shared = smem_address(base);
  const WindowBarriers bar{shared + kWindowBarriers};
  const int warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
  const int last = window_end(p);
  const int64_t in_state = (int64_t{head} * kDim + 2 * t) * kDim + half * 64 + warp * 16 + g;
  const int64_t state_stride = int64_t{p.base.row_heads} * kDim * kDim;
  float s[64], n[32];
  uint32_t sb[32], nb[16];
  int document = -1;
#pragma unroll
  for (int j = 0; j < 64; ++j) s[j] = 0.0f;

  for (int chunk = p.first; chunk < last; ++chunk) {
    const int i = chunk - p.first, stage = i & 1;
    unsigned char* const stage_base = base + stage * kReplayStage;
    const uint32_t tiles = shared + stage * kReplayStage;
    const int now = p.base.chunks[chunk].document;
    if (now != document) {
      document = now;
      if (p.base.chunk_begin[document] == chunk) {
        load_state(s, p.base.initial_state, document * state_stride + in_state, 1.0f);
      } else {
        const int window = chunk / (p.base.checkpoint_mask + 1);
        load_state(s, p.base.checkpoints, window * state_stride + in_state, 1.0f);
      }
    }
#pragma unroll
    for (int j = 0; j < 32; ++j) sb[j] = pack_bf16(s[2 * j], s[2 * j + 1]);
    reclaim_patches(thread);
    store_state_patch(sb, shared, warp, lane);

    barrier_wait(bar.full(stage), (i >> 1) & 1);
    load_u(n, tiles + kReplayU, warp, lane);
    const uint64_t w = operand_k_major(tiles);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 8; ++k)
      wgmma_64<-1>(n, sb + 4 * k, w + (k >> 2) * (kSlab >> 4) + (k & 3) * 2, true);
    wgmma_commit();
    pin(s);
    const float* decay = reinterpret_cast<const float*>(stage_base + kReplayDecay);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float2 factor = *reinterpret_cast<const float2*>(decay + 8 * j + 2 * t);
      s[4 * j] *= factor.x;
      s[4 * j + 1] *= factor.y;
      s[4 * j + 2] *= factor.x;
      s[4 * j + 3] *= factor.y;
    }
    wgmma_wait<0>();
    pin(n);
    pin(s);
#pragma unroll
    for (int j = 0; j < 16; ++j) nb[j] = pack_bf16(n[2 * j], n[2 * j + 1]);
    const uint64_t kd = operand_outer_major(tiles + kReplayK, kSlab);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma_128_outer(s, nb + 4 * k, kd + k * 128);
    wgmma_commit();
    store_tile_patch(nb, shared, warp, lane);
    const int64_t pair = pair_at(p, chunk, head);
    send_patches(p.state + pair * kStateBytes + half * kStateHalf,
                 p.n + pair * kTile + half * kSlab,
                 shared,
                 thread);
    wgmma_wait<0>();
    pin(s);
    barrier_arrive(bar.used(stage));
  }
  if (thread == 0) bulk_wait_all();
}

/// One thread copies the tiles in the order of their use.
LOCKSTEP_DEVICE void reverse_fetch(const BackwardParams& p, int head, uint32_t shared) {
  const WindowBarriers bar{shared + kWindowBarriers};
  const int last = window_end(p);
  const auto fetch =
      [&](int tile, int to, const unsigned char* from, uint32_t bytes, uint32_t even) {
        barrier_wait(bar.used(tile), even);
        barrier_expect_bytes(bar.full(tile), tile == kBarQ ? bytes + 512 : bytes);
        bulk_load(shared + to, from, bytes, bar.full(tile));
      };
  for (int chunk = last - 1; chunk >= p.first; --chunk) {
    const uint32_t even = ((last - 1 - chunk) & 1) ^ 1;
    const int64_t pair = pair_at(p, chunk, head);
    const unsigned char* const source = p.base.tiles + pair * kTileBytes;
    fetch(kBarM, kReverseM, source + kTileM, kSlab, even);
    fetch(kBarK, kReverseK, source + kTileK, kTile, even);
    fetch(kBarQ, kReverseQ, source + kTileQ, kTile, even);
    bulk_load(shared + kReverseDecay, source + kTileDecay, 512, bar.full(kBarQ));
    fetch(kBarW, kReverseW, source + kTileW, kTile, even);
    fetch(kBarP, kReverseP, p.solve + pair * kSlab, kSlab, even);
  }
}
/// kOutThreads threads copy this V half of do, zero rows behind a chunk's end.
LOCKSTEP_DEVICE void reverse_fetch_out(
    const BackwardParams& p, int head, int half, uint32_t shared, int thread) {
  const WindowBarriers bar{shared + kWindowBarriers};
  const int last = window_end(p);
  const int piece = thread & 7, first_row = thread >> 3;
  const int64_t row_bytes = int64_t{p.base.row_heads} * (kDim * 2);
  for (int chunk = last - 1; chunk >= p.first; --chunk) {
    const ChunkInfo info = p.base.chunks[chunk];
    const char* from = reinterpret_cast<const char*>(p.dout) + info.first_token * row_bytes +
                       head * (kDim * 2) + half * kDim + piece * 16;
    barrier_wait(bar.used(kBarOut), ((last - 1 - chunk) & 1) ^ 1);
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      const int row = first_row + 8 * r;
      const bool valid = row < info.length;
      copy16(shared + kReverseOut + slab_offset(row, piece),
             from + (valid ? row * row_bytes : 0),
             valid);
    }
    copy_arrive(bar.full(kBarOut));
  }
  copy_wait<0>();
}

LOCKSTEP_DEVICE void reverse_consume(
    const BackwardParams& p, int head, int half, unsigned char* base, int thread) {
  const uint32_t shared = smem_address(base);
  const WindowBarriers bar{shared + kWindowBarriers};
  const int warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
  const uint32_t matrix = lane >> 3, in = lane & 7;
  const int last = window_end(p);
  const int64_t in_state = (int64_t{head} * kDim + 2 * t) * kDim + half * 64 + warp * 16 + g;
  const int64_t state_stride = int64_t{p.base.row_heads} * kDim * kDim;
  float4* const carry =
      reinterpret_cast<float4*>(p.carry) + (int64_t{head} * 2 + half) * (64 * kDim / 4) + thread;
  float ds[64], n[32], y[32];
  uint32_t dsb[32], nb[16], rest[16], out[16];
#pragma unroll
  for (int j = 0; j < 64; ++j) ds[j] = 0.0f;

  for (int chunk = last - 1; chunk >= p.first; --chunk) {
    const uint32_t parity = (last - 1 - chunk) & 1;
    const int document = p.base.chunks[chunk].document;
    if (p.base.chunk_begin[document + 1] == chunk + 1) {
      load_state(ds, p.dfinal, document * state_stride + in_state, kInverseScale);
    } else if (chunk == last - 1) {
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const float4 value = carry[j * 128];
        ds[4 * j] = value.x;
        ds[4 * j + 1] = value.y;
        ds[4 * j + 2] = value.z;
        ds[4 * j + 3] = value.w;
      }
    }
#pragma unroll
    for (int j = 0; j < 32; ++j) dsb[j] = pack_bf16(ds[2 * j], ds[2 * j + 1]);

    barrier_wait(bar.full(kBarOut), parity);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t r[4];
      load_matrix4_transposed(
          r,
          shared + kReverseOut +
              slab_offset(16 * j + 8 * (matrix >> 1) + in, 2 * warp + (matrix & 1)));
#pragma unroll
      for (int e = 0; e < 4; ++e) out[4 * j + e] = r[e];
    }
    barrier_arrive(bar.used(kBarOut));

    // dN = M^T do + K- dS
    const uint64_t m = operand_outer_major(shared + kReverseM, kSlab);
    const uint64_t kd = operand_k_major(shared + kReverseK);
    barrier_wait(bar.full(kBarM), parity);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma_64_outer(n, out + 4 * k, m + k * 128, k > 0);
    barrier_wait(bar.full(kBarK), parity);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 8; ++k)
      wgmma_64<1>(n, dsb + 4 * k, kd + (k >> 2) * (kSlab >> 4) + (k & 3) * 2, true);
    wgmma_commit();

    // dS = exp(b_C) dS + Q~^T do behind it
    barrier_wait(bar.full(kBarQ), parity);
    pin(ds);
    const float* decay = reinterpret_cast<const float*>(base + kReverseDecay);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float2 factor = *reinterpret_cast<const float2*>(decay + 8 * j + 2 * t);
      ds[4 * j] *= factor.x;
      ds[4 * j + 1] *= factor.y;
      ds[4 * j + 2] *= factor.x;
      ds[4 * j + 3] *= factor.y;
    }
    const uint64_t q = operand_outer_major(shared + kReverseQ, kSlab);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma_128_outer(ds, out + 4 * k, q + k * 128);
    wgmma_commit();
    reclaim_patches(thread);
    store_state_patch(dsb, shared, warp, lane);

    wgmma_wait<1>();
    pin(n);
    barrier_arrive(bar.used(kBarM));
    barrier_arrive(bar.used(kBarK));
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      nb[j] = pack_bf16(n[2 * j], n[2 * j + 1]);
      rest[j] = pack_bf16(n[2 * j] - low_bf16(nb[j]), n[2 * j + 1] - high_bf16(nb[j]));
    }

    // dS -= W^T dN, dv = s P^T dN
    const uint64_t w = operand_outer_major(shared + kReverseW, kSlab);
    const uint64_t solve = operand_outer_major(shared + kReverseP, kSlab);
    barrier_wait(bar.full(kBarW), parity);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      wgmma_128_outer<-1>(ds, nb + 4 * k, w + k * 128);
      wgmma_128_outer<-1>(ds, rest + 4 * k, w + k * 128);
    }
    wgmma_commit();
    barrier_wait(bar.full(kBarP), parity);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      wgmma_64_outer(y, nb + 4 * k, solve + k * 128, k > 0);
      wgmma_64_outer(y, rest + 4 * k, solve + k * 128, true);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(ds);
    pin(y);
    barrier_arrive(bar.used(kBarQ));
    barrier_arrive(bar.used(kBarW));
    barrier_arrive(bar.used(kBarP));
#pragma unroll
    for (int j = 0; j < 16; ++j) nb[j] = pack_bf16(y[2 * j] * kScale, y[2 * j + 1] * kScale);
    store_tile_patch(nb, shared, warp, lane);
    const int64_t pair = pair_at(p, chunk, head);
    send_patches(p.state_grad + pair * kStateBytes + half * kStateHalf,
                 p.dv_tiles + pair * kTile + half * kSlab,
                 shared,
                 thread);

    if (p.base.chunk_begin[document] == chunk) {
      if (p.dinitial != nullptr) {
        float* const to = p.dinitial + document * state_stride + in_state;
#pragma unroll
        for (int j = 0; j < 16; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            to[(8 * j + (e & 1)) * kDim + (e >> 1) * 8] = ds[4 * j + e] * kScale;
      }
    } else if (chunk == p.first) {
#pragma unroll
      for (int j = 0; j < 16; ++j)
        carry[j * 128] = make_float4(ds[4 * j], ds[4 * j + 1], ds[4 * j + 2], ds[4 * j + 3]);
    }
  }
  if (thread == 0) bulk_wait_all();
}

}  // namespace lockstep::model::kda
