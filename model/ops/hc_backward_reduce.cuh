#pragma once

// Last step of the boundary backward: sums of partial sums, in a fixed order.

#include "model/ops/hc_backward_layout.cuh"

namespace lockstep::model::hc {

constexpr int kReduceThreads = 256;

/// dpost and dcomb of the pass's tokens: over the slices, in order. One thread a value.
LOCKSTEP_DEVICE void reduce_mix(const BackwardParams& p, int64_t block) {
  const int64_t i = block * kReduceThreads + threadIdx.x;
  const int64_t token = i / kMixSums;
  const int e = static_cast<int>(i % kMixSums);
  if (token >= p.end - p.begin) return;
  const float* from = p.mix_sums + token * (kBackSlices * kMixSums) + e;
  float sum = 0.0f;
#pragma unroll 16
  for (int s = 0; s < kBackSlices; ++s) sum += from[s * kMixSums];
  if (e < 4) {
    p.dpost[(p.begin + token) * 4 + e] = sum;
  } else {
    p.dcomb[(p.begin + token) * 16 + e - 4] = sum;
  }
}

constexpr int kFnBlocks = kLogits * kRow / kReduceThreads, kNormBlocks = kWidth / kReduceThreads;
constexpr int kParameterBlocks = kFnBlocks + kNormBlocks + kLogits + 3;

/// Gradients of the parameters: over the teams, and for base and scale over groups of tokens.
LOCKSTEP_DEVICE void reduce_parameters(const BackwardParams& p, int64_t groups, int block) {
  __shared__ float sums[kReduceThreads / 32];
  if (block < kFnBlocks + kNormBlocks) {
    const bool is_fn = block < kFnBlocks;
    const int i = (is_fn ? block : block - kFnBlocks) * kReduceThreads + threadIdx.x;
    const float* const from = is_fn ? p.fn_sums : p.norm_sums;
    const int64_t stride = is_fn ? kLogits * kRow : kWidth;
    float sum = 0.0f;
    if (groups > 0)
#pragma unroll
      for (int team = 0; team < kBackTeams; ++team) sum += from[team * stride + i];
    (is_fn ? p.dfn : p.dnorm_weight)[i] = sum;
    return;
  }
  const int e = block - kFnBlocks - kNormBlocks;
  float sum = 0.0f;
#pragma unroll 8
  for (int64_t g = threadIdx.x; g < groups; g += kReduceThreads)
    sum += p.logit_sums[g * kLogitSums + e];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kReduceThreads / 32; ++w) sum += sums[w];
  (e < kLogits ? p.dbase + e : p.dscale + e - kLogits)[0] = sum;
}

/// Parameters (in the last pass), then dpost and dcomb.
__global__ void __launch_bounds__(kReduceThreads)
    backward_reduce_kernel(const __grid_constant__ BackwardParams p,
                           int parameter_blocks,
                           int64_t groups) {
  hopper::wait_for_previous_kernel();
  const int block = static_cast<int>(blockIdx.x);
  if (block < parameter_blocks) {
    reduce_parameters(p, groups, block);
  } else {
    reduce_mix(p, block - parameter_blocks);
  }
}

}  // namespace lockstep::model::hc
