#pragma once

// Second half of the boundary: coefficients of one token (one warp), then its collapse and norm
// (eight warps).

#include "model/ops/hc_forward_layout.cuh"

namespace lockstep::model::hc {

/// Waits until every slice has published `tiles` tiles of this stream of tiles.
LOCKSTEP_DEVICE void wait_for_slices(const int* done, int tiles) {
  const int lane = threadIdx.x & 31;
  if (lane < kSlices) {
    // An acquiring load empties L1: poll with relaxed ones, acquire once.
    while (hopper::load_relaxed(done + lane) < tiles) __nanosleep(40);
    hopper::load_acquire(done + lane);
  }
  __syncwarp();
}

/// Parameters of the mixing warp's lane: lane p < 24 has logit p.
struct Logit {
  float scale, base;
};
LOCKSTEP_DEVICE Logit load_logit(const Params& p) {
  const int lane = threadIdx.x & 31;
  if (lane >= kLogits) return {0.0f, 0.0f};
  const float scale = p.scale[lane < 4 ? 0 : lane < 8 ? 1 : 2], base = p.base[lane];
  return p.bf16_base_scale ? Logit{to_bf16(scale), to_bf16(base)} : Logit{scale, base};
}

/// Sums over the slices in order: this lane's normalised product m, and r.
struct Normalised {
  float m, r;
};
LOCKSTEP_DEVICE Normalised load_sums(const Params& p, const float* partial, int row) {
  const int lane = threadIdx.x & 31;
  const int at = lane < kLogits ? row * kLogits + lane : kTile * kLogits + row;
  float sum = 0.0f;
#pragma unroll 1
  for (int s = 0; s < kSlices; s += 8) {  // few registers: 8 loads at a time
    float terms[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) terms[i] = __ldcg(partial + (s + i) * kPartial + at);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += terms[i];
  }
  const float squares = __shfl_sync(kAllLanes, sum, kLogits);
  const float r = 1.0f / sqrtf(squares / static_cast<float>(kStreams * kWidth) + p.norm_eps);
  return {sum * r, r};
}

/// a / b rounded to nearest for normal a, b and quotient: the fast path of __fdiv_rn, without the
/// test for the others.
LOCKSTEP_DEVICE float divide(float a, float b) {
  float y = hopper::reciprocal_approx(b);
  y = __fmaf_rn(y, __fmaf_rn(-b, y, 1.0f), y);
  float q = a * y;
  q = __fmaf_rn(y, __fmaf_rn(-b, q, a), q);
  return __fmaf_rn(y, __fmaf_rn(-b, q, a), q);
}

/// comb from its logits: element (i, j) in lane 4 i + j, lanes 16-31 repeat 0-15. kNormal: no
/// denominator or entry is so small that a division leaves the normal numbers.
template <bool kNormal>
LOCKSTEP_DEVICE float sinkhorn(float a, float eps, int iterations) {
  const auto pair = [](float v, int step) { return v + __shfl_xor_sync(kAllLanes, v, step); };
  const auto over = [](float c, float s) { return kNormal ? divide(c, s) : __fdiv_rn(c, s); };
  float largest = fmaxf(a, __shfl_xor_sync(kAllLanes, a, 1));
  largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
  const float e = expf(a - largest);
  float c = __fdiv_rn(e, pair(pair(e, 1), 2)) + eps;
  c = over(c, pair(pair(c, 4), 8) + eps);
  for (int k = 1; k < iterations; ++k) {
    c = over(c, pair(pair(c, 1), 2) + eps);
    c = over(c, pair(pair(c, 4), 8) + eps);
  }
  return c;
}

/// Streams of one token as the collapse divides them; from L2, where other blocks wrote them.
LOCKSTEP_DEVICE void load_token(const uint16_t* x, int thread, uint4 (&to)[kStreams][2]) {
  const uint16_t* const from = x + (thread >> 5) * 512 + (thread & 31) * 8;
#pragma unroll
  for (int i = 0; i < kStreams; ++i)
#pragma unroll
    for (int part = 0; part < 2; ++part)
      to[i][part] = __ldcg(reinterpret_cast<const uint4*>(from + i * kWidth + part * 256));
}

/// u of one token, 16 channels per thread, its norm, and the store. Calls `next` once the streams
/// have been read and their registers are free.
template <class Next>
LOCKSTEP_DEVICE void collapse(const Params& p,
                              const uint16_t* streams,
                              int64_t token,
                              const Shared& shared,
                              GroupShared& group_shared,
                              const float* pre_shared,
                              int group,
                              int thread,
                              const Next& next) {
  const int lane = thread & 31, warp = thread >> 5;
  uint4 x[kStreams][2];
  load_token(streams + token * (kStreams * kWidth), thread, x);
  const float4 four = *reinterpret_cast<const float4*>(pre_shared);
  const float pre[kStreams] = {four.x, four.y, four.z, four.w};
  uint32_t u[2][4];
  float square = 0.0f;
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const uint32_t words[kStreams][4] = {{x[0][part].x, x[0][part].y, x[0][part].z, x[0][part].w},
                                         {x[1][part].x, x[1][part].y, x[1][part].z, x[1][part].w},
                                         {x[2][part].x, x[2][part].y, x[2][part].z, x[2][part].w},
                                         {x[3][part].x, x[3][part].y, x[3][part].z, x[3][part].w}};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float low = pre[0] * hopper::low_bf16(words[0][w]);
      float high = pre[0] * hopper::high_bf16(words[0][w]);
#pragma unroll
      for (int i = 1; i < kStreams; ++i) {
        low = __fmaf_rn(pre[i], hopper::low_bf16(words[i][w]), low);
        high = __fmaf_rn(pre[i], hopper::high_bf16(words[i][w]), high);
      }
      u[part][w] = hopper::pack_bf16(low, high);
      if (!p.unrounded_statistic) {
        low = hopper::low_bf16(u[part][w]);
        high = hopper::high_bf16(u[part][w]);
      }
      square = __fmaf_rn(high, high, __fmaf_rn(low, low, square));
    }
  }
  next();
#pragma unroll
  for (int step = 16; step > 0; step /= 2) square += __shfl_xor_sync(kAllLanes, square, step);
  if (lane == 0) group_shared.collapsed_squares[warp] = square;
  group_barrier(group);
  float sum = group_shared.collapsed_squares[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) sum += group_shared.collapsed_squares[w];
  const float inverse = 1.0f / sqrtf(sum / static_cast<float>(kWidth) + p.norm_eps);
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const int channel = warp * 512 + part * 256 + lane * 8;
    const float4 weight[2] = {*reinterpret_cast<const float4*>(&shared.norm_weight[channel]),
                              *reinterpret_cast<const float4*>(&shared.norm_weight[channel + 4])};
    const float w[8] = {weight[0].x,
                        weight[0].y,
                        weight[0].z,
                        weight[0].w,
                        weight[1].x,
                        weight[1].y,
                        weight[1].z,
                        weight[1].w};
    uint32_t packed[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float low = hopper::low_bf16(u[part][e]) * inverse;
      float high = hopper::high_bf16(u[part][e]) * inverse;
      if (p.two_norm_roundings) low = to_bf16(low), high = to_bf16(high);
      packed[e] = hopper::pack_bf16(low * w[2 * e], high * w[2 * e + 1]);
    }
    __stcs(reinterpret_cast<uint4*>(p.x_normed + token * kWidth + channel),
           make_uint4(packed[0], packed[1], packed[2], packed[3]));
  }
}

}  // namespace lockstep::model::hc
