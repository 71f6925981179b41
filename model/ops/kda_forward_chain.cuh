#pragma once

// The state chain of one head and one half of V: one warpgroup, and one thread that copies the
// tiles. Everything is computed transposed (S^T: V rows, K columns), so that each result is,
// register for register, the left operand of the next product: the state, N and the output never
// pass through shared memory on the way from one product to the next. N = P (V - K~ S): what would
// otherwise be W = P K~ and U = P V is one more product of 64 x 64 here instead of four in the
// preparation, which has less time to spare. K~ and V are staged twice, the other tiles once: a
// tile is fetched again as soon as its product has been taken.

#include "model/ops/kda_forward_tiles.cuh"

namespace lockstep::model::kda {

using namespace hopper;

constexpr int kOutRow = 48;  // bytes per token of a warp's output patch (16 V + pad)
constexpr int kOutPatch = kChunk * kOutRow;
constexpr int kChainA = 0;  // two stages of K~ and half of V
constexpr int kStageA = kTile + kSlab;
constexpr int kChainP = kChainA + 2 * kStageA;
constexpr int kChainQ = kChainP + kSlab;
constexpr int kChainK = kChainQ + kTile;
constexpr int kChainM = kChainK + kTile;
constexpr int kChainDecay = kChainM + kSlab;
constexpr int kChainOut = kChainDecay + 512;
constexpr int kChainBarriers = kChainOut + 4 * kOutPatch;
constexpr int kChainBytes = (kChainBarriers + 144 + 1023) / 1024 * 1024;

/// Shared-memory barriers: "full" is completed by the copies, "used" by all 128 threads of the
/// chain (each orders its own reads; no slower than one arrival per warp).
struct ChainBarriers {
  uint32_t base;
  LOCKSTEP_DEVICE uint32_t full_a(int stage) const { return base + 8 * stage; }
  LOCKSTEP_DEVICE uint32_t used_a(int stage) const { return base + 16 + 8 * stage; }
  LOCKSTEP_DEVICE uint32_t full_q() const { return base + 32; }
  LOCKSTEP_DEVICE uint32_t full_k() const { return base + 40; }
  LOCKSTEP_DEVICE uint32_t full_m() const { return base + 48; }
  LOCKSTEP_DEVICE uint32_t used_q() const { return base + 56; }
  LOCKSTEP_DEVICE uint32_t used_k() const { return base + 64; }
  LOCKSTEP_DEVICE uint32_t used_m() const { return base + 72; }
  /// From one fetching thread to the other and back: the record is complete; noted.
  LOCKSTEP_DEVICE uint32_t complete(int stage) const { return base + 80 + 8 * stage; }
  LOCKSTEP_DEVICE uint32_t noted(int stage) const { return base + 96 + 8 * stage; }
  LOCKSTEP_DEVICE uint32_t full_v(int stage) const { return base + 112 + 8 * stage; }
  LOCKSTEP_DEVICE uint32_t full_p() const { return base + 128; }
  LOCKSTEP_DEVICE uint32_t used_p() const { return base + 136; }
};

LOCKSTEP_DEVICE void chain_init(uint32_t shared) {
  const ChainBarriers bar{shared + kChainBarriers};
  for (int stage = 0; stage < 2; ++stage) {
    barrier_init(bar.full_a(stage), 1);
    barrier_init(bar.used_a(stage), 128);
    barrier_init(bar.complete(stage), 1);
    barrier_init(bar.noted(stage), 1);
    barrier_init(bar.full_v(stage), 32);
  }
  barrier_init(bar.full_p(), 1);
  barrier_init(bar.used_p(), 128);
  barrier_init(bar.full_q(), 1);
  barrier_init(bar.full_k(), 1);
  barrier_init(bar.full_m(), 1);
  barrier_init(bar.used_q(), 128);
  barrier_init(bar.used_k(), 128);
  barrier_init(bar.used_m(), 128);
  fence_barrier_init();
}

/// One thread: waits for each record of `head`, copies K~, up to two chunks ahead.
LOCKSTEP_DEVICE void chain_fetch_ahead(const Params& p, int head, int chunks, uint32_t shared) {
  const ChainBarriers bar{shared + kChainBarriers};
  const int* const flags = p.ready + head * p.ring;
  int slot = 0;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int stage = chunk & 1;
    const unsigned char* const source = record(p, chunk, head);
    while (load_acquire(flags + slot) != chunk + 1) __nanosleep(20);
    fence_async_global();
    barrier_wait(bar.noted(stage), ((chunk >> 1) & 1) ^ 1);
    barrier_arrive(bar.complete(stage));
    barrier_wait(bar.used_a(stage), ((chunk >> 1) & 1) ^ 1);
    barrier_expect_bytes(bar.full_a(stage), kTile);
    bulk_load(shared + kChainA + stage * kStageA, source + kTileStart, kTile, bar.full_a(stage));
    if (++slot == p.ring) slot = 0;
  }
}

