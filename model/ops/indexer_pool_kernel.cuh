#pragma once

// Pooled keys, Walsh-Hadamard rotation and e4m3 rows. Every operation is the one that the CPU form
// does, in its order, so that bytes agree; nothing is contracted to fused multiply-adds.

#include <cuda_fp8.h>

#include "model/ops/hopper.cuh"

namespace lockstep::model::indexer {

using namespace hopper;

constexpr int kDim = 128, kHeads = 32;
constexpr int kRowThreads = 256;

struct Documents {
  int64_t tokens, documents, kpool;
  const int64_t* cu;
  const int64_t* pool_offsets;
};

/// The last d with from[d] <= value: where from has duplicates (empty ranges) the one that has it.
LOCKSTEP_DEVICE int64_t range_of(const int64_t* from, int64_t count, int64_t value) {
  int64_t low = 0, high = count;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (__ldg(from + middle) <= value) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

/// exp for x <= 0, the operations of exp_of in vector_exp.hpp.
LOCKSTEP_DEVICE float exp_of(float x) {
  constexpr float kLog2E = 1.44269504088896341f, kShift = 12582912.0f;
  constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  const float clamped = x < -87.0f ? -87.0f : x;
  const float shifted = __fmaf_rn(clamped, kLog2E, kShift);
  const float n = __fsub_rn(shifted, kShift);
  float r = __fmaf_rn(-n, kLn2High, clamped);
  r = __fmaf_rn(-n, kLn2Low, r);
  float p = 1.9875691500e-4f;
  p = __fmaf_rn(p, r, 1.3981999507e-3f);
  p = __fmaf_rn(p, r, 8.3334519073e-3f);
  p = __fmaf_rn(p, r, 4.1665795894e-2f);
  p = __fmaf_rn(p, r, 1.6666665459e-1f);
  p = __fmaf_rn(p, r, 5.0000001201e-1f);
  p = __fadd_rn(__fmaf_rn(__fmul_rn(p, r), r, r), 1.0f);
  const uint32_t exponent = (__float_as_uint(shifted) << 23) + (127u << 23);
  return x < -87.0f ? 0.0f : __fmul_rn(p, __uint_as_float(exponent));
}

LOCKSTEP_DEVICE float rounded_bf16(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

// A row of 128 lies in 128 / kEach neighbouring lanes, kEach neighbouring channels in each.

/// Natural order, stages of stride 1, 2, ..., 64, then one multiplication and one rounding.
template <int kEach>
LOCKSTEP_DEVICE void rotate(float (&x)[kEach], int lane) {
#pragma unroll
  for (int stride = 1; stride < kEach; stride *= 2)
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if ((i & stride) == 0) {
        const float a = x[i], b = x[i + stride];
        x[i] = __fadd_rn(a, b);
        x[i + stride] = __fsub_rn(a, b);
      }
#pragma unroll
  for (int stride = 1; stride < kDim / kEach; stride *= 2)
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float other = __shfl_xor_sync(~0u, x[i], stride);
      x[i] = (lane & stride) == 0 ? __fadd_rn(x[i], other) : __fsub_rn(other, x[i]);
    }
#pragma unroll
  for (int i = 0; i < kEach; ++i) x[i] = rounded_bf16(__fmul_rn(x[i], 0.08838834764831845f));
}

/// The row's bytes of this lane, lowest channel first; returns its scale.
template <int kEach>
LOCKSTEP_DEVICE float quantise(const float (&x)[kEach], bool pow2, uint32_t (&bytes)[kEach / 4]) {
  float top = 1e-4f, scale;
#pragma unroll
  for (int i = 0; i < kEach; ++i) top = fmaxf(top, fabsf(x[i]));
#pragma unroll
  for (int step = 1; step < kDim / kEach; step *= 2)
    top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
  if (pow2) {
    const uint32_t bits = __float_as_uint(__fmul_rn(top, 1.0f / 448.0f));
    scale = __uint_as_float(((bits >> 23) + ((bits & 0x7fffffu) != 0 ? 1u : 0u)) << 23);
  } else {
    scale = __fdiv_rn(top, 448.0f);
  }
  // The reciprocal of a power of two is exact.
  const float inverse = __uint_as_float((254u << 23) - __float_as_uint(scale));
#pragma unroll
  for (int i = 0; i < kEach / 4; ++i) {
    float y[4];
#pragma unroll
    for (int j = 0; j < 4; ++j)
      y[j] = pow2 ? x[4 * i + j] * inverse : __fdiv_rn(x[4 * i + j], scale);
    const float2 low = make_float2(y[0], y[1]), high = make_float2(y[2], y[3]);
    bytes[i] = uint32_t{__nv_cvt_float2_to_fp8x2(low, __NV_SATFINITE, __NV_E4M3)} |
               uint32_t{__nv_cvt_float2_to_fp8x2(high, __NV_SATFINITE, __NV_E4M3)} << 16;
  }
  return scale;
}

LOCKSTEP_DEVICE void load_row(float (&x)[4], const uint16_t* row, int lane) {
  const uint2 words = __ldcs(reinterpret_cast<const uint2*>(row) + lane);
  x[0] = low_bf16(words.x), x[1] = high_bf16(words.x);
  x[2] = low_bf16(words.y), x[3] = high_bf16(words.y);
}

/// One block.
static __global__ void __launch_bounds__(1024) offsets_kernel(Documents d, int64_t* offsets) {
  __shared__ int64_t sums[32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int64_t before = 0;
  for (int64_t start = 0; start < d.documents; start += 1024) {
    const int64_t i = start + threadIdx.x;
    const int64_t own = i < d.documents ? (d.cu[i + 1] - d.cu[i]) / d.kpool : 0;
    int64_t sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int64_t other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    int64_t total = 0;
    for (int w = 0; w < 32; ++w) {
      if (w == warp) sum += total;
      total += sums[w];
    }
    if (i < d.documents) offsets[i] = before + sum - own;
    before += total;
    __syncthreads();
  }
  if (threadIdx.x == 0) offsets[d.documents] = before;
}

struct PoolParams {
  Documents documents;
  const uint16_t *k, *gate;
  const float* ape;
  uint16_t* pooled;
  uint8_t* bytes;
  float* scale;
  bool rotate, pow2, bf16_weights;
};

/// A warp for each pool.
static __global__ void __launch_bounds__(kRowThreads)
    pool_kernel(const __grid_constant__ PoolParams p) {
  const Documents& d = p.documents;
  const int64_t pool = (blockIdx.x * int64_t{kRowThreads} + threadIdx.x) / 32;
  const int lane = threadIdx.x & 31;
  if (pool >= __ldg(d.pool_offsets + d.documents)) return;
  const int64_t document = range_of(d.pool_offsets, d.documents, pool);
  const int64_t row = __ldg(d.cu + document) + (pool - __ldg(d.pool_offsets + document)) * d.kpool;
  const auto score = [&](int64_t j, float(&s)[4]) {
    load_row(s, p.gate + (row + j) * kDim, lane);
    const float4 ape = __ldg(reinterpret_cast<const float4*>(p.ape + j * kDim) + lane);
    s[0] = __fadd_rn(s[0], ape.x), s[1] = __fadd_rn(s[1], ape.y);
    s[2] = __fadd_rn(s[2], ape.z), s[3] = __fadd_rn(s[3], ape.w);
  };
  float top[4], s[4], k[4];
  score(0, top);
  for (int64_t j = 1; j < d.kpool; ++j) {
    score(j, s);
#pragma unroll
    for (int i = 0; i < 4; ++i) top[i] = top[i] < s[i] ? s[i] : top[i];
  }
  float sum[4] = {}, den[4] = {};
  for (int64_t j = 0; j < d.kpool; ++j) {
    score(j, s);
    load_row(k, p.k + (row + j) * kDim, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float e = exp_of(__fsub_rn(s[i], top[i]));
      den[i] = __fadd_rn(den[i], e);
      if (!p.bf16_weights) sum[i] = __fadd_rn(sum[i], __fmul_rn(e, k[i]));
    }
  }
  if (p.bf16_weights) {
    for (int64_t j = 0; j < d.kpool; ++j) {
      score(j, s);
      load_row(k, p.k + (row + j) * kDim, lane);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float weight = rounded_bf16(__fdiv_rn(exp_of(__fsub_rn(s[i], top[i])), den[i]));
        sum[i] = __fadd_rn(sum[i], rounded_bf16(__fmul_rn(weight, k[i])));
      }
    }
  }
  float x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    x[i] = rounded_bf16(p.bf16_weights ? sum[i] : __fdiv_rn(sum[i], den[i]));
  if (p.pooled != nullptr)
    reinterpret_cast<uint2*>(p.pooled + pool * kDim)[lane] =
        make_uint2(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]));
  if (p.bytes == nullptr) return;
  if (p.rotate) rotate(x, lane);
  uint32_t bytes[1];
  const float scale = quantise(x, p.pow2, bytes);
  reinterpret_cast<uint32_t*>(p.bytes + pool * kDim)[lane] = bytes[0];
  if (lane == 0) p.scale[pool] = scale;
}

