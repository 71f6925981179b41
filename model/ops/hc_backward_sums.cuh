#pragma once

// First kernel of the boundary backward: one warp reads a token's streams once and adds up what the
// gradients of its coefficients need; two more turn the sums of sixteen tokens into records for the
// second kernel while the others are at the next sixteen.

#include "model/ops/hc_backward_sinkhorn.cuh"

namespace lockstep::model::hc {

constexpr int kSumsWarps = 2 * kSumsGroup;  // tokens of a block at a time
constexpr int kMixWarps = kSumsWarps / kSumsGroup;
constexpr int kSumsThreads = 32 * (kSumsWarps + kMixWarps);
constexpr int kRing = 3;  // steps of 256 channels that a warp has or copies

/// Each lane copies what it will read itself: no barriers.
struct StreamWords {
  uint4 value[kStreams + 2][32];  // X, y, dx_normed
};
struct SumsShared {
  StreamWords ring[kSumsWarps][kRing];
  float norm_weight[kWidth];
  float sums[2][kSumsWarps][kTokenSums + 2];
};
constexpr size_t sums_bytes(int sinkhorn_iters) {
  return sizeof(SumsShared) + kMixWarps * denominators_bytes(sinkhorn_iters);
}
static_assert(sums_bytes(kMaxIterations) <= 227 * 1024, "shared memory of one block");

template <bool kMixes>
LOCKSTEP_DEVICE void copy_words(const BackwardParams& p, int64_t token, int step, StreamWords& to) {
  const int lane = threadIdx.x & 31, d = step * 256 + lane * 8;
  const auto copy = [&](const uint16_t* from, int i) {
    hopper::copy16(hopper::smem_address(&to.value[i][lane]), from, true);
  };
#pragma unroll
  for (int i = 0; i < kStreams; ++i) copy(p.x + token * kRow + i * kWidth + d, i);
  if constexpr (kMixes) copy(p.y + token * kWidth + d, kStreams);
  copy(p.dx_normed + token * kWidth + d, kStreams + 1);
}

/// along = dxhat . bf16(u), square = |u|^2, with_xhat_i = dxhat . X'_i, with_u_i = u . X'_i, where
/// dxhat = dx_normed * norm_weight (rounded as used, in shared memory). Every lane gets the sums.
template <BackwardMix kMix, bool kUsualNorm>
LOCKSTEP_DEVICE void sums_of_token(const BackwardParams& p,
                                   int64_t token,
                                   const float* norm_weight,
                                   StreamWords (&ring)[kRing],
                                   float (&sums)[kTokenSums]) {
  constexpr bool kMixes = kMix != BackwardMix::kNone;
  const int lane = threadIdx.x & 31;
  float post[4], comb[4][4], pre[4];  // comb[target][source]
  if constexpr (kMixes) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      post[i] = rounded_if(p.bf16_coefficients, __ldg(p.post + token * 4 + i));
#pragma unroll
      for (int j = 0; j < 4; ++j)
        comb[j][i] = rounded_if(p.bf16_coefficients, __ldg(p.comb + token * 16 + i * 4 + j));
    }
  }
  const float scale = rounded_if(p.bf16_base_scale, __ldg(p.scale));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float logit =
        __ldg(p.m + token * kLogits + i) * scale + rounded_if(p.bf16_base_scale, __ldg(p.base + i));
    pre[i] = 1.0f / (1.0f + expf(-logit)) + p.eps;
  }
#pragma unroll
  for (int k = 0; k < kTokenSums; ++k) sums[k] = 0.0f;

  constexpr int kSteps = kWidth / 256;
#pragma unroll
  for (int step = 0; step < kRing - 1; ++step) {
    copy_words<kMixes>(p, token, step, ring[step]);
    hopper::copy_commit();
  }
