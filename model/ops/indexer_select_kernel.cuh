#pragma once

// The k best pools of a row of scores, one warp for a token. Scores pass by in order of the pools;
// those above the k-th best so far are kept, a few of a long row. Whenever the buffer is full the
// bound is found anew, by counting keys; only at the end exactly. The buffer
// stays in pool order, so that ties go to the lower pool and the result needs no sorting.

#include "model/ops/indexer_score_kernel.cuh"

namespace lockstep::model::indexer {

constexpr int kMaxBudget = 512, kBuffer = 1024, kSlack = 128, kSelectWarps = 8;
constexpr int kSelectBytes = kSelectWarps * kBuffer * 8;

struct SelectParams {
  Documents documents;
  int64_t first, count;
  const float* scores;
  int64_t stride;
  int budget;
  int width;
  bool tail, own_pool_first;
  int32_t* selection;
};

constexpr uint32_t kLargestKey = 0xfffffffe;

/// Sorts like the score; equal scores (also +0 and -0) have equal keys, NaN the largest. Never 0.
LOCKSTEP_DEVICE uint32_t sort_key(float score) {
  const uint32_t bits = __float_as_uint(__fadd_rn(score, 0.0f));
  const uint32_t key = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return score == score ? key : kLargestKey;
}

/// A warp's candidates.
struct Candidates {
  uint32_t* keys;
  int32_t* pools;
  int lane, budget, count = 0;
  uint32_t bound = 0;  // later keys must exceed it

  LOCKSTEP_DEVICE void append(uint32_t key, int32_t pool) {
    const bool take = key > bound;
    const uint32_t takers = __ballot_sync(~0u, take);
    const int at = count + __popc(takers & ((1u << lane) - 1));
    if (take) keys[at] = key, pools[at] = pool;
    count += __popc(takers);
  }

  /// Keeps the `budget` best, of equal ones the first, and up to `slack` more: those that are left
  /// out can not be among the best of the row.
  LOCKSTEP_DEVICE void reduce(int slack) {
    if (count <= budget + slack) return;
    __syncwarp();
    uint32_t low = 0xffffffff, high = 0;
    for (int at = lane; at < count; at += 32) {
      const uint32_t key = keys[at];
      low = min(low, key);
      high = max(high, key);
    }
    low = __reduce_min_sync(~0u, low);
    high = __reduce_max_sync(~0u, high) + 1;
    // Between two bounds, as if keys lay evenly; every third time halfway, should they not.
    int at_low = count, at_high = 0;  // keys that reach low, high
    for (int step = 0; at_low > budget + slack && high - low > 1; ++step) {
      const float part =
          static_cast<float>(at_low - budget - slack / 2) / static_cast<float>(at_low - at_high);
      const uint32_t ahead = step % 3 == 2
                                 ? (high - low) / 2
                                 : static_cast<uint32_t>(static_cast<float>(high - low) * part);
      const uint32_t middle = low + min(max(ahead, 1u), high - low - 1);
      uint32_t mine = 0;
#pragma unroll 8
      for (int at = lane; at < count; at += 32) mine += keys[at] >= middle ? 1 : 0;
      const int reached = static_cast<int>(__reduce_add_sync(~0u, mine));
      if (reached >= budget) {
        low = middle;
        at_low = reached;
      } else {
        high = middle;
        at_high = reached;
      }
    }
    const bool enough = at_low <= budget + slack;  // those that reach low
    // Otherwise those above low and the first that equal it.
    int ties = budget - at_high;
    uint32_t least = kLargestKey;
    const uint32_t before = (1u << lane) - 1;
    const int old_count = count;
    count = 0;
#pragma unroll 4
    for (int first = 0; first < old_count; first += 32) {
      // What is kept moves down, never beyond rows that have been read.
      const uint32_t key = first + lane < old_count ? keys[first + lane] : 0;
      const int32_t pool = first + lane < old_count ? pools[first + lane] : 0;
      bool take = enough ? key >= low : key > low;
      if (!enough) {
        const uint32_t equal = __ballot_sync(~0u, key == low);
        if (key == low) take = __popc(equal & before) < ties;
        ties -= __popc(equal);
      }
      const uint32_t takers = __ballot_sync(~0u, take);
      const int at = count + __popc(takers & before);
      if (take) {
        keys[at] = key, pools[at] = pool;
        least = min(least, key);
      }
      count += __popc(takers);
    }
    bound = __reduce_min_sync(~0u, least);
    __syncwarp();
  }
};

extern __shared__ unsigned char select_shared[];

static __global__ void __launch_bounds__(kSelectWarps * 32, 3)
    select_kernel(const __grid_constant__ SelectParams p) {
  constexpr int kAhead = 16;  // scores of a lane in flight
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const int64_t token = int64_t{blockIdx.x} * kSelectWarps + warp;  // of this call
  if (token >= p.count) return;
  const Place place = place_of(p.documents, p.first + token);
  int32_t* const out = p.selection + token * p.width;
  const int kpool = static_cast<int>(p.documents.kpool), full = static_cast<int>(place.full);
  const int taken = min(full, p.budget);
  Candidates c;
  c.keys = reinterpret_cast<uint32_t*>(select_shared) + warp * kBuffer;
  c.pools = reinterpret_cast<int32_t*>(select_shared) + (kSelectWarps + warp) * kBuffer;
  c.lane = lane;
  c.budget = p.budget;
  if (full > p.budget && p.budget > 0) {
    const float* const row = p.scores + token * p.stride + place.origin;
    const int own =
        p.own_pool_first && (place.position + 1) % p.documents.kpool == 0 ? full - 1 : -1;
    float next[kAhead];  // the warp waits for scores: the next ones are always on their way
    const auto fetch = [&](int base) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int pool = base + 32 * i + lane;
        if (pool < full) next[i] = __ldcs(row + pool);
      }
    };
    fetch(0);
    for (int base = 0; base < full; base += 32 * kAhead) {
      float score[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) score[i] = next[i];
      fetch(base + 32 * kAhead);
      uint32_t key[kAhead], passing = 0;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int pool = base + 32 * i + lane;
        key[i] = pool < full ? sort_key(score[i]) : 0;
        if (pool == own) key[i] = kLargestKey;
        passing += key[i] > c.bound ? 1 : 0;
      }
      passing = __reduce_add_sync(~0u, passing);
      if (passing == 0) continue;
      if (c.count + static_cast<int>(passing) > kBuffer) c.reduce(kSlack);
      if (c.count + static_cast<int>(passing) > kBuffer) c.reduce(0);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) c.append(key[i], base + 32 * i + lane);
    }
    c.reduce(0);
    __syncwarp();
  }
  const bool all = full <= p.budget;
  const int origin = static_cast<int>(place.begin);
  const int chosen = taken * kpool;
  const int last = p.tail ? static_cast<int>(place.position) % kpool + 1 : 0;
  const int tail = p.tail && last < kpool ? last : 0;  // tokens of the unfinished pool
  const int shift = (kpool & (kpool - 1)) == 0 ? __ffs(kpool) - 1 : -1;  // division is slow
#pragma unroll 4
  for (int i = lane; i < p.width; i += 32) {
    int value = -1;
    if (i < chosen) {
      const int pool = shift >= 0 ? i >> shift : i / kpool;
      value = origin + (all ? pool : c.pools[pool]) * kpool + i - pool * kpool;
    } else if (i < chosen + tail) {
      value = origin + full * kpool + i - chosen;
    }
    __stcs(out + i, value);
  }
}

}  // namespace lockstep::model::indexer
