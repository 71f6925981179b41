#pragma once

// What the kernels of the hyper-connection boundary backward agree on.

#include <cstdint>

#include "model/ops/hc_common.cuh"

namespace lockstep::model::hc {

enum class BackwardMix { kNone, kOneRounding, kThreeRoundings };

constexpr int kBackSlices = 32;  // blocks of a team, each has 128 channels of the four streams
constexpr int kBackWidth = kWidth / kBackSlices;
constexpr int kBackTeams = 4;       // a constant, so that sums over tokens do not follow the device
constexpr int kBackTile = 16;       // tokens
constexpr int kPass = 8192;         // tokens per launch; bounds the workspace
constexpr int kSumsGroup = 8;       // tokens whose coefficients one warp differentiates
constexpr int kMaxIterations = 64;  // of Sinkhorn: their denominators are in shared memory

/// What the second kernel wants to know about a token. 60 floats: rows of an even number of tokens
/// apart meet no bank twice.
struct alignas(16) Record {
  float post[4], comb[16];  // as the mix used them; comb [source][target]
  float pre[4];
  float inverse;    // of the RMSNorm
  float along;      // du = inverse dxhat - along u
  float through_r;  // dX' has - through_r X'
  float unused;
  float dm[kLogits];  // gradient of fn X'
  float padding[8];
};
static_assert(sizeof(Record) == 240);

constexpr int kLogitSums = 28;  // of a group of tokens: dbase [24], dscale [3]
constexpr int kMixSums = kCoefficients;

struct BackwardParams {
  int64_t tokens;      // of the call
  int64_t begin, end;  // tokens of this pass
  bool first_pass;     // sums over tokens start at zero
  const uint16_t *x, *y, *dx_next, *dx_normed;
  const float *post, *comb, *fn, *base, *scale, *norm_weight, *m, *r, *dpost_next, *dcomb_next;
  float norm_eps, eps;
  int sinkhorn_iters;
  bool bf16_fn, bf16_base_scale, bf16_coefficients, two_norm_roundings, unrounded_statistic,
      bf16_norm_weight;
  uint16_t *dx, *dy;
  float *dpost, *dcomb, *dfn, *dbase, *dscale, *dnorm_weight;
  Record* records;    // [kPass]: token - begin
  float* mix_sums;    // [kPass][kBackSlices][kMixSums]
  float* fn_sums;     // [kBackTeams][kLogits * kRow]
  float* norm_sums;   // [kBackTeams][kWidth]
  float* logit_sums;  // [groups of the call][kLogitSums]
};

LOCKSTEP_DEVICE float rounded_if(bool wanted, float v) { return wanted ? to_bf16(v) : v; }

}  // namespace lockstep::model::hc
