#pragma once

// The two chains of a window, one warpgroup per (head, V half) and direction. Forward: the states
// again, from the window's checkpoint. Reverse: the gradient of the state,
//   dN = M^T do + K- dS,  Y = P^T dN,  dv = s Y,  dS <- exp(b_C) dS + Q~^T do - K~^T Y,
// the forward chain with K~ and K- in each other's place. dS, dN and Y are divided by s here (they
// are linear in do), so that Q~ and M need no s. dN and Y enter their products as sums of two bf16
// terms: dv leaves with one rounding, and the tensor cores have time. As in the forward pass
// everything is computed transposed, accumulators of one product being the left operand of the
// next. Neither chain needs the other, so they run beside each other, two blocks to a
// multiprocessor.

#include "model/ops/kda_backward_tiles.cuh"
#include "model/ops/kda_forward_chain.cuh"

namespace lockstep::model::kda {

// Shared memory of a block: each tile once, fetched again as soon as it has been used.
constexpr int kWindowM = 0;                        // reverse only
constexpr int kWindowQ = kWindowM + kSlab;         // reverse only
constexpr int kWindowK = kWindowQ + kTile;         // K-
constexpr int kWindowStart = kWindowK + kTile;     // K~
constexpr int kWindowP = kWindowStart + kTile;     // P
constexpr int kWindowRows = kWindowP + kSlab;      // half of v or do
constexpr int kWindowDecay = kWindowRows + kSlab;  // exp(b_C)
// Both: what goes out.
constexpr int kPatchState = kWindowDecay + 1024;
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
enum WindowTile { kBarM, kBarK, kBarQ, kBarStart, kBarP, kBarRows, kBarCount };
constexpr int kRowThreads = 64;  // that copy v or do

LOCKSTEP_DEVICE void window_chain_init(uint32_t shared) {
  const WindowBarriers bar{shared + kWindowBarriers};
  for (int i = 0; i < kBarCount; ++i) {
    barrier_init(bar.full(i), i == kBarRows ? kRowThreads : 1);
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

/// Fetches a tile (and exp(b_C) with it) once its place is free; `even` alternates from 1.
LOCKSTEP_DEVICE void fetch_tile(uint32_t shared,
                                int tile,
                                int to,
                                const unsigned char* from,
                                uint32_t bytes,
                                const unsigned char* decay,
                                uint32_t even) {
  const WindowBarriers bar{shared + kWindowBarriers};
  barrier_wait(bar.used(tile), even);
  barrier_expect_bytes(bar.full(tile), decay != nullptr ? bytes + 512 : bytes);
  bulk_load(shared + to, from, bytes, bar.full(tile));
  if (decay != nullptr) bulk_load(shared + kWindowDecay, decay, 512, bar.full(tile));
}
/// One thread copies the tiles in the order of their use.
LOCKSTEP_DEVICE void replay_fetch(const BackwardParams& p, int head, uint32_t shared) {
  const int last = window_end(p);
  for (int chunk = p.first; chunk < last; ++chunk) {
    const uint32_t even = ((chunk - p.first) & 1) ^ 1;
    const unsigned char* const from = p.base.tiles + pair_at(p, chunk, head) * kTileBytes;
    fetch_tile(shared, kBarStart, kWindowStart, from + kTileStart, kTile, from + kTileDecay, even);
    fetch_tile(shared, kBarP, kWindowP, from + kTileP, kSlab, nullptr, even);
    fetch_tile(shared, kBarK, kWindowK, from + kTileK, kTile, nullptr, even);
  }
}
/// One thread copies the tiles in the order of their use.
LOCKSTEP_DEVICE void reverse_fetch(const BackwardParams& p, int head, uint32_t shared) {
  const int last = window_end(p);
  for (int chunk = last - 1; chunk >= p.first; --chunk) {
    const uint32_t even = ((last - 1 - chunk) & 1) ^ 1;
    const unsigned char* const from = p.base.tiles + pair_at(p, chunk, head) * kTileBytes;
    fetch_tile(shared, kBarM, kWindowM, from + kTileM, kSlab, nullptr, even);
    fetch_tile(shared, kBarK, kWindowK, from + kTileK, kTile, nullptr, even);
    fetch_tile(shared, kBarP, kWindowP, from + kTileP, kSlab, nullptr, even);
    fetch_tile(shared, kBarQ, kWindowQ, from + kTileQ, kTile, from + kTileDecay, even);
    fetch_tile(shared, kBarStart, kWindowStart, from + kTileStart, kTile, nullptr, even);
  }
}
/// kRowThreads threads copy this V half of v or do, zero rows behind a chunk's end.
template <bool kReverse>
LOCKSTEP_DEVICE void fetch_rows(const BackwardParams& p,
                                const uint16_t* rows,
                                int head,
                                int half,
                                uint32_t shared,
                                int thread) {
  const WindowBarriers bar{shared + kWindowBarriers};
  const int count = window_end(p) - p.first;
  const int piece = thread & 7, first_row = thread >> 3;
  const int64_t row_bytes = int64_t{p.base.row_heads} * (kDim * 2);
  for (int i = 0; i < count; ++i) {
    const ChunkInfo info = p.base.chunks[p.first + (kReverse ? count - 1 - i : i)];
    const char* from = reinterpret_cast<const char*>(rows) + info.first_token * row_bytes +
                       head * (kDim * 2) + half * kDim + piece * 16;
    barrier_wait(bar.used(kBarRows), (i & 1) ^ 1);
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      const int row = first_row + 8 * r;
      const bool valid = row < info.length;
      copy16(shared + kWindowRows + slab_offset(row, piece),
             from + (valid ? row * row_bytes : 0),
             valid);
    }
    copy_arrive(bar.full(kBarRows));
  }
  copy_wait<0>();
}

/// Splits accumulators into two packed bf16 terms.
LOCKSTEP_DEVICE void pack_terms(uint32_t (&high)[16], uint32_t (&low)[16], const float (&d)[32]) {
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    high[j] = pack_bf16(d[2 * j], d[2 * j + 1]);
    low[j] = pack_bf16(d[2 * j] - low_bf16(high[j]), d[2 * j + 1] - high_bf16(high[j]));
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
    const uint32_t parity = (chunk - p.first) & 1;
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

    // N = P (V - K~ S)
    barrier_wait(bar.full(kBarRows), parity);
    load_value(n, shared + kWindowRows, warp, lane);
    barrier_arrive(bar.used(kBarRows));
    const uint64_t start = operand_k_major(shared + kWindowStart);
    barrier_wait(bar.full(kBarStart), parity);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 8; ++k)
      wgmma_64<-1>(n, sb + 4 * k, start + (k >> 2) * (kSlab >> 4) + (k & 3) * 2, true);
    wgmma_commit();
    pin(s);
    const float* decay = reinterpret_cast<const float*>(base + kWindowDecay);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float2 factor = *reinterpret_cast<const float2*>(decay + 8 * j + 2 * t);
      s[4 * j] *= factor.x;
      s[4 * j + 1] *= factor.y;
      s[4 * j + 2] *= factor.x;
      s[4 * j + 3] *= factor.y;
    }
    barrier_wait(bar.full(kBarP), parity);
    wgmma_wait<0>();
    pin(n);
    pin(s);
    barrier_arrive(bar.used(kBarStart));
#pragma unroll
    for (int j = 0; j < 16; ++j) nb[j] = pack_bf16(n[2 * j], n[2 * j + 1]);
    const uint64_t solve = operand_k_major(shared + kWindowP);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma_64<1>(n, nb + 4 * k, solve + k * 2, k > 0);
    wgmma_commit();
    barrier_wait(bar.full(kBarK), parity);
    wgmma_wait<0>();
    pin(n);
    barrier_arrive(bar.used(kBarP));
#pragma unroll
    for (int j = 0; j < 16; ++j) nb[j] = pack_bf16(n[2 * j], n[2 * j + 1]);
    const uint64_t kd = operand_outer_major(shared + kWindowK, kSlab);
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
    barrier_arrive(bar.used(kBarK));
  }
  if (thread == 0) bulk_wait_all();
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

    barrier_wait(bar.full(kBarRows), parity);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t r[4];
      load_matrix4_transposed(
          r,
          shared + kWindowRows +
              slab_offset(16 * j + 8 * (matrix >> 1) + in, 2 * warp + (matrix & 1)));
