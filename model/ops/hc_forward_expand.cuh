#pragma once

// First half of the boundary: X' of a tile of 16 tokens and a slice of 256 channels, and the
// slice's share of the 24 products and of the sum of squares.

#include "model/ops/hc_forward_layout.cuh"

namespace lockstep::model::hc {

/// fn's slice into shared memory as bf16 terms, norm_weight whole. All threads.
LOCKSTEP_DEVICE void load_parameters(const Params& p, int slice, Shared& shared) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  constexpr int kItems = kFnFragments / kFnTerms;
#pragma unroll 2
  for (int item = warp; item < kItems; item += kThreads / 32) {
    const int rows = item % 3, stream = item / 3 % kStreams, part = item / (3 * kStreams);
    const int row = rows * 8 + (lane >> 2);
    const int channel = slice * kSliceWidth + part * 32 + (lane & 3) * 8;
    const float* from = p.fn + (row * kStreams + stream) * kWidth + channel;
    float rest[8];
    const float4 low = __ldg(reinterpret_cast<const float4*>(from));
    const float4 high = __ldg(reinterpret_cast<const float4*>(from) + 1);
    rest[0] = low.x, rest[1] = low.y, rest[2] = low.z, rest[3] = low.w;
    rest[4] = high.x, rest[5] = high.y, rest[6] = high.z, rest[7] = high.w;
#pragma unroll
    for (int term = kFnTerms - 1; term >= 0; --term) {  // largest first; stored smallest first
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        packed[i] = hopper::pack_bf16(rest[2 * i], rest[2 * i + 1]);
        rest[2 * i] -= hopper::low_bf16(packed[i]);
        rest[2 * i + 1] -= hopper::high_bf16(packed[i]);
        if (p.bf16_fn) rest[2 * i] = rest[2 * i + 1] = 0.0f;
      }
      shared.fn[item * kFnTerms + term][lane] =
          make_uint4(packed[0], packed[1], packed[2], packed[3]);
    }
  }
  for (int i = threadIdx.x; i < kWidth; i += kThreads) {
    const float w = __ldg(p.norm_weight + i);
    shared.norm_weight[i] = p.bf16_norm_weight ? to_bf16(w) : w;
  }
}

/// Streams and y of two tokens (rows lane / 4 and that + 8 of the tile), 8 channels each. After
/// mixing, x holds X'.
struct Fragment {
  uint32_t x[kStreams][2][4];
  uint32_t y[2][4];
};

/// Starts the loads of a tile. Tokens beyond the last read as zeros.
template <bool kMix>
LOCKSTEP_DEVICE void load_tile(const Params& p, int64_t first_token, int channel, Fragment& f) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t token = first_token + half * 8 + (lane >> 2);
    const bool valid = token < p.tokens;
    const uint16_t* x = p.x + token * (kStreams * kWidth) + channel;
#pragma unroll
    for (int i = 0; i < kStreams; ++i)
      unpack(f.x[i][half], valid ? load_once(x + i * kWidth) : make_uint4(0, 0, 0, 0));
    if constexpr (kMix)
      unpack(f.y[half], valid ? load_once(p.y + token * kWidth + channel) : make_uint4(0, 0, 0, 0));
  }
}

/// Starts the copy of a tile's post and comb to shared memory; zeros beyond the last token.
LOCKSTEP_DEVICE void copy_coefficients(const Params& p,
                                       int64_t first_token,
                                       float (&to)[kTile][kCoefficients],
                                       int thread) {
  if (thread < kTile * 5) {
    const int row = thread / 5, piece = thread % 5;
    const int64_t token = first_token + row;
    const bool valid = token < p.tokens;
    const int64_t at = valid ? token : 0;
    const float* from = piece == 0 ? p.post + at * 4 : p.comb + at * 16 + (piece - 1) * 4;
    hopper::copy16(hopper::smem_address(&to[row][piece * 4]), from, valid);
  }
  hopper::copy_commit();
}

/// Waits for this thread's part of copy_coefficients and rounds it.
LOCKSTEP_DEVICE void finish_coefficients(const Params& p,
                                         float (&to)[kTile][kCoefficients],
                                         int thread) {
  hopper::copy_wait<0>();
  if (p.bf16_coefficients && thread < kTile * 5) {
    float4* const own = reinterpret_cast<float4*>(&to[thread / 5][thread % 5 * 4]);
    const float4 v = *own;
    *own = make_float4(to_bf16(v.x), to_bf16(v.y), to_bf16(v.z), to_bf16(v.w));
  }
}

/// One 16-byte store; spelled out because the compiler splits some.
LOCKSTEP_DEVICE void store_whole(uint16_t* to, const uint32_t (&v)[4]) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to),
               "r"(v[0]),
               "r"(v[1]),
               "r"(v[2]),
               "r"(v[3])
               : "memory");
}

