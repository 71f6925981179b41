#pragma once

// Order by expert, rows to and from it, combination. Each is bound by device memory: 16 bytes a
// lane, in token order, so that what belongs to a token is read from device memory once.

#include "model/ops/hopper.cuh"

namespace lockstep::model::moe {

using namespace hopper;

// ---- order --------------------------------------------------------------------------------------

constexpr int kOrderSlots = 1024;  // of one warp
constexpr int kOrderExperts = 512;

struct OrderParams {
  int64_t tokens, slots, count;  // count = tokens * slots
  int experts, parts;            // parts of kOrderSlots slots
  const int64_t* chosen;
  int64_t *token, *slot, *place, *offsets;
  int* counts;      // [parts][experts]; scan_kernel turns them into sums over earlier parts
  int64_t* totals;  // [experts]
  int64_t* row;     // [count] row of each slot
};

LOCKSTEP_DEVICE int expert_of(const OrderParams& p, int64_t slot) {
  const int64_t e = p.chosen[slot];
  return static_cast<int>(e < 0 ? 0 : e >= p.experts ? p.experts - 1 : e);
}

/// visit(slot, expert, slots of this part before it with the same expert)
template <class Visit>
LOCKSTEP_DEVICE void rank_slots(const OrderParams& p, int* seen, const Visit& visit) {
  const int lane = threadIdx.x;
  for (int e = lane; e < p.experts; e += 32) seen[e] = 0;
  __syncwarp();
  const int64_t first = int64_t{blockIdx.x} * kOrderSlots;
  for (int step = 0; step < kOrderSlots; step += 32) {
    const int64_t slot = first + step + lane;
    const bool valid = slot < p.count;
    const int expert = valid ? expert_of(p, slot) : -1;
    const unsigned same = __match_any_sync(~0u, expert);
    const int before = __popc(same & ((1u << lane) - 1));
    const int base = valid ? seen[expert] : 0;
    __syncwarp();
    if (valid) visit(slot, expert, base + before);
    if (valid && before == 0) seen[expert] = base + __popc(same);
    __syncwarp();
  }
}

static __global__ void __launch_bounds__(32) count_kernel(const __grid_constant__ OrderParams p) {
  __shared__ int seen[kOrderExperts];
  rank_slots(p, seen, [](int64_t, int, int) {});
  for (int e = threadIdx.x; e < p.experts; e += 32)
    p.counts[int64_t{blockIdx.x} * p.experts + e] = seen[e];
}

/// A warp per expert.
static __global__ void __launch_bounds__(32) scan_kernel(const __grid_constant__ OrderParams p) {
  const int expert = blockIdx.x, lane = threadIdx.x;
  int64_t before = 0;
  for (int start = 0; start < p.parts; start += 32) {
    const int part = start + lane;
    int* at = p.counts + int64_t{part} * p.experts + expert;
    const int own = part < p.parts ? *at : 0;
    int sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (part < p.parts) *at = static_cast<int>(before) + sum - own;
    before += __shfl_sync(~0u, sum, 31);
  }
  if (lane == 0) p.totals[expert] = before;
}

static __global__ void __launch_bounds__(32) scatter_kernel(const __grid_constant__ OrderParams p) {
  __shared__ int seen[kOrderExperts];
  __shared__ int64_t first[kOrderExperts];
  const int lane = threadIdx.x;
  int64_t before = 0;
  for (int start = 0; start < p.experts; start += 32) {
    const int e = start + lane;
    const int64_t own = e < p.experts ? p.totals[e] : 0;
    int64_t sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int64_t other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (e < p.experts) {
      const int64_t offset = before + sum - own;
      first[e] = offset + (p.parts > 0 ? p.counts[int64_t{blockIdx.x} * p.experts + e] : 0);
      if (blockIdx.x == 0) p.offsets[e] = offset;
    }
    before += __shfl_sync(~0u, sum, 31);
  }
  if (blockIdx.x == 0 && lane == 0) p.offsets[p.experts] = before;
  __syncwarp();
  rank_slots(p, seen, [&](int64_t slot, int expert, int rank) {
    const int64_t row = first[expert] + rank;
    p.token[row] = slot / p.slots;
    p.slot[row] = slot;
    p.row[slot] = row;
  });
}

static __global__ void place_kernel(const __grid_constant__ OrderParams p) {
  const int64_t slot = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (slot >= p.count) return;
  const int64_t first = slot / p.slots * p.slots, row = p.row[slot];
  int rank = 0;
  for (int64_t j = 0; j < p.slots; ++j) rank += p.row[first + j] < row;
  p.place[first + rank] = row;
}

// ---- rows ---------------------------------------------------------------------------------------

struct RowsParams {
  int64_t tokens, slots, width;
  const int64_t *slot, *place;
  const uint16_t *rows, *dy;  // dy: or x
  const float* weights;
  uint16_t *out, *drows;
  float* dweights;
  bool weighed, sum;  // roundings
};
constexpr int kRowWarps = 8;

/// gridDim.y blocks of 128 threads share a token, 8 channels each: its row is read once.
static __global__ void __launch_bounds__(128) gather_kernel(const __grid_constant__ RowsParams p) {
  const int64_t token = blockIdx.x, channel = (int64_t{blockIdx.y} * 128 + threadIdx.x) * 8;
  if (channel >= p.width) return;
  const uint4 v = *reinterpret_cast<const uint4*>(p.dy + token * p.width + channel);
#pragma unroll 8
  for (int64_t j = 0; j < p.slots; ++j) {
    const int64_t row = p.place[token * p.slots + j];
    *reinterpret_cast<uint4*>(p.drows + row * p.width + channel) = v;
  }
}

LOCKSTEP_DEVICE float bf16_rounded(float x) { return low_bf16(pack_bf16(x, 0.0f)); }

/// Blocks as in gather_kernel.
template <bool kWeighed>
__global__ void __launch_bounds__(128) sum_kernel(const __grid_constant__ RowsParams p) {
  const int64_t token = blockIdx.x, channel = (int64_t{blockIdx.y} * 128 + threadIdx.x) * 8;
  if (channel >= p.width) return;
  float sum[8] = {};
#pragma unroll 8
  for (int64_t j = 0; j < p.slots; ++j) {
    const int64_t row = p.place[token * p.slots + j];
    const uint4 v = *reinterpret_cast<const uint4*>(p.rows + row * p.width + channel);
    const float w = kWeighed ? p.weights[p.slot[row]] : 1.0f;
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float x = i % 2 == 0 ? low_bf16(words[i / 2]) : high_bf16(words[i / 2]);
      if (!kWeighed) {
        sum[i] += x;
      } else {
        const float wx = x * w, r = p.weighed ? bf16_rounded(wx) : wx, s = sum[i] + r;
        sum[i] = p.sum ? bf16_rounded(s) : s;
      }
    }
  }
  *reinterpret_cast<uint4*>(p.out + token * p.width + channel) =
      make_uint4(pack_bf16(sum[0], sum[1]),
                 pack_bf16(sum[2], sum[3]),
                 pack_bf16(sum[4], sum[5]),
                 pack_bf16(sum[6], sum[7]));
}