#pragma unroll 1
  for (int step = 0, slot = 0; step < kSteps; ++step, slot = slot + 1 == kRing ? 0 : slot + 1) {
    hopper::copy_wait<kRing - 2>();
    const StreamWords& now = ring[slot];
    const int channel = step * 256 + lane * 8;
    uint32_t x[kStreams][4], y[4], g[4];
#pragma unroll
    for (int i = 0; i < kStreams; ++i) unpack(x[i], now.value[i][lane]);
    if constexpr (kMixes) unpack(y, now.value[kStreams][lane]);
    unpack(g, now.value[kStreams + 1][lane]);
    // The slot that was read in the previous step.
    if (step + kRing - 1 < kSteps)
      copy_words<kMixes>(p, token, step + kRing - 1, ring[slot == 0 ? kRing - 1 : slot - 1]);
    hopper::copy_commit();
    const float4 w_low = *reinterpret_cast<const float4*>(norm_weight + channel);
    const float4 w_high = *reinterpret_cast<const float4*>(norm_weight + channel + 4);
    const float weight[8] = {
        w_low.x, w_low.y, w_low.z, w_low.w, w_high.x, w_high.y, w_high.z, w_high.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float low[4], high[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        low[i] = hopper::low_bf16(x[i][w]), high[i] = hopper::high_bf16(x[i][w]);
      if constexpr (kMixes) {
        float mixed_low[4], mixed_high[4];
        constexpr bool kThree = kMix == BackwardMix::kThreeRoundings;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint32_t word =
              hopper::pack_bf16(mixed<kThree>(post[j], hopper::low_bf16(y[w]), comb[j], low),
                                mixed<kThree>(post[j], hopper::high_bf16(y[w]), comb[j], high));
          mixed_low[j] = hopper::low_bf16(word), mixed_high[j] = hopper::high_bf16(word);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) low[j] = mixed_low[j], high[j] = mixed_high[j];
      }
      const auto channel_sums = [&](const float(&z)[4], float u, float rounded, float dxhat) {
        const float measured = !kUsualNorm && p.unrounded_statistic ? u : rounded;
        sums[0] = __fmaf_rn(dxhat, rounded, sums[0]);
        sums[1] = __fmaf_rn(measured, measured, sums[1]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sums[2 + i] = __fmaf_rn(dxhat, z[i], sums[2 + i]);
          sums[6 + i] = __fmaf_rn(measured, z[i], sums[6 + i]);
        }
      };
      float u_low = pre[0] * low[0], u_high = pre[0] * high[0];
#pragma unroll
      for (int i = 1; i < 4; ++i) {
        u_low = __fmaf_rn(pre[i], low[i], u_low);
        u_high = __fmaf_rn(pre[i], high[i], u_high);
      }
      const uint32_t rounded = hopper::pack_bf16(u_low, u_high);
      channel_sums(low, u_low, hopper::low_bf16(rounded), hopper::low_bf16(g[w]) * weight[2 * w]);
      channel_sums(
          high, u_high, hopper::high_bf16(rounded), hopper::high_bf16(g[w]) * weight[2 * w + 1]);
    }
  }
#pragma unroll
  for (int k = 0; k < kTokenSums; ++k)
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sums[k] += __shfl_xor_sync(kAllLanes, sums[k], step);
}

/// post and comb of one token into its record; zeros from p.end on. One warp.
LOCKSTEP_DEVICE void record_mix(const BackwardParams& p, int64_t token) {
  const int lane = threadIdx.x & 31;
  if (lane >= kCoefficients) return;
  float v = 0.0f;
  if (token < p.end && p.post != nullptr)
    v = rounded_if(p.bf16_coefficients,
                   __ldg(lane < 4 ? p.post + token * 4 + lane : p.comb + token * 16 + lane - 4));
  p.records[token - p.begin].post[lane] = v;  // comb follows post
}

extern __shared__ __align__(128) unsigned char sums_dynamic[];

template <BackwardMix kMix, bool kUsualNorm>
__global__ void __launch_bounds__(kSumsThreads, 1)
    backward_sums_kernel(const __grid_constant__ BackwardParams p) {
  hopper::launch_dependents();
  SumsShared& shared = *reinterpret_cast<SumsShared*>(sums_dynamic);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  static_assert(kSumsWarps == kBackTile);  // whole tiles of the second kernel get records
  const int tiles = static_cast<int>((p.end - p.begin + kBackTile - 1) / kBackTile);
  for (int i = threadIdx.x; i < kWidth; i += kSumsThreads)
    shared.norm_weight[i] = rounded_if(p.bf16_norm_weight, __ldg(p.norm_weight + i));
  __syncthreads();
  for (int tile = blockIdx.x, k = 0; tile < tiles; tile += gridDim.x, ++k) {
    const int64_t first = p.begin + int64_t{tile} * kBackTile;
    const int full = 1 + (k & 1), empty = 3 + (k & 1);
    if (warp < kSumsWarps) {
      const int64_t token = first + warp;
      float own[kTokenSums];
#pragma unroll
      for (int i = 0; i < kTokenSums; ++i) own[i] = 0.0f;
      if (token < p.end)
        sums_of_token<kMix, kUsualNorm>(p, token, shared.norm_weight, shared.ring[warp], own);
      record_mix(p, token);
      if (k >= 2) hopper::named_barrier(empty, kSumsThreads);  // the sums of k - 2 have been read
      if (lane == 0)
#pragma unroll
        for (int i = 0; i < kTokenSums; ++i) shared.sums[k & 1][warp][i] = own[i];
      __syncwarp();
      hopper::named_barrier_arrive(full, kSumsThreads);
    } else {
      const int own = warp - kSumsWarps;
      const Denominators keep = reinterpret_cast<float*>(
          sums_dynamic + sizeof(SumsShared) + own * denominators_bytes(p.sinkhorn_iters));
      hopper::named_barrier(full, kSumsThreads);
      mix_backward(p, first + own * kSumsGroup, shared.sums[k & 1] + own * kSumsGroup, keep);
      __syncwarp();
      if (tile + 2 * static_cast<int>(gridDim.x) < tiles)
        hopper::named_barrier_arrive(empty, kSumsThreads);
    }
  }
}

/// Records of a mix without a projection.
__global__ void backward_records_kernel(const __grid_constant__ BackwardParams p) {
  hopper::launch_dependents();
  const int64_t token = p.begin + blockIdx.x * int64_t{blockDim.x / 32} + (threadIdx.x >> 5);
  if (token < p.begin + (p.end - p.begin + kBackTile - 1) / kBackTile * kBackTile)
    record_mix(p, token);
}

}  // namespace lockstep::model::hc
