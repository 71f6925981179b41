#pragma once

// One token of the KDA recurrence. A block owns the state of one (row, head) and V half, 32 KB, in
// registers: 16 loads of 16 bytes a thread are under way before the first is used, which with four
// blocks to a multiprocessor covers the latency of device memory; both products with the old state
// come from one pass,
//   S' = diag(exp g) S,  u = beta (v - k S'),  o = s (q S' + (q.k) u),  S = S' + k^T u.

#include <cuda_bf16.h>

#include <cstdint>

namespace lockstep::model::kda {

constexpr int kDecodeDim = 128;
constexpr int kDecodeHalf = 64;
constexpr int kDecodeThreads = 128;

struct DecodeParams {
  int heads;
  float lower_bound;
  const uint16_t *q, *k, *v, *f, *beta_logit;
  const float *a_log, *dt_bias;
  const int32_t* slots;
  float* state;
  uint16_t* o;
};

__device__ __forceinline__ float decode_bf16(uint16_t bits) {
  return __uint_as_float(uint32_t{bits} << 16);
}
__device__ __forceinline__ uint32_t decode_pack(float low, float high) {
  const __nv_bfloat162_raw packed = __floats2bfloat162_rn(low, high);
  return packed.x | uint32_t{packed.y} << 16;
}

/// gridDim.x = 2 * heads * rows: V half fastest, then head, then row.
__global__ void __launch_bounds__(kDecodeThreads, 4) decode_kernel(const DecodeParams p) {
  __shared__ float4 decayed[kDecodeDim];           // alpha, k, q of a channel
  __shared__ float norms[3][4];                    // of each warp: q.q, k.k, q.k
  __shared__ float4 reads[2][4][kDecodeHalf / 4];  // of each warp: k S', q S'
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const int half = blockIdx.x & 1;
  const int64_t pair = blockIdx.x >> 1;  // row * heads + head
  const int head = static_cast<int>(pair % p.heads);
  const int slot = p.slots[pair / p.heads];
  const int column = half * kDecodeHalf + 4 * (lane & 15);
  if (slot < 0) {
    if (thread < kDecodeHalf / 4)
      *reinterpret_cast<uint2*>(p.o + pair * kDecodeDim + half * kDecodeHalf + 4 * thread) =
          uint2{0, 0};
    return;
  }
  const int first_row = 32 * warp + (lane >> 4);
  float4* const state = reinterpret_cast<float4*>(
      p.state + (int64_t{slot} * p.heads + head) * (kDecodeDim * kDecodeDim) +
      first_row * kDecodeDim + column);
  float4 s[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) s[i] = __ldcs(state + i * (2 * kDecodeDim / 4));

  // One channel a thread: norms, decay.
  const int64_t at = pair * kDecodeDim + thread;
  const float q = decode_bf16(p.q[at]), k = decode_bf16(p.k[at]);
  const float x =
      expf(p.a_log[head]) * (decode_bf16(p.f[at]) + p.dt_bias[head * kDecodeDim + thread]);
  const float alpha = expf(p.lower_bound / (1.0f + expf(-x)));
  const float beta = 1.0f / (1.0f + expf(-decode_bf16(p.beta_logit[pair])));
  const uint2 v = *reinterpret_cast<const uint2*>(p.v + pair * kDecodeDim + column);
  float qq = q * q, kk = k * k, qk = q * k;
#pragma unroll
  for (int step = 16; step >= 1; step /= 2) {
    qq += __shfl_xor_sync(0xffffffffu, qq, step);
    kk += __shfl_xor_sync(0xffffffffu, kk, step);
    qk += __shfl_xor_sync(0xffffffffu, qk, step);
  }
  if (lane == 0) {
    norms[0][warp] = qq;
    norms[1][warp] = kk;
    norms[2][warp] = qk;
  }
  __syncthreads();
  const auto total = [](const float* part) { return (part[0] + part[1]) + (part[2] + part[3]); };
  const float q_scale = 1.0f / sqrtf(total(norms[0]) + 1e-6f);
  const float k_scale = 1.0f / sqrtf(total(norms[1]) + 1e-6f);
  const float along = total(norms[2]) * q_scale * k_scale;
  decayed[thread] = make_float4(alpha, k * k_scale, q * q_scale, 0.0f);
  __syncthreads();

  float4 from_k = make_float4(0.0f, 0.0f, 0.0f, 0.0f), from_q = from_k;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float4 c = decayed[first_row + 2 * i];
    s[i].x *= c.x;
    s[i].y *= c.x;
    s[i].z *= c.x;
    s[i].w *= c.x;
    from_k.x = fmaf(c.y, s[i].x, from_k.x);
    from_k.y = fmaf(c.y, s[i].y, from_k.y);
    from_k.z = fmaf(c.y, s[i].z, from_k.z);
    from_k.w = fmaf(c.y, s[i].w, from_k.w);
    from_q.x = fmaf(c.z, s[i].x, from_q.x);
    from_q.y = fmaf(c.z, s[i].y, from_q.y);
    from_q.z = fmaf(c.z, s[i].z, from_q.z);
    from_q.w = fmaf(c.z, s[i].w, from_q.w);
  }
  const auto fold = [](float4& a) {
    a.x += __shfl_xor_sync(0xffffffffu, a.x, 16);
    a.y += __shfl_xor_sync(0xffffffffu, a.y, 16);
    a.z += __shfl_xor_sync(0xffffffffu, a.z, 16);
    a.w += __shfl_xor_sync(0xffffffffu, a.w, 16);
  };
  fold(from_k);
  fold(from_q);
  if (lane < 16) {
    reads[0][warp][lane] = from_k;
    reads[1][warp][lane] = from_q;
  }
  __syncthreads();
  const auto gather = [&](int which) {
    const float4 a = reads[which][0][lane & 15], b = reads[which][1][lane & 15];
    const float4 c = reads[which][2][lane & 15], d = reads[which][3][lane & 15];
    return make_float4((a.x + b.x) + (c.x + d.x),
                       (a.y + b.y) + (c.y + d.y),
                       (a.z + b.z) + (c.z + d.z),
                       (a.w + b.w) + (c.w + d.w));
  };
  const float4 read = gather(0);
  const float4 u = make_float4(beta * (decode_bf16(static_cast<uint16_t>(v.x)) - read.x),
                               beta * (decode_bf16(static_cast<uint16_t>(v.x >> 16)) - read.y),
                               beta * (decode_bf16(static_cast<uint16_t>(v.y)) - read.z),
                               beta * (decode_bf16(static_cast<uint16_t>(v.y >> 16)) - read.w));
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float key = decayed[first_row + 2 * i].y;
    __stcs(state + i * (2 * kDecodeDim / 4),
           make_float4(fmaf(key, u.x, s[i].x),
                       fmaf(key, u.y, s[i].y),
                       fmaf(key, u.z, s[i].z),
                       fmaf(key, u.w, s[i].w)));
  }
  if (thread < 16) {
    constexpr float kScale = 0.08838834764831845f;  // 128^-1/2
    const float4 out = gather(1);
    *reinterpret_cast<uint2*>(p.o + pair * kDecodeDim + column) =
        uint2{decode_pack(kScale * fmaf(along, u.x, out.x), kScale * fmaf(along, u.y, out.y)),
              decode_pack(kScale * fmaf(along, u.z, out.z), kScale * fmaf(along, u.w, out.w))};
  }
}

}  // namespace lockstep::model::kda
