#pragma once

// Hyper-connection boundary forward for sm_90a: one cooperative launch. Why it looks like this:
//
// Bytes. 80 KB per token must move (y, X in; X', x_normed out); everything else has to stay on the
// chip. Two things do not fit by themselves: fn (1.6 MB, wanted by every token) and the fact that
// X' is needed twice, before and after a sum over all of its 16384 values.
//
// fn stays put. 16 blocks form a team; each has 256 channels of the 4 streams for good, and fn's
// 24 x 1024 values for them as three bf16 terms in shared memory (144 KB), in mma order. A tile is
// 16 tokens; lanes load the streams from global memory straight into the registers where the mma
// wants X', mix there, store, multiply. Partial sums (1.6 KB per token) go through L2.
//
// X' twice. A group publishes the partial sums of tile k, and collapses its token of tile k - 1
// (slice s has token s) when all 16 slices have published that; the streams come back from L2,
// where they were written a few microseconds before. Mixing of tile k never waits for anything but
// earlier tiles, so with all blocks resident (cooperative launch) nothing can deadlock.
//
// Sinkhorn. Its 39 dependent divisions take longer than the collapse, and only pre is needed for
// that. One more warp per group waits for the slices, hands pre to the group, and then has a
// tile's time for the rest. Another warp releases finished tiles, which takes as long as the
// slowest store.
//
// Ring of partial sums. A slot is written again kRing = 4 tiles later. A group writes tile k + 4
// after its collapse of tile k + 2, hence after every slice published k + 2, hence after every
// slice collapsed k and has read that slot.
//
// Limits and what to try next (8192 tokens; samples of a profiler):
// - not the wait for pre: collapsing two or three tiles behind instead of one (kLag) took 0.35 and
//   0.36 ms instead of 0.32, and one Sinkhorn round instead of 20 changes nothing.
// - two groups of 8 warps in step with their barriers leave 60% of the issue slots empty: one tile
//   is a chain of loads, mixing, 72 matrix products a warp, exchange, loads from L2, collapse.
// - loads of the next tile start after the collapse has read its streams; starting them before the
//   reduction spills registers and wins 3% at 8192 tokens, loses 2% at 131072. Copies into shared
//   memory by warps of their own, as in the backward kernel, and collapse by further warps would
//   break the chain; fn's 144 KB leave no room for the stages unless slices have 128 channels.
// - a quad reads 64 bytes of a row at a time. Tokens as the columns of the product instead of its
//   rows would give 128, and half of the coefficients per lane.

#include "model/ops/hc_forward_collapse.cuh"
#include "model/ops/hc_forward_expand.cuh"

