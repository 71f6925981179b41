#pragma once

// Scores of queries against pools for sm_90a. A block has 8 tokens and a range of pools; pools come
// through a ring of stages of 128, queries stay. Each of two math warpgroups has 4 of the tokens:
// the product of 64 pools with their 4 x 32 query heads has pools along the rows, so that a thread
// holds 8 heads of each token for two pools, and the sum over heads needs three shuffles a pool.
// While one half of a stage is multiplied, the sums of the other are made.
//
// Rows are 128 bytes (e4m3) or two slabs of 128 bytes (bf16), 128-byte swizzle.

#include "model/ops/hopper_tensor.cuh"
#include "model/ops/indexer_pool_kernel.cuh"

namespace lockstep::model::indexer {

enum class Dots { kFp8, kBf16, kRoundedBf16 };

constexpr int kGroupTokens = 8, kTilePools = 128;
constexpr int kPoolSplit = 8192;  // pools of a block at most
constexpr int kScoreThreads = 384;

template <Dots kDots>
struct ScoreShared {
  static constexpr int kSlabs = kDots == Dots::kFp8 ? 1 : 2;
  static constexpr int kQuerySlab = kGroupTokens * kHeads * 128, kPoolSlab = kTilePools * 128;
  static constexpr int kStages = 4;
  static constexpr int kStageBytes = kSlabs * kPoolSlab;
  static constexpr int kPoolsAt = kSlabs * kQuerySlab;
  static constexpr int kBarriersAt = kPoolsAt + kStages * kStageBytes;
  static constexpr int kRangeAt = kBarriersAt + (2 * kStages + 1) * 8;
  static constexpr int kBytes = kRangeAt + 16;
};

struct ScoreParams {
  CUtensorMap q, pooled;  // bytes [count * 32][row], [pools][row]
  Documents documents;
  int64_t first, count;
  const float* weight;
  const float* pool_scale;
  float constant;  // bf16: times weight
  float* scores;
  int64_t stride;
  int budget;  // pools
};

/// Where a token of the packed row stands.
struct Place {
  int64_t begin;     // of its document
  int64_t position;  // in it
  int64_t origin;    // first pool of the document
  int64_t full;      // pools that it sees
};
LOCKSTEP_DEVICE Place place_of(const Documents& d, int64_t token) {
  const int64_t document = range_of(d.cu, d.documents, token);
  Place place;
  place.begin = __ldg(d.cu + document);
  place.position = token - place.begin;
  place.origin = __ldg(d.pool_offsets + document);
  place.full = (place.position + 1) / d.kpool;
  return place;
}

/// d[64x128] (+)= a[64 x 32 bytes] b[128 x 32 bytes]^T, both in shared memory, contraction-major.
template <Dots kDots>
LOCKSTEP_DEVICE void wgmma_scores(float (&d)[64], uint64_t a, uint64_t b, bool accumulate) {
  if constexpr (kDots == Dots::kFp8) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " LOCKSTEP_WGMMA_128_D
        ", %64, %65, p, 1, 1;\n}\n"
        : LOCKSTEP_D64(d, 0)
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
  } else {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " LOCKSTEP_WGMMA_128_D
        ", %64, %65, p, 1, 1, 0, 0;\n}\n"
        : LOCKSTEP_D64(d, 0)
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
  }
}

/// Issues the product of 64 pools at `pools` with the warpgroup's queries at `queries`.
template <Dots kDots>
LOCKSTEP_DEVICE void multiply(float (&d)[64], uint32_t pools, uint32_t queries) {
  using S = ScoreShared<kDots>;
  wgmma_fence();
#pragma unroll
  for (int slab = 0; slab < S::kSlabs; ++slab)
#pragma unroll
    for (int step = 0; step < 4; ++step)
      wgmma_scores<kDots>(d,
                          operand_k_major(pools + slab * S::kPoolSlab) + step * 2,
                          operand_k_major(queries + slab * S::kQuerySlab) + step * 2,
                          slab + step > 0);
  wgmma_commit();
}

/// d[4 j ...]: pool row lane / 4 (then 8 further), query columns 8 j + 2 (lane % 4) + {0, 1}. After
/// it, lane % 4 = i has token i's sums of those two rows in `sums`.
template <Dots kDots>
LOCKSTEP_DEVICE void sum_heads(const float (&d)[64],
                               const float (&weight)[32],
                               int lane,
                               float (&sums)[2]) {
  float s[4][2];
#pragma unroll
  for (int token = 0; token < 4; ++token)
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float x = d[16 * token + 4 * j + 2 * row], y = d[16 * token + 4 * j + 2 * row + 1];
        if constexpr (kDots == Dots::kRoundedBf16) {
          const uint32_t both = pack_bf16(x, y);
          x = low_bf16(both), y = high_bf16(both);
        }
        sum = __fmaf_rn(weight[8 * token + 2 * j], fmaxf(x, 0.0f), sum);
        sum = __fmaf_rn(weight[8 * token + 2 * j + 1], fmaxf(y, 0.0f), sum);
      }
      s[token][row] = sum;
    }
  const bool high = (lane & 2) != 0, odd = (lane & 1) != 0;
  float half[2][2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float keep = high ? s[2 + i][row] : s[i][row];
      const float give = high ? s[i][row] : s[2 + i][row];
      half[i][row] = keep + __shfl_xor_sync(~0u, give, 2);
    }
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float keep = odd ? half[1][row] : half[0][row];
    const float give = odd ? half[0][row] : half[1][row];
    sums[row] = keep + __shfl_xor_sync(~0u, give, 1);
  }
}

extern __shared__ __align__(1024) unsigned char score_shared[];