/// A warp: copies this half of v, zero rows behind a chunk's end, up to two chunks ahead.
LOCKSTEP_DEVICE void chain_fetch_value(
    const Params& p, int head, int half, int chunks, uint32_t shared, int lane) {
  const ChainBarriers bar{shared + kChainBarriers};
  const int piece = lane & 7, first_row = lane >> 3;
  const int64_t row_bytes = int64_t{p.row_heads} * (kDim * 2);
  const char* const v =
      reinterpret_cast<const char*>(p.v) + head * (kDim * 2) + half * kDim + piece * 16;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int stage = chunk & 1;
    const ChunkInfo info = p.chunks[chunk];
    const char* const from = v + info.first_token * row_bytes;
    const uint32_t to = shared + kChainA + stage * kStageA + kTile;
    barrier_wait(bar.used_a(stage), ((chunk >> 1) & 1) ^ 1);
#pragma unroll 4
    for (int i = 0; i < 16; ++i) {
      const int row = first_row + 4 * i;
      const bool valid = row < info.length;
      copy16(to + slab_offset(row, piece), from + (valid ? row * row_bytes : 0), valid);
    }
    copy_arrive(bar.full_v(stage));
  }
  copy_wait<0>();
}

/// Another thread: copies the other tiles, each as soon as its place is free.
LOCKSTEP_DEVICE void chain_fetch(const Params& p, int head, int chunks, uint32_t shared) {
  const ChainBarriers bar{shared + kChainBarriers};
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const uint32_t parity = (chunk & 1) ^ 1;
    const unsigned char* const source = record(p, chunk, head);
    barrier_wait(bar.complete(chunk & 1), (chunk >> 1) & 1);
    barrier_arrive(bar.noted(chunk & 1));
    barrier_wait(bar.used_p(), parity);
    barrier_expect_bytes(bar.full_p(), kSlab);
    bulk_load(shared + kChainP, source + kTileP, kSlab, bar.full_p());
    barrier_wait(bar.used_q(), parity);
    barrier_expect_bytes(bar.full_q(), kTile + 512);
    bulk_load(shared + kChainQ, source + kTileQ, kTile, bar.full_q());
    bulk_load(shared + kChainDecay, source + kTileDecay, 512, bar.full_q());
    barrier_wait(bar.used_k(), parity);
    barrier_expect_bytes(bar.full_k(), kTile);
    bulk_load(shared + kChainK, source + kTileK, kTile, bar.full_k());
    barrier_wait(bar.used_m(), parity);
    barrier_expect_bytes(bar.full_m(), kSlab);
    bulk_load(shared + kChainM, source + kTileM, kSlab, bar.full_m());
  }
}

