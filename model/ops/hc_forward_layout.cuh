#pragma once

// What the stages of the hyper-connection boundary agree on: how tokens and channels are divided,
// the shared memory of a block, and the device-side argument block.

#include <cstdint>

#include "model/ops/hc_common.cuh"

namespace lockstep::model::hc {

constexpr int kSlices = 16;  // blocks of a team, each has 256 channels
constexpr int kSliceWidth = kWidth / kSlices;
constexpr int kTile = 16;   // tokens per tile: one per slice in the collapse
constexpr int kGroups = 2;  // of 8 warps, each with tiles of its own
constexpr int kWarps = 8;   // per group, each has 32 channels of the slice
constexpr int kGroupThreads = 32 * kWarps;
constexpr int kThreads = kGroups * kGroupThreads + 128;  // last: for each group a
                                                         // mixing and a publishing warp

// Partial sums of one tile and slice: 24 products per token, then the 16 sums of squares.
constexpr int kPartial = kTile * (kLogits + 1);
constexpr int kLag = 1;              // tiles between mixing a tile and collapsing it
constexpr int kRing = 2 + 2 * kLag;  // tiles of a group whose partial sums are kept: see collapse

struct Params {
  int64_t tokens, tiles;
  const uint16_t *x, *y;
  const float *post, *comb;
  uint16_t* x_next;  // where collapse reads the streams
  const float *fn, *base, *scale, *norm_weight;
  float norm_eps, eps;
  int sinkhorn_iters;
  bool project;  // false: mix only
  bool bf16_fn, bf16_base_scale, bf16_coefficients, two_norm_roundings, unrounded_statistic,
      bf16_norm_weight;
  uint16_t* x_normed;
  float *pre_next, *post_next, *comb_next, *m_next, *r_next;
  float* partial;  // [teams * groups][kRing][kSlices][kPartial]
  int* done;       // [teams * groups][kSlices]: tiles whose partial sums are written
};

/// fn as three bf16 terms in the order in which lanes of an mma want them: per (warp of a group,
/// stream, 8 rows of fn, term) 32 lanes x 16 bytes. Lane (row, quad) has 8 neighbouring channels;
/// the product does not care which channel is called which k, as long as both operands agree.
constexpr int kFnTerms = 3;
constexpr int kFnFragments = kWarps * kStreams * (kLogits / 8) * kFnTerms;

struct alignas(16) GroupShared {
  float products[kWarps][kTile * kLogits];
  float squares[kWarps][kTile];
  float coefficients[2][kTile][kCoefficients];  // 80-byte rows: 8 of them meet no bank twice
  float pre[2][kStreams];
  float collapsed_squares[kWarps];
};
struct Shared {
  uint4 fn[kFnFragments][32];
  float norm_weight[kWidth];
  GroupShared group[kGroups];
};
static_assert(sizeof(Shared) <= 227 * 1024, "shared memory of one block");

LOCKSTEP_DEVICE void group_barrier(int group) { hopper::named_barrier(1 + group, kGroupThreads); }
/// The group and its mixing warp.
LOCKSTEP_DEVICE void mixing_barrier(int group) {
  hopper::named_barrier(1 + kGroups + group, kGroupThreads + 32);
}

/// The group and its publishing warp. Barriers alternate: the group may be one tile ahead.
LOCKSTEP_DEVICE void publishing_barrier(int group, int k, bool wait) {
  const int id = 1 + 2 * kGroups + 2 * group + (k & 1);
  __syncwarp();  // an arrival counts a whole warp, whichever of its threads execute it
  if (wait) {
    hopper::named_barrier(id, kGroupThreads + 32);
  } else {
    hopper::named_barrier_arrive(id, kGroupThreads + 32);
  }
}

}  // namespace lockstep::model::hc
