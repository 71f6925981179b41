#pragma once

// The state chain of one head. Two warpgroups, one per half of V, share the tiles that one producer
// thread brings in. Everything is computed transposed (S^T: V rows, K columns), so that each result
// is, register for register, the left operand of the next product: the state, N and the output never
// pass through shared memory on the way from one product to the next.

#include "model/ops/kda_forward_tiles.cuh"

namespace lockstep::model::kda {

using namespace hopper;

constexpr int kStages = 2;
constexpr int kOutRow = 48;                   // bytes per token of a warp's output patch (16 V + pad)
constexpr int kOutPatch = kChunk * kOutRow;
constexpr int kChainOut = kStages * kStageBytes;
constexpr int kChainBarriers = kChainOut + 8 * kOutPatch;
constexpr int kChainBytes = (kChainBarriers + 4 * kStages * 8 + 1023) / 1024 * 1024;

struct ChainBarriers {
  uint32_t base;
  LOCKSTEP_DEVICE uint32_t full_a(int stage) const { return base + 8 * stage; }
  LOCKSTEP_DEVICE uint32_t full_b(int stage) const { return base + 8 * (kStages + stage); }
  LOCKSTEP_DEVICE uint32_t empty_a(int stage) const { return base + 8 * (2 * kStages + stage); }
  LOCKSTEP_DEVICE uint32_t empty_b(int stage) const { return base + 8 * (3 * kStages + stage); }
};

LOCKSTEP_DEVICE void chain_init(uint32_t shared) {
  const ChainBarriers bar{shared + kChainBarriers};
  for (int s = 0; s < kStages; ++s) {
    barrier_init(bar.full_a(s), 1);
    barrier_init(bar.full_b(s), 1);
    barrier_init(bar.empty_a(s), 8);
    barrier_init(bar.empty_b(s), 8);
  }
  fence_barrier_init();
}

/// One thread: copies the records of chunks [first, last) of `head` through the stages.
LOCKSTEP_DEVICE void chain_produce(const Params& p, int head, int64_t first, int64_t last, uint32_t shared) {
  const ChainBarriers bar{shared + kChainBarriers};
  uint32_t step = 0;
  for (int64_t chunk = first; chunk < last; ++chunk, ++step) {
    const int stage = step % kStages;
    const uint32_t parity = ((step / kStages) & 1) ^ 1;
    const unsigned char* source = record(p, chunk, head);
    const uint32_t target = shared + stage * kStageBytes;
    if (p.ring > 0) {
      const int* flag = p.ready + int64_t{head} * p.ring + chunk % p.ring;
      while (load_acquire(flag) != static_cast<int>(chunk) + 1) __nanosleep(32);
      fence_async_all();
    }
    barrier_wait(bar.empty_a(stage), parity);
    barrier_expect_bytes(bar.full_a(stage), kPartA);
    bulk_load(target, source, kPartA, bar.full_a(stage));
    barrier_wait(bar.empty_b(stage), parity);
    // This stage's previous record has been used, hence copied: its slot in the ring is free.
    if (p.ring > 0 && step >= kStages) store_release(p.consumed + head, static_cast<int>(chunk) + 1 - kStages);
    barrier_expect_bytes(bar.full_b(stage), kPartB);
    bulk_load(target + kPartA, source + kPartA, kPartB, bar.full_b(stage));
  }
}

/// U of this warp's 16 V rows as accumulators of N^T.
LOCKSTEP_DEVICE void load_u(float (&n)[32], uint32_t slab, int warp, int lane) {
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

/// One warpgroup (`group` 0 or 1: V columns 64 group ..): the chain of `head` over documents
/// [first_document, last_document).
LOCKSTEP_DEVICE void chain_consume(const Params& p,
                                   int head,
                                   int64_t first_document,
                                   int64_t last_document,
                                   unsigned char* base,
                                   int group,
                                   int thread) {
  const uint32_t shared = smem_address(base);
  const ChainBarriers bar{shared + kChainBarriers};
  const int warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
  const uint32_t patch = shared + kChainOut + (group * 4 + warp) * kOutPatch;
  const int64_t row_stride = int64_t{p.heads} * kDim;
  const int column = group * 64 + warp * 16;  // first V column of this warp
  float s[64], n[32], o[32];
  uint32_t sb[32], nb[16], ob[16];
  uint32_t step = 0;

  for (int64_t document = first_document; document < last_document; ++document) {
    const int64_t state_at = ((document * p.heads + head) * kDim + 2 * t) * kDim + column + g;
#pragma unroll
    for (int j = 0; j < 16; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        s[4 * j + e] = p.initial_state == nullptr
                           ? 0.0f
                           : p.initial_state[state_at + (8 * j + (e & 1)) * kDim + (e >> 1) * 8];
    const int chunk_first = p.chunk_begin[document], chunk_last = p.chunk_begin[document + 1];

    if (chunk_first < chunk_last) {
#pragma unroll
      for (int j = 0; j < 32; ++j) sb[j] = pack_bf16(s[2 * j], s[2 * j + 1]);
#pragma unroll
      for (int j = 0; j < 16; ++j) ob[j] = 0;
      barrier_wait(bar.full_a(step % kStages), (step / kStages) & 1);
      load_u(n, shared + (step % kStages) * kStageBytes + kTileU + group * kSlab, warp, lane);
      int pending = 0;  // tokens of the finished output that `ob` holds
      uint16_t* out = p.o;

      for (int chunk = chunk_first; chunk < chunk_last; ++chunk) {
        const int stage = step % kStages;
        const uint32_t parity = (step / kStages) & 1;
        const uint32_t tile = shared + stage * kStageBytes;
        const ChunkInfo info = p.chunks[chunk];

        // N = U - W S, then O = Q~ S behind it
        const uint64_t w = operand_k_major(tile + kTileW);
        const uint64_t q = operand_k_major(tile + kTileQ);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 8; ++k)
          wgmma_64<-1>(n, sb + 4 * k, w + (k >> 2) * (kSlab >> 4) + (k & 3) * 2, true);
        wgmma_commit();
        barrier_wait(bar.full_b(stage), parity);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 8; ++k)
          wgmma_64<1>(o, sb + 4 * k, q + (k >> 2) * (kSlab >> 4) + (k & 3) * 2, k > 0);
        wgmma_commit();

        // Meanwhile: the previous chunk's output goes out, the state decays.
        store_output(ob, patch, out, row_stride, pending, lane);
        const float* decay = reinterpret_cast<const float*>(base + stage * kStageBytes + kTileDecay);
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          const float2 factor = *reinterpret_cast<const float2*>(decay + 8 * j + 2 * t);
          s[4 * j] *= factor.x;
          s[4 * j + 1] *= factor.y;
          s[4 * j + 2] *= factor.x;
          s[4 * j + 3] *= factor.y;
        }
        pending = info.length;
        out = p.o + info.first_token * row_stride + int64_t{head} * kDim + column;

        wgmma_wait<1>();
        pin(n);
        if (lane == 0) barrier_arrive(bar.empty_a(stage));
#pragma unroll
        for (int j = 0; j < 16; ++j) nb[j] = pack_bf16(n[2 * j], n[2 * j + 1]);

        // S = exp(b_C) S + K-^T N, then O += M N behind it
        const uint64_t kd = operand_outer_major(tile + kTileK, kSlab);
        const uint64_t m = operand_k_major(tile + kTileM);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) wgmma_128_outer(s, nb + 4 * k, kd + k * 128);
        wgmma_commit();
#pragma unroll
        for (int k = 0; k < 4; ++k) wgmma_64<1>(o, nb + 4 * k, m + k * 2, true);
        wgmma_commit();

        ++step;
        if (chunk + 1 < chunk_last) {
          barrier_wait(bar.full_a(step % kStages), (step / kStages) & 1);
          load_u(n, shared + (step % kStages) * kStageBytes + kTileU + group * kSlab, warp, lane);
        }
        wgmma_wait<1>();
        pin(s);
#pragma unroll
        for (int j = 0; j < 32; ++j) sb[j] = pack_bf16(s[2 * j], s[2 * j + 1]);
        wgmma_wait<0>();
        pin(o);
        pin(s);
        if (lane == 0) barrier_arrive(bar.empty_b(stage));
#pragma unroll
        for (int j = 0; j < 16; ++j) ob[j] = pack_bf16(o[2 * j], o[2 * j + 1]);
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
