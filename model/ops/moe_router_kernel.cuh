#pragma once

// Choice of experts and its gradient: a warp for each token, its scores in shared memory, expert
// 32 i + lane in register i of kEach. All sums have one order that depends on E and k alone.

#include "model/ops/hopper.cuh"

namespace lockstep::model::moe {

using namespace hopper;

constexpr int kRouterWarps = 8, kRouterExperts = 512;

struct RouterParams {
  int64_t tokens;
  int experts, slots, groups, groups_kept;
  bool normalise, softmax, round_scores, replay;
  float epsilon, scaling;
  const float *logits, *bias;
  int64_t* chosen;
  float* weights;
  const float* dweights;
  float* dlogits;
};

LOCKSTEP_DEVICE float warp_sum(float x) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

/// Scores before rounding.
template <int kEach>
LOCKSTEP_DEVICE void router_scores(const RouterParams& p,
                                   const float* logits,
                                   int lane,
                                   float (&score)[kEach]) {
  float top = -INFINITY;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int e = 32 * i + lane;
    score[i] = e < p.experts ? __ldg(logits + e) : -INFINITY;
    top = fmaxf(top, score[i]);
  }
  if (!p.softmax) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) score[i] = __fdiv_rn(1.0f, 1.0f + expf(-score[i]));
    return;
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    score[i] = 32 * i + lane < p.experts ? expf(score[i] - top) : 0.0f;
    sum += score[i];
  }
  sum = warp_sum(sum);
#pragma unroll
  for (int i = 0; i < kEach; ++i) score[i] = __fdiv_rn(score[i], sum);
}

/// Sorts like x; NaN smallest, above 0, which means taken.
LOCKSTEP_DEVICE uint32_t router_key(float x) {
  const uint32_t bits = __float_as_uint(__fadd_rn(x, 0.0f));
  const uint32_t key = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return x == x ? key : 1;
}

/// The place of the largest key, the lowest of equal ones.
template <int kEach>
LOCKSTEP_DEVICE int largest(const uint32_t (&key)[kEach], int lane) {
  uint32_t top = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) top = max(top, key[i]);
  top = __reduce_max_sync(~0u, top);
  uint32_t place = 0xffffffff;
#pragma unroll
  for (int i = kEach - 1; i >= 0; --i)
    if (key[i] == top) place = 32 * i + lane;
  return static_cast<int>(__reduce_min_sync(~0u, place));
}

/// Keys of the experts of all groups but the best become 0.
template <int kEach>
LOCKSTEP_DEVICE void keep_best_groups(const RouterParams& p,
                                      const float* choice,
                                      int lane,
                                      uint32_t (&key)[kEach]) {
  const int each = p.experts / p.groups;
  float first = -INFINITY, second = -INFINITY;
  if (lane < p.groups)
    for (int e = 0; e < each; ++e) {
      const float c = choice[lane * each + e];
      if (c > first) {
        second = first;
        first = c;
      } else if (c > second) {
        second = c;
      }
    }
  uint32_t group[1] = {lane < p.groups ? router_key(each > 1 ? first + second : first) : 0};
  uint32_t kept = 0;
  for (int j = 0; j < p.groups_kept; ++j) {
    const int best = largest(group, lane);
    kept |= 1u << best;
    if (lane == best) group[0] = 0;
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int e = 32 * i + lane;
    if (e < p.experts && (kept >> (e / each) & 1) == 0) key[i] = 0;
  }
}