struct QueryParams {
  int64_t rows;  // tokens times heads
  const uint16_t* q;
  const float* weight;
  uint8_t* bytes;
  float* scaled;
  float constant;
  bool rotate, pow2;
};

/// Eight lanes for a row: with more of them shuffles would take longer than device memory.
constexpr int kQueryLanes = 8, kQueryAhead = 2;
constexpr int kQueryRows = kRowThreads / kQueryLanes * kQueryAhead;  // of a block
static __global__ void __launch_bounds__(kRowThreads)
    query_kernel(const __grid_constant__ QueryParams p) {
  constexpr int kEach = kDim / kQueryLanes, kStep = 32 / kQueryLanes;
  const int lane = threadIdx.x & 31, part = lane % kQueryLanes;
  const int64_t first = blockIdx.x * int64_t{kQueryRows} + threadIdx.x / 32 * kStep * kQueryAhead +
                        lane / kQueryLanes;
  uint4 words[kQueryAhead][2];
#pragma unroll
  for (int a = 0; a < kQueryAhead; ++a) {
    const int64_t row = min(first + a * kStep, p.rows - 1);  // beyond the last: the last again
    const uint4* from = reinterpret_cast<const uint4*>(p.q + row * kDim + part * kEach);
    words[a][0] = __ldg(from);
    words[a][1] = __ldg(from + 1);
  }
#pragma unroll
  for (int a = 0; a < kQueryAhead; ++a) {
    const int64_t row = min(first + a * kStep, p.rows - 1);
    float x[kEach];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t w[4] = {words[a][i].x, words[a][i].y, words[a][i].z, words[a][i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        x[8 * i + 2 * j] = low_bf16(w[j]);
        x[8 * i + 2 * j + 1] = high_bf16(w[j]);
      }
    }
    if (p.rotate) rotate(x, lane);
    uint32_t bytes[4];
    const float scale = quantise(x, p.pow2, bytes);
    reinterpret_cast<uint4*>(p.bytes + row * kDim)[part] =
        make_uint4(bytes[0], bytes[1], bytes[2], bytes[3]);
    if (part == 0) p.scaled[row] = __fmul_rn(__fmul_rn(__ldg(p.weight + row), scale), p.constant);
  }
}

}  // namespace lockstep::model::indexer