/// V of this warp's 16 V rows as accumulators of (V - K~ S)^T.
LOCKSTEP_DEVICE void load_value(float (&n)[32], uint32_t slab, int warp, int lane) {
  const uint32_t matrix = lane >> 3, in = lane & 7;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint32_t r[4];
    load_matrix4_transposed(
        r, slab + slab_offset(16 * j + 8 * (matrix >> 1) + in, 2 * warp + (matrix & 1)));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      n[8 * j + 2 * i] = low_bf16(r[i]);
      n[8 * j + 2 * i + 1] = high_bf16(r[i]);
    }
  }
}

/// Stores a warp's 16 V x 64 tokens of o^T, already packed, for the first `length` tokens.
LOCKSTEP_DEVICE void store_output(const uint32_t (&packed)[16],
                                  uint32_t patch,
                                  uint16_t* o,
                                  int64_t row_stride,
                                  int length,
                                  int lane) {
  const uint32_t matrix = lane >> 3, in = lane & 7;
  __syncwarp();
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    store_matrix4_transposed(
        patch + (16 * j + 8 * (matrix >> 1) + in) * kOutRow + (matrix & 1) * 16,
        packed[4 * j],
        packed[4 * j + 1],
        packed[4 * j + 2],
        packed[4 * j + 3]);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int token = i * 16 + (lane >> 1), half = lane & 1;
    const uint4 value = load_shared16(patch + token * kOutRow + half * 16);
    if (token < length) *reinterpret_cast<uint4*>(o + token * row_stride + half * 8) = value;
  }
}