template <int kEach>
__global__ void __launch_bounds__(kRouterWarps * 32)
    route_kernel(const __grid_constant__ RouterParams p) {
  __shared__ float shared[kRouterWarps][2][kRouterExperts];
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const int64_t token = int64_t{blockIdx.x} * kRouterWarps + warp;
  if (token >= p.tokens) return;
  float* const scores = shared[warp][0];
  float* const choice = shared[warp][1];
  int64_t* const chosen = p.chosen + token * p.slots;
  float score[kEach];
  router_scores(p, p.logits + token * p.experts, lane, score);
  uint32_t key[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int e = 32 * i + lane;
    if (p.round_scores) score[i] = __bfloat162float(__float2bfloat16_rn(score[i]));
    key[i] = 0;
    if (e >= p.experts) continue;
    const float c = __fadd_rn(score[i], p.replay ? 0.0f : __ldg(p.bias + e));
    scores[e] = score[i], choice[e] = c;
    key[i] = router_key(c);
  }
  __syncwarp();
  int expert = 0;  // of slot `lane`
  if (p.replay) {
    if (lane < p.slots)
      expert = static_cast<int>(min(max(chosen[lane], int64_t{0}), int64_t{p.experts - 1}));
  } else {
    if (p.groups > 1) keep_best_groups(p, choice, lane, key);
    for (int j = 0; j < p.slots; ++j) {
      const int best = largest(key, lane);
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        if (best == 32 * i + lane) key[i] = 0;
      if (lane == j) expert = best;
    }
    if (lane < p.slots) chosen[lane] = expert;
  }
  const float own = lane < p.slots ? scores[expert] : 0.0f;
  float sum = 0.0f;
  for (int j = 0; j < p.slots; ++j) sum = __fadd_rn(sum, __shfl_sync(~0u, own, j));
  const float divisor = __fadd_rn(sum, p.epsilon);
  if (lane < p.slots)
    p.weights[token * p.slots + lane] =
        __fmul_rn(p.normalise ? __fdiv_rn(own, divisor) : own, p.scaling);
}

template <int kEach>
__global__ void __launch_bounds__(kRouterWarps * 32)
    route_backward_kernel(const __grid_constant__ RouterParams p) {
  __shared__ float shared[kRouterWarps][2][kRouterExperts];
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const int64_t token = int64_t{blockIdx.x} * kRouterWarps + warp;
  if (token >= p.tokens) return;
  float* const scores = shared[warp][0];
  float* const gradients = shared[warp][1];
  float score[kEach];
  router_scores(p, p.logits + token * p.experts, lane, score);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int e = 32 * i + lane;
    if (e < p.experts) scores[e] = score[i], gradients[e] = 0.0f;
  }
  __syncwarp();
  const bool slot = lane < p.slots;
  const int64_t id = slot ? p.chosen[token * p.slots + lane] : 0;
  const int expert = static_cast<int>(min(max(id, int64_t{0}), int64_t{p.experts - 1}));
  float used = slot ? scores[expert] : 0.0f;
  if (p.round_scores) used = __bfloat162float(__float2bfloat16_rn(used));
  const float dw = slot ? __ldg(p.dweights + token * p.slots + lane) : 0.0f;
  float sum = p.epsilon, along = 0.0f;
  for (int j = 0; j < p.slots; ++j) {
    sum = __fadd_rn(sum, __shfl_sync(~0u, used, j));
    along = __fmaf_rn(__shfl_sync(~0u, dw, j), __shfl_sync(~0u, used, j), along);
  }
  const float ds = p.scaling * (p.normalise ? __fdiv_rn(dw - __fdiv_rn(along, sum), sum) : dw);
  for (int j = 0; j < p.slots; ++j) {  // in order: replayed experts may repeat
    if (lane == j) gradients[expert] += ds;
    __syncwarp();
  }
  float dot = 0.0f;
  if (p.softmax) {
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (32 * i + lane < p.experts) dot = __fmaf_rn(gradients[32 * i + lane], score[i], dot);
    dot = warp_sum(dot);
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int e = 32 * i + lane;
    if (e >= p.experts) continue;
    const float s = score[i], d = gradients[e];
    p.dlogits[token * p.experts + e] = p.softmax ? s * (d - dot) : d * (s * (1.0f - s));
  }
}

}  // namespace lockstep::model::moe