#pragma unroll
      for (int e = 0; e < 4; ++e) out[4 * j + e] = r[e];
    }
    barrier_arrive(bar.used(kBarRows));

    // dN = M^T do + K- dS
    const uint64_t m = operand_outer_major(shared + kWindowM, kSlab);
    const uint64_t kd = operand_k_major(shared + kWindowK);
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
    reclaim_patches(thread);
    store_state_patch(dsb, shared, warp, lane);
    barrier_wait(bar.full(kBarP), parity);
    wgmma_wait<0>();
    pin(n);
    barrier_arrive(bar.used(kBarM));
    barrier_arrive(bar.used(kBarK));
    pack_terms(nb, rest, n);

    // Y = P^T dN; dS = exp(b_C) dS + Q~^T do behind it
    const uint64_t solve = operand_outer_major(shared + kWindowP, kSlab);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      wgmma_64_outer(y, nb + 4 * k, solve + k * 128, k > 0);
      wgmma_64_outer(y, rest + 4 * k, solve + k * 128, true);
    }
    wgmma_commit();
    barrier_wait(bar.full(kBarQ), parity);
    pin(ds);
    const float* decay = reinterpret_cast<const float*>(base + kWindowDecay);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float2 factor = *reinterpret_cast<const float2*>(decay + 8 * j + 2 * t);
      ds[4 * j] *= factor.x;
      ds[4 * j + 1] *= factor.y;
      ds[4 * j + 2] *= factor.x;
      ds[4 * j + 3] *= factor.y;
    }
    const uint64_t q = operand_outer_major(shared + kWindowQ, kSlab);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma_128_outer(ds, out + 4 * k, q + k * 128);
    wgmma_commit();
    wgmma_wait<1>();
    pin(y);
    barrier_arrive(bar.used(kBarP));
    pack_terms(nb, rest, y);

    // dS -= K~^T Y
    const uint64_t start = operand_outer_major(shared + kWindowStart, kSlab);
    barrier_wait(bar.full(kBarStart), parity);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      wgmma_128_outer<-1>(ds, nb + 4 * k, start + k * 128);
      wgmma_128_outer<-1>(ds, rest + 4 * k, start + k * 128);
    }
    wgmma_commit();
    uint32_t dv[16];  // not `out`, nb or rest: products in flight read those
#pragma unroll
    for (int j = 0; j < 16; ++j) dv[j] = pack_bf16(y[2 * j] * kScale, y[2 * j + 1] * kScale);
    store_tile_patch(dv, shared, warp, lane);
    wgmma_wait<0>();
    pin(ds);
    barrier_arrive(bar.used(kBarQ));
    barrier_arrive(bar.used(kBarStart));
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