/// One warpgroup: the chain of `head` for V columns 64 half .. 64 half + 63, over all documents.
LOCKSTEP_DEVICE void chain_consume(
    const Params& p, int head, int half, unsigned char* base, int thread) {
  const uint32_t shared = smem_address(base);
  const ChainBarriers bar{shared + kChainBarriers};
  const int warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
  const uint32_t patch = shared + kChainOut + warp * kOutPatch;
  const int64_t row_stride = int64_t{p.row_heads} * kDim;
  const int column = half * 64 + warp * 16;       // first V column of this warp
  constexpr float kScale = 0.08838834764831845f;  // 128^-1/2, applied to the output
  float s[64], n[32], o[32];
  uint32_t sb[32], nb[16], ob[16];
  int chunk = 0;

  for (int64_t document = 0; document < p.documents; ++document) {
    const int64_t state_at = ((document * p.row_heads + head) * kDim + 2 * t) * kDim + column + g;
#pragma unroll
    for (int j = 0; j < 16; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        s[4 * j + e] = p.initial_state == nullptr
                           ? 0.0f
                           : p.initial_state[state_at + (8 * j + (e & 1)) * kDim + (e >> 1) * 8];
    const int chunk_last = p.chunk_begin[document + 1];

    if (chunk < chunk_last) {
#pragma unroll
      for (int j = 0; j < 32; ++j) sb[j] = pack_bf16(s[2 * j], s[2 * j + 1]);
#pragma unroll
      for (int j = 0; j < 16; ++j) ob[j] = 0;
      barrier_wait(bar.full_v(chunk & 1), (chunk >> 1) & 1);
      load_value(n, shared + kChainA + (chunk & 1) * kStageA + kTile, warp, lane);
      int pending = 0;  // tokens of the finished output that `ob` holds
      uint16_t* out = p.o;

      while (chunk < chunk_last) {
        const int stage = chunk & 1;
        const uint32_t parity = chunk & 1;
        const ChunkInfo info = p.chunks[chunk];
        if (p.checkpoints != nullptr && (chunk & p.checkpoint_mask) == 0) {
          float* const to =
              p.checkpoints +
              ((int64_t{chunk / (p.checkpoint_mask + 1)} * p.row_heads + head) * kDim + 2 * t) *
                  kDim +
              column + g;
#pragma unroll
          for (int j = 0; j < 16; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) to[(8 * j + (e & 1)) * kDim + (e >> 1) * 8] = s[4 * j + e];
        }

        // N = P (V - K~ S), then O = Q~ S behind it
        barrier_wait(bar.full_a(stage), (chunk >> 1) & 1);
        const uint64_t start = operand_k_major(shared + kChainA + stage * kStageA);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 8; ++k)
          wgmma_64<-1>(n, sb + 4 * k, start + (k >> 2) * (kSlab >> 4) + (k & 3) * 2, true);
        wgmma_commit();
        // Meanwhile: the previous chunk's output goes out.
        store_output(ob, patch, out, row_stride, pending, lane);
        pending = info.length;
        out = p.o + info.first_token * row_stride + int64_t{head} * kDim + column;
        barrier_wait(bar.full_p(), parity);
        wgmma_wait<0>();
        pin(n);
        barrier_arrive(bar.used_a(stage));
#pragma unroll
        for (int j = 0; j < 16; ++j) nb[j] = pack_bf16(n[2 * j], n[2 * j + 1]);
        const uint64_t solve = operand_k_major(shared + kChainP);
        const uint64_t q = operand_k_major(shared + kChainQ);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) wgmma_64<1>(n, nb + 4 * k, solve + k * 2, k > 0);
        wgmma_commit();
        barrier_wait(bar.full_q(), parity);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 8; ++k)
          wgmma_64<1>(o, sb + 4 * k, q + (k >> 2) * (kSlab >> 4) + (k & 3) * 2, k > 0);
        wgmma_commit();
        wgmma_wait<1>();
        pin(n);
        barrier_arrive(bar.used_p());
#pragma unroll
        for (int j = 0; j < 16; ++j) nb[j] = pack_bf16(n[2 * j], n[2 * j + 1]);

        // S = exp(b_C) S + K-^T N, then O += M N behind it
        pin(s);
        const float* decay = reinterpret_cast<const float*>(base + kChainDecay);
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          const float2 factor = *reinterpret_cast<const float2*>(decay + 8 * j + 2 * t);
          s[4 * j] *= factor.x;
          s[4 * j + 1] *= factor.y;
          s[4 * j + 2] *= factor.x;
          s[4 * j + 3] *= factor.y;
        }
        const uint64_t kd = operand_outer_major(shared + kChainK, kSlab);
        const uint64_t m = operand_k_major(shared + kChainM);
        barrier_wait(bar.full_k(), parity);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) wgmma_128_outer(s, nb + 4 * k, kd + k * 128);
        wgmma_commit();
        barrier_wait(bar.full_m(), parity);
        // All of the record has been copied: no write is to be ordered, so a plain store frees the
        // slot.
        if (thread == 0) store_relaxed(p.consumed + 2 * head + half, chunk + 1);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) wgmma_64<1>(o, nb + 4 * k, m + k * 2, true);
        wgmma_commit();
        wgmma_wait<2>();  // Q~ S is done
        __syncwarp();     // exp(b_C) likewise
        barrier_arrive(bar.used_q());

        ++chunk;
        if (chunk < chunk_last) {
          barrier_wait(bar.full_v(chunk & 1), (chunk >> 1) & 1);
          load_value(n, shared + kChainA + (chunk & 1) * kStageA + kTile, warp, lane);
        }
        wgmma_wait<1>();
        pin(s);
        barrier_arrive(bar.used_k());
#pragma unroll
        for (int j = 0; j < 32; ++j) sb[j] = pack_bf16(s[2 * j], s[2 * j + 1]);
        wgmma_wait<0>();
        pin(o);
        pin(s);
        barrier_arrive(bar.used_m());
#pragma unroll
        for (int j = 0; j < 16; ++j) ob[j] = pack_bf16(o[2 * j] * kScale, o[2 * j + 1] * kScale);
      }
      store_output(ob, patch, out, row_stride, pending, lane);
    }
    if (p.final_state != nullptr) {
#pragma unroll
      for (int j = 0; j < 16; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          p.final_state[state_at + (8 * j + (e & 1)) * kDim + (e >> 1) * 8] = s[4 * j + e];
    }
  }
}

}  // namespace lockstep::model::kda
