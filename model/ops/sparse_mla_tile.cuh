#pragma once

// What the absorbed sparse MLA kernels for sm_90a share: tiles of 64 selected rows of the latent,
// gathered in quarters (64 rows x 128 columns) into a ring in shared memory.

#include "model/ops/hopper.cuh"

namespace lockstep::model::mla {

constexpr int kHeads = 64, kRank = 512, kTileKeys = 64;
constexpr int kThreads = 384;                  // two warpgroups of products, one that copies
constexpr int kSlabBytes = kTileKeys * 128;    // 64 rows of 64 columns
constexpr int kQuarterBytes = 2 * kSlabBytes;  // 64 rows of 128 columns
constexpr int kQuarters = 4;
constexpr int kMasks = 4;
constexpr int kPlanWarps = 8;

struct TokenPlan {
  int tiles;        ///< groups of 64 entries up to the last used one
  uint32_t filler;  ///< a used row, copied in the place of unused ones: its weight is 0
};

struct Selection {
  int64_t tokens;
  uint32_t keys;
  int width;
  const int32_t* entries;  ///< [tokens, width]
  const uint16_t* latent;  ///< [keys, kRank]
  TokenPlan* plan;         ///< [tokens]
};

/// A place in a ring of `kSlots`: quarters follow one another over all tiles and tokens of a block.
template <int kSlots>
struct Cursor {
  int slot = 0;
  uint32_t parity = 0;
  LOCKSTEP_DEVICE Cursor after(int quarters) const {
    const int next = slot + quarters;
    return next >= kSlots ? Cursor{next - kSlots, parity ^ 1} : Cursor{next, parity};
  }
};

/// Columns of the quarter at a position of its tile. Products of group g use positions g and g + 2.
LOCKSTEP_DEVICE constexpr int quarter_columns(int position) {
  return (position & 1) * 2 + (position >> 1);
}

static __global__ void __launch_bounds__(32 * kPlanWarps) plan_tokens(Selection s) {
  const int lane = threadIdx.x % 32;
  const int64_t token = int64_t{blockIdx.x} * kPlanWarps + threadIdx.x / 32;
  if (token >= s.tokens) return;
  const int32_t* const row = s.entries + token * int64_t{s.width};
  int last = -1;
  for (int end = s.width; end > 0 && last < 0; end -= 256) {
    int32_t entry[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int at = end - 1 - lane - 32 * i;
      entry[i] = at >= 0 ? row[at] : -1;
    }
#pragma unroll
    for (int i = 7; i >= 0; --i)
      if (static_cast<uint32_t>(entry[i]) < s.keys) last = end - 1 - lane - 32 * i;
    last = __reduce_max_sync(0xffffffffu, last);
  }
  if (lane == 0)
    s.plan[token] =
        last < 0 ? TokenPlan{0, 0} : TokenPlan{last / kTileKeys + 1, uint32_t(row[last])};
}

/// One thread of the copying warpgroup: 16 bytes of each of 8 rows of a tile. A warp issues few
/// instructions per copy, each waiting for the one before: what it executes is what it takes.
class Gatherer {
 public:
  LOCKSTEP_DEVICE Gatherer(const Selection& selection, int thread)
      : s_(selection), warp_(thread / 32), lane_(thread % 32) {
    row_ = warp_ * 2 + lane_ / 16;
    column_bytes_ = lane_ % 16 * 16;
  }
  /// Row of the first of this thread's pieces, the others follow 8 rows apart.
  LOCKSTEP_DEVICE int row() const { return row_; }
  LOCKSTEP_DEVICE int column_bytes() const { return column_bytes_; }
  /// Of the first piece in a quarter whose slabs are `slab_bytes` apart.
  LOCKSTEP_DEVICE uint32_t offset(int slab_bytes) const {
    const int piece = lane_ % 16;
    return (piece / 8) * slab_bytes + row_ * 128 + (((piece % 8) ^ row_) << 4);
  }

  LOCKSTEP_DEVICE void fetch(int64_t token, int tile) {
    const int first = tile * kTileKeys, left = s_.width - first;
    const int32_t* const entries = s_.entries + token * int64_t{s_.width} + first;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      entry_[i] = row_ + 8 * i < left ? __ldg(entries + row_ + 8 * i) : -1;
    if (warp_ != 0) return;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      masked_[i] = lane_ + 32 * i < left ? __ldg(entries + lane_ + 32 * i) : -1;
  }
  /// The fetched entries become the tile that is copied; bit per used entry to `used`.
  LOCKSTEP_DEVICE void begin_tile(uint32_t filler, uint64_t& used, uint64_t& used_full) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t row = uint32_t(entry_[i]) < s_.keys ? entry_[i] : filler;
      source_[i] =
          reinterpret_cast<const char*>(s_.latent) + column_bytes_ + row * uint64_t{kRank * 2};
    }
    if (warp_ != 0) return;
    const uint32_t low = __ballot_sync(0xffffffffu, uint32_t(masked_[0]) < s_.keys);
    const uint32_t high = __ballot_sync(0xffffffffu, uint32_t(masked_[1]) < s_.keys);
    if (lane_ != 0) return;
    used = low | uint64_t{high} << 32;
    hopper::barrier_arrive(hopper::smem_address(&used_full));
  }
  LOCKSTEP_DEVICE void copy(uint32_t to, int columns) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) hopper::copy16(to + i * 1024, source_[i] + columns * 256);
  }

 private:
  const Selection& s_;
  int warp_, lane_, row_, column_bytes_;
  int32_t entry_[8];   ///< of rows row_ + 8 i of the next tile
  int32_t masked_[2];  ///< first warp: of rows lane_ and lane_ + 32
  const char* source_[8];
};

/// w[i] of lane l goes to w[l] of lane i, within four lanes.
LOCKSTEP_DEVICE void transpose_in_quad(uint32_t (&w)[4], int quad) {
#pragma unroll
  for (int distance = 1; distance <= 2; distance *= 2)
#pragma unroll
    for (int low = 0; low < 4; ++low) {
      if (low & distance) continue;
      const int high = low | distance;
      const bool upper = (quad & distance) != 0;
      const uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? w[low] : w[high], distance);
      if (upper)
        w[low] = got;
      else
        w[high] = got;
    }
}

/// A warpgroup's 64 x 256 accumulators, rows times `factor`, to bf16 rows of kRank at `to`.
LOCKSTEP_DEVICE void store_rows(
    const float (&o)[2][64], const float (&factor)[2], uint16_t* to, int row, int rows, int quad) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    uint16_t* const at_row = to + (row + 8 * r) * kRank + quad * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int group = 0; group < 4; ++group) {
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = 4 * (4 * group + i) + 2 * r;
          w[i] = hopper::pack_bf16(o[half][at] * factor[r], o[half][at + 1] * factor[r]);
        }
        transpose_in_quad(w, quad);
        if (row + 8 * r < rows)
          *reinterpret_cast<uint4*>(at_row + half * 128 + group * 32) =
              make_uint4(w[0], w[1], w[2], w[3]);
      }
  }
}

}  // namespace lockstep::model::mla
