#pragma once

// Derivative of what lies between the 24 normalised products m of a token and its pre, post and
// comb. Four lanes a token, one row of comb each; a warp has eight tokens.

#include "model/ops/hc_backward_layout.cuh"

namespace lockstep::model::hc {

/// Denominators of the normalisations, [2 iterations - 1][32]: of columns at even steps (lane i of
/// a token has column i), of the lane's row at odd ones.
using Denominators = float*;
__host__ __device__ constexpr int denominators_bytes(int iterations) {
  return (2 * iterations - 1) * 32 * 4;
}

/// What the streams contribute: see sums_of_token.
struct TokenSums {
  float along, square, with_xhat[kStreams], with_u[kStreams];
};
constexpr int kTokenSums = 2 + 2 * kStreams;

LOCKSTEP_DEVICE float over_rows(float v) {  // the four lanes of a token
  v += __shfl_xor_sync(kAllLanes, v, 1);
  return v + __shfl_xor_sync(kAllLanes, v, 2);
}
LOCKSTEP_DEVICE float over_tokens(float v) {
  v += __shfl_xor_sync(kAllLanes, v, 4);
  v += __shfl_xor_sync(kAllLanes, v, 8);
  return v + __shfl_xor_sync(kAllLanes, v, 16);
}

/// Denominators of the four columns of this lane's token.
LOCKSTEP_DEVICE float4 columns_of(const float* step) {
  return *reinterpret_cast<const float4*>(step + (threadIdx.x & 28));
}

/// Softmax over a row, then Sinkhorn: the lane's row of comb. Keeps the denominators.
LOCKSTEP_DEVICE void replay_sinkhorn(const float (&logit)[4],
                                     float eps,
                                     int iterations,
                                     Denominators keep,
                                     float (&softmax)[4],
                                     float (&c)[4]) {
  const int lane = threadIdx.x & 31;
  const float largest = fmaxf(fmaxf(logit[0], logit[1]), fmaxf(logit[2], logit[3]));
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < 4; ++j) sum += c[j] = expf(logit[j] - largest);
  const float inverse = hopper::reciprocal_approx(sum);
#pragma unroll
  for (int j = 0; j < 4; ++j) softmax[j] = c[j] * inverse, c[j] = softmax[j] + eps;
  for (int k = 0; k < iterations; ++k) {
    if (k > 0) {
      const float row = ((c[0] + c[1]) + (c[2] + c[3])) + eps;
      const float by = hopper::reciprocal_approx(row);
#pragma unroll
      for (int j = 0; j < 4; ++j) c[j] *= by;
      keep[(2 * k - 1) * 32 + lane] = row;
    }
    float column[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      column[j] = over_rows(c[j]) + eps;
      c[j] *= hopper::reciprocal_approx(column[j]);
    }
    const float low = (lane & 1) ? column[1] : column[0], high = (lane & 1) ? column[3] : column[2];
    keep[2 * k * 32 + lane] = (lane & 2) ? high : low;
  }
  __syncwarp();
}

/// Gradient of comb (one row a lane) to gradient of the row's logits. y = c / s with s = sum c +
/// eps gives dc = (dy - sum(dy y)) / s; the iterates are recovered on the way back, c = y s.
LOCKSTEP_DEVICE void undo_sinkhorn(
    const float (&softmax)[4], int iterations, Denominators keep, float (&y)[4], float (&d)[4]) {
  const int lane = threadIdx.x & 31;
  for (int k = iterations - 1; k >= 0; --k) {
    const float4 denominators = columns_of(keep + 2 * k * 32);
    const float s[4] = {denominators.x, denominators.y, denominators.z, denominators.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      d[j] = (d[j] - over_rows(d[j] * y[j])) * hopper::reciprocal_approx(s[j]);
      y[j] *= s[j];
    }
    if (k > 0) {
      const float row = keep[(2 * k - 1) * 32 + lane], by = hopper::reciprocal_approx(row);
      const float along = (d[0] * y[0] + d[1] * y[1]) + (d[2] * y[2] + d[3] * y[3]);
#pragma unroll
      for (int j = 0; j < 4; ++j) d[j] = (d[j] - along) * by, y[j] *= row;
    }
  }
  float along = 0.0f;
#pragma unroll
  for (int j = 0; j < 4; ++j) along += d[j] * softmax[j];
#pragma unroll
  for (int j = 0; j < 4; ++j) d[j] = softmax[j] * (d[j] - along);
  __syncwarp();  // all have read the denominators
}