/// Replaces X by X' in the fragment and stores it.
template <bool kThreeRoundings>
LOCKSTEP_DEVICE void mix_tile(const Params& p,
                              int64_t first_token,
                              int channel,
                              const float (&coefficients)[kTile][kCoefficients],
                              Fragment& f) {
  const int row = (threadIdx.x & 31) >> 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float post[4], comb[4][4];  // comb[j][i]: target stream first
    const float4* const from = reinterpret_cast<const float4*>(coefficients[row + half * 8]);
#pragma unroll
    for (int i = 0; i < 5; ++i) {
      const float4 v = from[i];
      if (i == 0) {
        post[0] = v.x, post[1] = v.y, post[2] = v.z, post[3] = v.w;
      } else {
        comb[0][i - 1] = v.x, comb[1][i - 1] = v.y, comb[2][i - 1] = v.z, comb[3][i - 1] = v.w;
      }
    }
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float low[4], high[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        low[i] = hopper::low_bf16(f.x[i][half][w]);
        high[i] = hopper::high_bf16(f.x[i][half][w]);
      }
      const float y_low = hopper::low_bf16(f.y[half][w]), y_high = hopper::high_bf16(f.y[half][w]);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        f.x[j][half][w] = hopper::pack_bf16(mixed<kThreeRoundings>(post[j], y_low, comb[j], low),
                                            mixed<kThreeRoundings>(post[j], y_high, comb[j], high));
    }
    const int64_t token = first_token + half * 8 + row;
    if (token < p.tokens) {
      uint16_t* const to = p.x_next + token * (kStreams * kWidth) + channel;
#pragma unroll
      for (int j = 0; j < kStreams; ++j) store_whole(to + j * kWidth, f.x[j][half]);
    }
  }
}

struct Sums {
  float products[kLogits / 8][4];
  float squares[2];
};

/// This warp's 128 values of z against fn, and their squares.
LOCKSTEP_DEVICE void project_tile(const Shared& shared, int warp, const Fragment& f, Sums& sums) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kStreams; ++i)
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float low = hopper::low_bf16(f.x[i][half][w]);
        const float high = hopper::high_bf16(f.x[i][half][w]);
        sum = __fmaf_rn(high, high, __fmaf_rn(low, low, sum));
      }
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sums.squares[half] = sum + __shfl_xor_sync(0xffffffffu, sum, 2);
  }
#pragma unroll
  for (int n = 0; n < kLogits / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) sums.products[n][e] = 0.0f;
#pragma unroll
  for (int i = 0; i < kStreams; ++i)
#pragma unroll
    for (int term = 0; term < kFnTerms; ++term)
#pragma unroll
      for (int n = 0; n < kLogits / 8; ++n) {
        const uint4 b = shared.fn[((warp * kStreams + i) * 3 + n) * kFnTerms + term][lane];
        const uint32_t first[4] = {f.x[i][0][0], f.x[i][1][0], f.x[i][0][1], f.x[i][1][1]};
        const uint32_t second[4] = {f.x[i][0][2], f.x[i][1][2], f.x[i][0][3], f.x[i][1][3]};
        hopper::mma_bf16(sums.products[n], first, b.x, b.y);
        hopper::mma_bf16(sums.products[n], second, b.z, b.w);
      }
}

/// Sums over the warps of a group, in order, into this slice's partial sums.
LOCKSTEP_DEVICE void reduce_tile(
    const Sums& sums, GroupShared& shared, int group, int thread, float* partial) {
  const int lane = thread & 31, warp = thread >> 5, row = lane >> 2, column = (lane & 3) * 2;
  float* const products = shared.products[warp];
#pragma unroll
  for (int n = 0; n < kLogits / 8; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<float2*>(products + (row + half * 8) * kLogits + n * 8 + column) =
          make_float2(sums.products[n][2 * half], sums.products[n][2 * half + 1]);
  if ((lane & 3) < 2)
    shared.squares[warp][row + (lane & 3) * 8] = (lane & 1) ? sums.squares[1] : sums.squares[0];
  group_barrier(group);
  if (thread < kPartial / 2) {  // two sums a thread
    const int e = 2 * thread;
    const bool square = e >= kTile * kLogits;
    const float* const from =
        square ? &shared.squares[0][e - kTile * kLogits] : &shared.products[0][e];
    const int stride = square ? kTile : kTile * kLogits;
    float2 sum = *reinterpret_cast<const float2*>(from);
#pragma unroll
    for (int w = 1; w < kWarps; ++w) {
      const float2 v = *reinterpret_cast<const float2*>(from + w * stride);
      sum.x += v.x, sum.y += v.y;
    }
    __stcg(reinterpret_cast<float2*>(partial + e), sum);
  }
  __syncwarp();
}

}  // namespace lockstep::model::hc