namespace lockstep::model::hc {

enum class Mix { kNone, kOneRounding, kThreeRoundings };

extern __shared__ __align__(1024) unsigned char dynamic_shared[];

/// The tiles of one group: index, index + step, ...; the same for the 16 blocks of a team.
struct Stream {
  int index;  // of the stream: team, then group, so that few tiles go to different teams
  int count;  // tiles
  LOCKSTEP_DEVICE static int step() { return kGroups * static_cast<int>(gridDim.x / kSlices); }
  LOCKSTEP_DEVICE int64_t first_token(int k) const { return int64_t{index + k * step()} * kTile; }
  LOCKSTEP_DEVICE float* slot(const Params& p, int k) const {
    return p.partial + (index * kRing + k % kRing) * (kSlices * kPartial);
  }
  LOCKSTEP_DEVICE int* done(const Params& p) const { return p.done + index * kSlices; }
};

template <Mix kMix>
LOCKSTEP_DEVICE void run_group(
    const Params& p, const Stream& stream, int slice, int group, int thread, Shared& shared) {
  constexpr bool kMixes = kMix != Mix::kNone;
  GroupShared& own = shared.group[group];
  // Derived anew in each stage: addresses kept over a whole tile cost the registers of a stage.
  const auto me = [&] { return hopper::opaque(thread); };
  const auto channel = [&] {
    const int t = me();
    return slice * kSliceWidth + (t >> 5) * 32 + (t & 3) * 8;
  };

  Fragment f;
  load_tile<kMixes>(p, stream.first_token(0), channel(), f);
  if (kMixes) copy_coefficients(p, stream.first_token(0), own.coefficients[0], me());
  if (kMixes) finish_coefficients(p, own.coefficients[0], me());
  __syncthreads();  // parameters and coefficients are there
  for (int k = 0; k < stream.count + kLag; ++k) {
    const auto load_next = [&]() __attribute__((always_inline)) {
      if (k + 1 < stream.count) {
        load_tile<kMixes>(p, stream.first_token(k + 1), channel(), f);
        if (kMixes)
          copy_coefficients(p, stream.first_token(k + 1), own.coefficients[(k + 1) & 1], me());
      }
    };
    if (k < stream.count) {
      if constexpr (kMixes)
        mix_tile<kMix == Mix::kThreeRoundings>(
            p, stream.first_token(k), channel(), own.coefficients[k & 1], f);
      Sums sums;
      if (p.project) project_tile(shared, me() >> 5, f, sums);
      if (p.project) {
        reduce_tile(sums, own, group, me(), stream.slot(p, k) + slice * kPartial);
        publishing_barrier(group, k, false);
      }
    }
    if (p.project && k >= kLag) {
      const int64_t token = stream.first_token(k - kLag) + slice;
      mixing_barrier(group);  // pre of tile k - kLag is there, and so are the streams of all slices
      if (token < p.tokens)
        collapse(p,
                 kMixes ? p.x_next : p.x,
                 token,
                 shared,
                 own,
                 own.pre[(k - kLag) & 1],
                 group,
                 me(),
                 load_next);
      else
        load_next();
    } else {
      load_next();
    }
    // Not earlier: the copy started in this round and takes its time.
    if (kMixes) finish_coefficients(p, own.coefficients[(k + 1) & 1], me());
    group_barrier(group);  // the sums have been read, the next tile's coefficients are there
  }
}

/// Publishes each tile once every thread of the group has written its part of it. A warp of its
/// own, because a release takes as long as the slowest store.
LOCKSTEP_DEVICE void run_publisher(const Params& p, const Stream& stream, int slice, int group) {
  for (int k = 0; k < stream.count; ++k) {
    publishing_barrier(group, k, true);
    // Releases what the whole group stored: the barrier ordered it before this store.
    if ((threadIdx.x & 31) == 0) hopper::store_release(stream.done(p) + slice, k + 1);
    __syncwarp();
  }
}

LOCKSTEP_DEVICE void run_mixer(
    const Params& p, const Stream& stream, int slice, int group, Shared& shared) {
  const int lane = threadIdx.x & 31;
  const Logit logit = load_logit(p);
  for (int k = 0; k < stream.count; ++k) {
    const int64_t token = stream.first_token(k) + slice;
    wait_for_slices(stream.done(p), k + 1);
    const Normalised normalised = load_sums(p, stream.slot(p, k), slice);
    const float m = normalised.m * logit.scale + logit.base;
    const float sigmoid = 1.0f / (1.0f + expf(-m));
    const float pre = sigmoid + p.eps;
    if (lane < kStreams) shared.group[group].pre[k & 1][lane] = pre;
    mixing_barrier(group);
    if (token >= p.tokens) continue;
    if (p.m_next && lane < kLogits) p.m_next[token * kLogits + lane] = normalised.m;
    if (p.r_next && lane == 0) p.r_next[token] = normalised.r;
    if (lane < kStreams && p.pre_next) p.pre_next[token * kStreams + lane] = pre;
    if (lane >= kStreams && lane < 2 * kStreams)
      p.post_next[token * kStreams + lane - kStreams] = 2.0f * sigmoid;
    const float a = __shfl_sync(kAllLanes, m, 8 + (lane & 15));
    const float c = p.eps >= 1e-12f ? sinkhorn<true>(a, p.eps, p.sinkhorn_iters)
                                    : sinkhorn<false>(a, p.eps, p.sinkhorn_iters);
    if (lane < 16) p.comb_next[token * 16 + lane] = c;
  }
}

template <Mix kMix>
__global__ void __launch_bounds__(kThreads, 1) forward_kernel(const __grid_constant__ Params p) {
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  const int slice = blockIdx.x % kSlices, team = blockIdx.x / kSlices, teams = gridDim.x / kSlices;
  const int warp = threadIdx.x >> 5;
  const bool mixer = warp >= kGroups * kWarps;
  const int group = mixer ? (warp - kGroups * kWarps) % kGroups : warp / kWarps;
  Stream stream{team + group * teams, 0};
  if (stream.index < p.tiles)
    stream.count = (static_cast<int>(p.tiles) - stream.index + Stream::step() - 1) / Stream::step();
  if (p.project && team < p.tiles) load_parameters(p, slice, shared);
  if (mixer) {
    hopper::fewer_registers<32>();
    __syncthreads();
    if (p.project && warp < kGroups * kWarps + kGroups) {
      run_mixer(p, stream, slice, group, shared);
    } else if (p.project) {
      run_publisher(p, stream, slice, group);
    }
  } else {
    hopper::more_registers<112>();
    if (stream.count == 0) {
      __syncthreads();
    } else {
      run_group<kMix>(p, stream, slice, group, threadIdx.x - group * kGroupThreads, shared);
    }
  }
}

}  // namespace lockstep::model::hc
