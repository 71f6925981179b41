#pragma once

// What forward and backward of the hyper-connection boundary share on the device.

#include <cstdint>

#include "model/ops/hopper.cuh"

namespace lockstep::model::hc {

constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr int kStreams = 4;
constexpr int kWidth = 4096;  // D
constexpr int kRow = kStreams * kWidth;
constexpr int kLogits = 24;
constexpr int kCoefficients = kStreams + kStreams * kStreams;  // post, comb

LOCKSTEP_DEVICE float to_bf16(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }

/// Streaming 16-byte load: read once, not kept in L1.
LOCKSTEP_DEVICE uint4 load_once(const uint16_t* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

LOCKSTEP_DEVICE void unpack(uint32_t (&to)[4], uint4 v) {
  to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

/// One value of X' before it is stored: post y first, then the streams in order.
template <bool kThreeRoundings>
LOCKSTEP_DEVICE float mixed(float post, float y, const float (&comb)[4], const float (&x)[4]) {
  if constexpr (kThreeRoundings) {
    float sum = comb[0] * x[0];
#pragma unroll
    for (int i = 1; i < 4; ++i) sum = __fmaf_rn(comb[i], x[i], sum);
    return to_bf16(post * y) + to_bf16(sum);
  } else {
    float sum = post * y;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum = __fmaf_rn(comb[i], x[i], sum);
    return sum;
  }
}

}  // namespace lockstep::model::hc