/// grid (groups of 8 tokens, splits of the pools).
template <Dots kDots>
__global__ void __launch_bounds__(kScoreThreads, 1)
    score_kernel(const __grid_constant__ ScoreParams p) {
  using S = ScoreShared<kDots>;
  int64_t* const range = reinterpret_cast<int64_t*>(score_shared + S::kRangeAt);
  const uint32_t shared = smem_address(score_shared);
  const uint32_t queries_full = shared + S::kBarriersAt + 2 * S::kStages * 8;
  const auto full = [&](int s) { return shared + S::kBarriersAt + s * 8; };
  const auto empty = [&](int s) { return shared + S::kBarriersAt + (S::kStages + s) * 8; };
  const int thread = threadIdx.x, lane = thread & 31;
  const int64_t group = int64_t{blockIdx.x} * kGroupTokens;
  if (thread < 32) {
    int64_t begin = INT64_MAX, end = 0;
    if (lane < kGroupTokens && group + lane < p.count) {
      const Place place = place_of(p.documents, p.first + group + lane);
      if (place.full > p.budget) begin = place.origin, end = place.origin + place.full;
    }
#pragma unroll
    for (int step = 1; step < kGroupTokens; step *= 2) {
      begin = min(begin, __shfl_xor_sync(~0u, begin, step));
      end = max(end, __shfl_xor_sync(~0u, end, step));
    }
    if (lane == 0) {
      const int64_t from = int64_t{blockIdx.y} * kPoolSplit;
      range[0] = max(begin, from) / kTilePools * kTilePools;
      range[1] = min(end, from + kPoolSplit);
    }
  }
  if (thread == 32) {
    for (int s = 0; s < S::kStages; ++s) {
      barrier_init(full(s), 1);
      barrier_init(empty(s), 8);
    }
    barrier_init(queries_full, 1);
    fence_barrier_init();
  }
  __syncthreads();
  const int64_t begin = range[0], end = range[1];
  if (begin >= end) return;
  if (thread < 128) {
    fewer_registers<40>();
    if (thread == 0) {
      barrier_expect_bytes(queries_full, S::kSlabs * S::kQuerySlab);
      for (int slab = 0; slab < S::kSlabs; ++slab)
        tensor_load(shared + slab * S::kQuerySlab,
                    &p.q,
                    slab * 128,
                    static_cast<int>(group * kHeads),
                    0,
                    queries_full);
      int stage = 0;
      uint32_t parity = 1;
      for (int64_t pool = begin; pool < end; pool += kTilePools) {
        barrier_wait(empty(stage), parity);
        barrier_expect_bytes(full(stage), S::kStageBytes);
        for (int slab = 0; slab < S::kSlabs; ++slab)
          tensor_load(shared + S::kPoolsAt + stage * S::kStageBytes + slab * S::kPoolSlab,
                      &p.pooled,
                      slab * 128,
                      static_cast<int>(pool),
                      0,
                      full(stage));
        if (++stage == S::kStages) stage = 0, parity ^= 1;
      }
    }
    return;
  }
  more_registers<232>();
  const int warpgroup = thread / 128 - 1, warp = thread / 32 % 4;
  const uint32_t queries = shared + warpgroup * 4 * kHeads * 128;
  const int64_t token = group + 4 * warpgroup;  // of this call
  float weight[32];
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t at = min(token + i, p.count - 1) * kHeads + 8 * j + 2 * (lane & 3);
      const float2 w = __ldg(reinterpret_cast<const float2*>(p.weight + at));
      weight[8 * i + 2 * j] = kDots == Dots::kFp8 ? w.x : w.x * p.constant;
      weight[8 * i + 2 * j + 1] = kDots == Dots::kFp8 ? w.y : w.y * p.constant;
    }
  const bool exists = token + (lane & 3) < p.count;
  const int row = warp * 16 + lane / 4;
  float* const to = p.scores + min(token + (lane & 3), p.count - 1) * p.stride + row;
  const int64_t last_pool = p.documents.tokens / p.documents.kpool - 1;
  // Sums of 64 pools from `pool` on.
  const auto finish = [&](const float(&d)[64], int64_t pool) {
    float scale[2] = {1.0f, 1.0f}, sums[2];
    if (kDots == Dots::kFp8) {
      scale[0] = __ldg(p.pool_scale + min(pool + row, last_pool));
      scale[1] = __ldg(p.pool_scale + min(pool + row + 8, last_pool));
    }
    sum_heads<kDots>(d, weight, lane, sums);
    if (exists) {
      to[pool] = sums[0] * scale[0];
      to[pool + 8] = sums[1] * scale[1];
    }
  };
  float low[64], high[64];
  int stage = 0;
  uint32_t parity = 0;
  const auto second_half = [&](uint32_t at, int64_t pool) {
    multiply<kDots>(high, at + 64 * 128, queries);
    wgmma_wait<1>();
    pin(low);
    finish(low, pool);
    wgmma_wait<0>();
    pin(high);
    if (lane == 0) barrier_arrive(empty(stage));
    __syncwarp();
    if (++stage == S::kStages) stage = 0, parity ^= 1;
  };
  const uint32_t first_at = shared + S::kPoolsAt;
  barrier_wait(queries_full, 0);
  barrier_wait(full(stage), parity);
  multiply<kDots>(low, first_at, queries);
  second_half(first_at, begin);
  int64_t pool = begin + kTilePools;
  for (; pool < end; pool += kTilePools) {
    const uint32_t at = shared + S::kPoolsAt + stage * S::kStageBytes;
    barrier_wait(full(stage), parity);
    multiply<kDots>(low, at, queries);
    finish(high, pool - kTilePools / 2);
    second_half(at, pool);
  }
  finish(high, pool - kTilePools / 2);
}

}  // namespace lockstep::model::indexer