/// A warp per row, in token order.
static __global__ void __launch_bounds__(kRowWarps * 32)
    combine_backward_kernel(const __grid_constant__ RowsParams p) {
  const int64_t at = int64_t{blockIdx.x} * kRowWarps + threadIdx.x / 32;
  if (at >= p.tokens * p.slots) return;
  const int64_t row = p.place[at], slot = p.slot[row];
  const float w = p.weights[slot];
  const uint4* gradient = reinterpret_cast<const uint4*>(p.dy + at / p.slots * p.width);
  const uint4* value = reinterpret_cast<const uint4*>(p.rows + row * p.width);
  uint4* to = reinterpret_cast<uint4*>(p.drows + row * p.width);
  const int64_t words = p.width / 8;
  float dot = 0.0f;
#pragma unroll 4
  for (int64_t i = threadIdx.x % 32; i < words; i += 32) {
    const uint4 g4 = gradient[i], v4 = value[i];
    const uint32_t g[4] = {g4.x, g4.y, g4.z, g4.w}, v[4] = {v4.x, v4.y, v4.z, v4.w};
    uint32_t d[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      dot = fmaf(low_bf16(g[k]), low_bf16(v[k]), dot);
      dot = fmaf(high_bf16(g[k]), high_bf16(v[k]), dot);
      d[k] = pack_bf16(w * low_bf16(g[k]), w * high_bf16(g[k]));
    }
    to[i] = make_uint4(d[0], d[1], d[2], d[3]);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) dot += __shfl_xor_sync(~0u, dot, step);
  if (threadIdx.x % 32 == 0) p.dweights[slot] = dot;
}

}  // namespace lockstep::model::moe