/// Writes the records of eight tokens from `first` on and the group's sums over tokens. Tokens from
/// p.end on get records of zeros and count for nothing. `sums`: [8][kTokenSums + 2].
LOCKSTEP_DEVICE void mix_backward(const BackwardParams& p,
                                  int64_t first,
                                  const float (*sums)[kTokenSums + 2],
                                  Denominators keep) {
  const int lane = threadIdx.x & 31, i = lane & 3;
  const int64_t token = first + (lane >> 2);
  const bool valid = token < p.end;
  const int64_t at = valid ? token : p.end - 1;  // any token that exists
  const float* own = sums[lane >> 2];
  const float with_xhat = own[2 + i], with_u = own[2 + kStreams + i];
  const float square = own[1];
  const float inverse = 1.0f / sqrtf(square / static_cast<float>(kWidth) + p.norm_eps);
  const float along = own[0] * (inverse * inverse * inverse) / static_cast<float>(kWidth);
  float scale[3], m[6], logit[6];
#pragma unroll
  for (int k = 0; k < 3; ++k) scale[k] = rounded_if(p.bf16_base_scale, __ldg(p.scale + k));
  const float* from = p.m + at * kLogits;
#pragma unroll
  for (int k = 0; k < 6; ++k) {
    const int row = k < 2 ? 4 * k + i : 8 + 4 * i + (k - 2);
    m[k] = __ldg(from + row);
    logit[k] = m[k] * scale[k < 2 ? k : 2] + rounded_if(p.bf16_base_scale, __ldg(p.base + row));
  }
  float softmax[4], c[4], d[4];
  const float comb_logit[4] = {logit[2], logit[3], logit[4], logit[5]};
  replay_sinkhorn(comb_logit, p.eps, p.sinkhorn_iters, keep, softmax, c);
  const float4 dcomb = __ldg(reinterpret_cast<const float4*>(p.dcomb_next + at * 16) + i);
  d[0] = dcomb.x, d[1] = dcomb.y, d[2] = dcomb.z, d[3] = dcomb.w;
  undo_sinkhorn(softmax, p.sinkhorn_iters, keep, c, d);

  const auto sigmoid = [](float v) { return 1.0f / (1.0f + expf(-v)); };
  const float pre = sigmoid(logit[0]), post = sigmoid(logit[1]);
  const float dpre = inverse * with_xhat - along * with_u;
  const float dpost = __ldg(p.dpost_next + at * 4 + i);
  float dlogit[6] = {dpre * pre * sigmoid(-logit[0]),
                     dpost * 2.0f * post * sigmoid(-logit[1]),
                     d[0],
                     d[1],
                     d[2],
                     d[3]};
#pragma unroll
  for (int k = 0; k < 6; ++k) dlogit[k] = valid ? dlogit[k] : 0.0f;

  // Sums over the tokens of the group.
  float* const group = p.logit_sums + first / kSumsGroup * kLogitSums;
#pragma unroll
  for (int k = 0; k < 6; ++k) {
    const float sum = over_tokens(dlogit[k]);
    if (lane < 4) group[k < 2 ? 4 * k + i : 8 + 4 * i + (k - 2)] = sum;
  }
  const float by_scale[3] = {
      dlogit[0] * m[0],
      dlogit[1] * m[1],
      ((dlogit[2] * m[2] + dlogit[3] * m[3]) + dlogit[4] * m[4]) + dlogit[5] * m[5]};
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    const float sum = over_tokens(over_rows(valid ? by_scale[k] : 0.0f));
    if (lane == 0) group[kLogits + k] = sum;
  }

  // dm, and with p = fn X', m = r p: dp = r dm, dr = dm . p.
  const float r = __ldg(p.r + at);
  float dm[6], dot = 0.0f;
#pragma unroll
  for (int k = 0; k < 6; ++k) {
    dm[k] = dlogit[k] * scale[k < 2 ? k : 2];
    dot += dm[k] * m[k];
    dm[k] *= r;
  }
  dot = over_rows(valid ? dot : 0.0f);
  Record& to = p.records[token - p.begin];
  to.pre[i] = valid ? pre + p.eps : 0.0f;
  to.dm[i] = dm[0];
  to.dm[4 + i] = dm[1];
  *reinterpret_cast<float4*>(&to.dm[8 + 4 * i]) = make_float4(dm[2], dm[3], dm[4], dm[5]);
  if (i == 0)
    *reinterpret_cast<float4*>(&to.inverse) =
        valid ? make_float4(inverse, along, r * r * (dot / static_cast<float>(kRow)), 0.0f)
              : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

}  // namespace lockstep::model::hc
