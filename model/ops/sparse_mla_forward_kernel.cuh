#pragma once

// Absorbed sparse MLA forward for sm_90a. A block takes tokens in turn; 64 heads are the rows of
// every product, so the selected keys of a token are read once: 128 FLOP per gathered byte.
//
// Tiles of 64 keys. A copying warpgroup gathers them (16-byte asynchronous copies, swizzled) into a
// ring of nine quarters (64 keys x 128 columns), two tiles and a bit. Two warpgroups of products:
// group 0 makes scores and probabilities of even tiles, group 1 of odd ones; each keeps 256 of the
// 512 columns of the result in registers (128 of them), for which it reads the other's
// probabilities from shared memory and its own from registers. A tile is its own transposed value
// operand. Order in a pair of tiles: scores 0 | scores 1, softmax 0 | values 0, softmax 1 | values
// 1; a quarter goes back to the copier when the products of its half are done. Maxima are handed
// along with the probabilities, so that tiles count strictly one after another.
//
// Bounds, cycles a tile and multiprocessor: tensor cores 2048 (scores 1024, values 1024); shared
// memory about 2200 (a 64x64x16 product with both operands there reads 128 bytes a clock, all there
// are; the tile is written once and read twice); second-level cache 64 KB.
// Measured: about 3600. By the clock of single warps, in a pair: softmax to product 1400, twice and
// in sequence (probabilities 760, publishing 200 to 460, rescaling 200); the copying warps work
// 80% of the time, 350 to 700 a quarter, on the latency of address arithmetic.
// Tried: 8 instead of 9 quarters, 2 or 4 of 32 column steps of q kept in registers: no difference;
// 8 of them: spills. Scores of group 1 held back until those of group 0 are done: 3% slower.
// Scores of group 1 still running while its sum is rescaled: the compiler waits for them anyway.
// Next: one pointer per row instead of address arithmetic per copy; the maximum handed over before
// the probabilities; pools of two tokens with much in common gathered once for a cluster.

#include "model/ops/hopper.cuh"

namespace lockstep::model::mla {

constexpr int kHeads = 64, kRank = 512, kTileKeys = 64;
constexpr int kForwardThreads = 384;           // two warpgroups of products, one that copies
constexpr int kSlabBytes = kTileKeys * 128;    // 64 rows of 64 columns
constexpr int kQuarterBytes = 2 * kSlabBytes;  // 64 rows of 128 columns
constexpr int kQuarters = 4;
constexpr int kSlots = 9;
constexpr int kCountWarps = 8;
/// Named barriers of the two product groups; those of probabilities plus the group that makes them.
constexpr int kSumsBarrier = 1, kMadeBarrier = 2, kReadBarrier = 4;

struct ForwardParams {
  int64_t tokens;
  uint32_t keys;
  int width, heads;
  const uint16_t *q, *latent;
  const int32_t* selection;
  int32_t* tiles;        ///< [tokens] groups of 64 entries up to the last used one
  float exponent_scale;  ///< scale of the scores times log2 e
  uint16_t* a;
  float* lse;
};

/// Rows of 128 bytes, 16-byte pieces swizzled over 8 rows.
struct ForwardShared {
  unsigned char ring[kSlots][kQuarterBytes];  ///< quarters of latent tiles
  unsigned char q[kQuarters][kQuarterBytes];
  unsigned char p[2][kSlabBytes];  ///< probabilities by the group that made them: heads x keys
  float top[2][kHeads];            ///< running maximum that belongs to p
  float sums[2][2][kHeads];        ///< of a token, by parity of the token and group
  uint64_t used[4];                ///< bit per entry of a tile
  uint64_t full[kSlots], empty[kSlots], q_full[kQuarters], q_empty;
};
static_assert(sizeof(ForwardShared) <= 227 * 1024, "shared memory of one block");

extern __shared__ __align__(1024) unsigned char forward_dynamic[];

/// A place in the ring: quarters follow one another over all tiles and tokens of the block.
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

__global__ void __launch_bounds__(32 * kCountWarps) count_tiles(ForwardParams p) {
  const int lane = threadIdx.x % 32;
  const int64_t token = int64_t{blockIdx.x} * kCountWarps + threadIdx.x / 32;
  if (token >= p.tokens) return;
  const int32_t* const row = p.selection + token * int64_t{p.width};
  int last = -1;
  for (int end = p.width; end > 0 && last < 0; end -= 256) {
    int32_t entry[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int at = end - 1 - lane - 32 * i;
      entry[i] = at >= 0 ? row[at] : -1;
    }
#pragma unroll
    for (int i = 7; i >= 0; --i)
      if (static_cast<uint32_t>(entry[i]) < p.keys) last = end - 1 - lane - 32 * i;
    last = __reduce_max_sync(0xffffffffu, last);
  }
  if (lane == 0) p.tiles[token] = last < 0 ? 0 : last / kTileKeys + 1;
}

/// The copying warpgroup: rows of q and of the latent into shared memory.
class Copier {
 public:
  LOCKSTEP_DEVICE Copier(const ForwardParams& params, ForwardShared& shared, int thread)
      : p_(params), shared_(shared), warp_(thread / 32), lane_(thread % 32) {
    row_ = warp_ * 2 + lane_ / 16;
    const int piece = lane_ % 16;
    column_bytes_ = piece * 16;
    offset_ = (piece / 8) * kSlabBytes + row_ * 128 + (((piece % 8) ^ row_) << 4);
  }

  LOCKSTEP_DEVICE void run() {
    Cursor cursor{0, 1};
    uint32_t q_parity = 1;
    int mask_slot = 0;
    int tiles = p_.tiles[blockIdx.x];
    bool fetched = false;
    Entries next;
    for (int64_t token = blockIdx.x; token < p_.tokens; token += gridDim.x) {
      const int64_t token_after = token + gridDim.x;
      const int tiles_after = token_after < p_.tokens ? p_.tiles[token_after] : 0;
      if (tiles > 0 && !fetched) fetch(next, token, 0);
      fetched = false;
      for (int tile = 0; tile < tiles; ++tile) {
        const Entries now = next;
        if (tile + 1 < tiles) {
          fetch(next, token, tile + 1);
        } else if (tiles_after > 0) {
          fetch(next, token_after, 0);
          fetched = true;
        }
        if (tile == 0) {
          hopper::barrier_wait(hopper::smem_address(&shared_.q_empty), q_parity);
          q_parity ^= 1;
        }
#pragma unroll 1
        for (int position = 0; position < kQuarters; ++position) {
          const int columns = quarter_columns(position);
          if (tile == 0) copy_q(token, columns);
          hopper::barrier_wait(hopper::smem_address(&shared_.empty[cursor.slot]), cursor.parity);
          if (position == 0 && warp_ == 0) publish_mask(now, mask_slot);
          copy_latent(now, columns, cursor.slot);
          cursor = cursor.after(1);
        }
        mask_slot = (mask_slot + 1) % 4;
      }
      tiles = tiles_after;
    }
  }

 private:
  struct Entries {
    int32_t row[8];   ///< of rows row_ + 8 i of the tile
    int32_t mask[2];  ///< first warp: of rows lane_ and lane_ + 32
  };

  LOCKSTEP_DEVICE void fetch(Entries& to, int64_t token, int tile) const {
    const int first = tile * kTileKeys, left = p_.width - first;
    const int32_t* const entries = p_.selection + token * int64_t{p_.width} + first;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      to.row[i] = row_ + 8 * i < left ? __ldg(entries + row_ + 8 * i) : -1;
    if (warp_ == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        to.mask[i] = lane_ + 32 * i < left ? __ldg(entries + lane_ + 32 * i) : -1;
    }
  }
  LOCKSTEP_DEVICE void publish_mask(const Entries& entries, int slot) {
    const uint32_t low = __ballot_sync(0xffffffffu, uint32_t(entries.mask[0]) < p_.keys);
    const uint32_t high = __ballot_sync(0xffffffffu, uint32_t(entries.mask[1]) < p_.keys);
    if (lane_ == 0) shared_.used[slot] = low | uint64_t{high} << 32;
  }
  LOCKSTEP_DEVICE void copy_q(int64_t token, int columns) {
    const uint32_t to = hopper::smem_address(shared_.q[columns]) + offset_;
    const char* const from = reinterpret_cast<const char*>(p_.q) +
                             (token * p_.heads * kRank + columns * 128) * 2 + column_bytes_;
#pragma unroll 4
    for (int i = 0; i < 8; ++i) {
      const int head = row_ + 8 * i;
      const bool valid = head < p_.heads;
      hopper::copy16(to + i * 1024, from + (valid ? head * kRank * 2 : 0), valid);
    }
    hopper::copy_arrive(hopper::smem_address(&shared_.q_full[columns]));
  }
  LOCKSTEP_DEVICE void copy_latent(const Entries& entries, int columns, int slot) {
    const uint32_t to = hopper::smem_address(shared_.ring[slot]) + offset_;
    const uint32_t bar = hopper::smem_address(&shared_.full[slot]);
    const char* const from =
        reinterpret_cast<const char*>(p_.latent) + columns * 256 + column_bytes_;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const bool valid = uint32_t(entries.row[i]) < p_.keys;
      hopper::copy16(to + i * 1024,
                     from + (valid ? uint32_t(entries.row[i]) : 0) * uint64_t{kRank * 2},
                     valid);
    }
    hopper::copy_arrive(bar);
    if (warp_ == 0 && lane_ == 0) hopper::barrier_arrive(bar);  // and the mask is there
  }

  const ForwardParams& p_;
  ForwardShared& shared_;
  int warp_, lane_, row_, column_bytes_, offset_;
};

/// A warpgroup of products. Group g makes the probabilities of every tile of its parity and keeps
/// columns [256 g, 256 g + 256) of the sum over all tiles.
template <int kGroup>
class Products {
 public:
  LOCKSTEP_DEVICE Products(const ForwardParams& params, ForwardShared& shared, int thread)
      : p_(params),
        shared_(shared),
        warp_(thread / 32),
        lane_(thread % 32),
        row_(warp_ * 16 + lane_ / 4) {}

  LOCKSTEP_DEVICE void run() {
    hopper::named_barrier_arrive(kReadBarrier + (kGroup ^ 1), 256);
    for (int64_t token = blockIdx.x; token < p_.tokens; token += gridDim.x) {
      const int tiles = p_.tiles[token];
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < 64; ++i) o_[half][i] = 0.0f;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        top_[r] = -INFINITY;
        sum_[r] = 0.0f;
      }
      q_awaited_ = false;
      if (kGroup == 1 && tiles == 1) arrive(&shared_.q_empty);
      int tile = 0;
      for (; tile + 1 < tiles; tile += 2) pair(tile + (kGroup == 0 ? 2 : 3) >= tiles);
      if (tile < tiles) single();
      q_parity_ ^= tiles > 0;
      finish(token);
    }
    hopper::named_barrier(kReadBarrier + kGroup, 256);
  }

 private:
  // ---- what a tile needs ----

  LOCKSTEP_DEVICE void arrive(uint64_t* barrier) const {
    __syncwarp();
    if (lane_ == 0) hopper::barrier_arrive(hopper::smem_address(barrier));
  }

  /// s = q c^T of the tile at `at`, started.
  LOCKSTEP_DEVICE void start_scores(float (&s)[32], Cursor at) {
    const uint32_t q = hopper::smem_address(shared_.q);
#pragma unroll
    for (int position = 0; position < kQuarters; ++position) {
      const int columns = quarter_columns(position);
      const Cursor quarter = at.after(position);
      const uint32_t keys = hopper::smem_address(shared_.ring[quarter.slot]);
      if (!q_awaited_)
        hopper::barrier_wait(hopper::smem_address(&shared_.q_full[columns]), q_parity_);
      hopper::barrier_wait(hopper::smem_address(&shared_.full[quarter.slot]), quarter.parity);
      hopper::fence_async_shared();
      hopper::wgmma_fence();
#pragma unroll
      for (int step = 0; step < 8; ++step) {
        const uint32_t offset = (step / 4) * kSlabBytes + (step % 4) * 32;
        hopper::wgmma_64_shared_k(s,
                                  hopper::operand_k_major(q + columns * kQuarterBytes + offset),
                                  hopper::operand_k_major(keys + offset),
                                  position + step > 0);
      }
    }
    hopper::wgmma_commit();
    q_awaited_ = true;
  }

  /// Moves the maximum of row r to `top`; the factor that older terms need.
  LOCKSTEP_DEVICE float raise(int r, float top) {
    const float old = top_[r];
    top_[r] = top;
    return old == top ? 1.0f : hopper::exp2_approx((old - top) * p_.exponent_scale);
  }

  /// Probabilities from scores; packed as the left operand of a product, four words per 16 keys.
  LOCKSTEP_DEVICE void softmax(float (&s)[32], uint32_t (&packed)[16], float (&factor)[2]) {
    const uint64_t used = shared_.used[mask_slot_];
    if (used != ~uint64_t{0}) {
      const uint64_t mine = used >> (2 * (lane_ % 4));
#pragma unroll
      for (int block = 0; block < 8; ++block)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (!(mine >> (8 * block + e) & 1)) s[4 * block + e] = s[4 * block + 2 + e] = -INFINITY;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = top_[r];
#pragma unroll
      for (int block = 0; block < 8; ++block)
        top = fmaxf(top, fmaxf(s[4 * block + 2 * r], s[4 * block + 2 * r + 1]));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      factor[r] = raise(r, top);
      const float base = top == -INFINITY ? 0.0f : top * p_.exponent_scale;
      float sum = 0.0f;
#pragma unroll
      for (int block = 0; block < 8; ++block) {
        float e[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          e[k] = hopper::exp2_approx(fmaf(s[4 * block + 2 * r + k], p_.exponent_scale, -base));
          sum += e[k];
        }
        packed[2 * block + r] = hopper::pack_bf16(e[0], e[1]);
      }
      tile_sum_[r] = sum;
    }
  }

  /// Probabilities and maximum to the other group.
  LOCKSTEP_DEVICE void publish(const uint32_t (&packed)[16]) {
    hopper::named_barrier(kReadBarrier + kGroup, 256);
    const int row = warp_ * 16 + lane_ % 16;
    const uint32_t to = hopper::smem_address(shared_.p[kGroup]) + row * 128;
#pragma unroll
    for (int step = 0; step < 4; ++step)
      hopper::store_matrix4(to + (((2 * step + lane_ / 16) ^ (row % 8)) << 4),
                            packed[4 * step],
                            packed[4 * step + 1],
                            packed[4 * step + 2],
                            packed[4 * step + 3]);
    if (lane_ % 4 == 0) {
      shared_.top[kGroup][row_] = top_[0];
      shared_.top[kGroup][row_ + 8] = top_[1];
    }
    hopper::fence_async_shared();
    hopper::named_barrier_arrive(kMadeBarrier + kGroup, 256);
  }

  /// Waits for the other group's probabilities.
  LOCKSTEP_DEVICE void await_other(float (&factor)[2]) {
    hopper::named_barrier(kMadeBarrier + (kGroup ^ 1), 256);
    factor[0] = raise(0, shared_.top[kGroup ^ 1][row_]);
    factor[1] = raise(1, shared_.top[kGroup ^ 1][row_ + 8]);
  }

  LOCKSTEP_DEVICE void rescale(const float (&factor)[2]) {
    if (!__any_sync(0xffffffffu, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 64; ++i) o_[half][i] *= factor[i / 2 % 2];
    sum_[0] *= factor[0];
    sum_[1] *= factor[1];
  }

  LOCKSTEP_DEVICE uint32_t values(Cursor at, int half, int step) const {
    return hopper::smem_address(shared_.ring[at.after(2 * half + kGroup).slot]) + step * 2048;
  }
  LOCKSTEP_DEVICE void start_own_values(const uint32_t (&packed)[16], Cursor at) {
    hopper::wgmma_fence();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int step = 0; step < 4; ++step)
        hopper::wgmma_128_outer(o_[half],
                                packed + 4 * step,
                                hopper::operand_outer_major(values(at, half, step), kSlabBytes));
      hopper::wgmma_commit();
    }
  }
  LOCKSTEP_DEVICE void start_other_values(Cursor at) {
    const uint32_t p = hopper::smem_address(shared_.p[kGroup ^ 1]);
    hopper::wgmma_fence();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int step = 0; step < 4; ++step)
        hopper::wgmma_128_shared(o_[half],
                                 hopper::operand_k_major(p + step * 32),
                                 hopper::operand_outer_major(values(at, half, step), kSlabBytes));
      hopper::wgmma_commit();
    }
  }
  /// Ends the two products started last; their quarters go back to the copier.
  LOCKSTEP_DEVICE void end_values(Cursor at) {
    hopper::wgmma_wait<1>();
    hopper::pin(o_[0]);
    arrive(&shared_.empty[at.after(kGroup).slot]);
    hopper::wgmma_wait<0>();
    hopper::pin(o_[1]);
    arrive(&shared_.empty[at.after(2 + kGroup).slot]);
  }
  LOCKSTEP_DEVICE void end_other_values(Cursor at) {
    end_values(at);
    hopper::named_barrier_arrive(kReadBarrier + (kGroup ^ 1), 256);
  }

  // ---- order of work ----

  LOCKSTEP_DEVICE void add_sums() {
    sum_[0] += tile_sum_[0];
    sum_[1] += tile_sum_[1];
  }
  LOCKSTEP_DEVICE void own_tile() {
    float s[32], factor[2];
    uint32_t packed[16];
    start_scores(s, cursor_);
    hopper::wgmma_wait<0>();
    hopper::pin(s);
    softmax(s, packed, factor);
    publish(packed);
    rescale(factor);
    add_sums();
    start_own_values(packed, cursor_);
    end_values(cursor_);
  }
  LOCKSTEP_DEVICE void other_tile() {
    float factor[2];
    await_other(factor);
    rescale(factor);
    start_other_values(cursor_);
    end_other_values(cursor_);
  }

  /// Two tiles, the first of group 0. Group 1 starts the scores of its tile, then the product for
  /// the first, so that its softmax runs beside that product.
  LOCKSTEP_DEVICE void pair(bool last_scores) {
    const Cursor second = cursor_.after(4);
    if constexpr (kGroup == 0) {
      float s[32], factor[2];
      uint32_t packed[16];
      start_scores(s, cursor_);
      hopper::wgmma_wait<0>();
      hopper::pin(s);
      if (last_scores) arrive(&shared_.q_empty);
      softmax(s, packed, factor);
      publish(packed);
      rescale(factor);
      add_sums();
      start_own_values(packed, cursor_);
      end_values(cursor_);
      cursor_ = second;
      other_tile();
    } else {
      float s[32], factor[2];
      uint32_t packed[16];
      start_scores(s, second);
      hopper::wgmma_wait<0>();
      hopper::pin(s);
      if (last_scores) arrive(&shared_.q_empty);
      mask_slot_ = (mask_slot_ + 1) % 4;
      await_other(factor);
      rescale(factor);
      start_other_values(cursor_);
      softmax(s, packed, factor);
      publish(packed);
      end_other_values(cursor_);
      rescale(factor);
      add_sums();
      start_own_values(packed, second);
      end_values(second);
      mask_slot_ = (mask_slot_ + 3) % 4;
    }
    cursor_ = second.after(4);
    mask_slot_ = (mask_slot_ + 2) % 4;
  }

  /// The last tile of an odd number.
  LOCKSTEP_DEVICE void single() {
    if constexpr (kGroup == 0) {
      own_tile();
      arrive(&shared_.q_empty);
    } else {
      other_tile();
    }
    cursor_ = cursor_.after(4);
    mask_slot_ = (mask_slot_ + 1) % 4;
  }

  // ---- result ----

  LOCKSTEP_DEVICE void finish(int64_t token) {
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum_[r] += __shfl_xor_sync(0xffffffffu, sum_[r], 1);
      sum_[r] += __shfl_xor_sync(0xffffffffu, sum_[r], 2);
      if (lane_ % 4 == 0) shared_.sums[token_parity_][kGroup][row_ + 8 * r] = sum_[r];
    }
    hopper::named_barrier(kSumsBarrier, 256);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_ + 8 * r;
      const float sum = shared_.sums[token_parity_][0][row] + shared_.sums[token_parity_][1][row];
      inverse[r] = sum > 0.0f ? 1.0f / sum : 0.0f;
      if (kGroup == 0 && p_.lse != nullptr && lane_ % 4 == 0 && row < p_.heads)
        p_.lse[token * p_.heads + row] =
            sum > 0.0f ? (top_[r] * p_.exponent_scale + log2f(sum)) * 0.693147180559945309417f
                       : -INFINITY;
    }
    token_parity_ ^= 1;
    const int quad = lane_ % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_ + 8 * r;
      uint16_t* const to =
          p_.a + (token * p_.heads + row) * kRank + kGroup * (kRank / 2) + quad * 8;
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int group = 0; group < 4; ++group) {
          uint32_t w[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int at = 4 * (4 * group + i) + 2 * r;
            w[i] = hopper::pack_bf16(o_[half][at] * inverse[r], o_[half][at + 1] * inverse[r]);
          }
          transpose_in_quad(w, quad);
          if (row < p_.heads)
            *reinterpret_cast<uint4*>(to + half * 128 + group * 32) =
                make_uint4(w[0], w[1], w[2], w[3]);
        }
    }
  }

  /// w[i] of lane l goes to w[l] of lane i, within four lanes.
  static LOCKSTEP_DEVICE void transpose_in_quad(uint32_t (&w)[4], int quad) {
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

  const ForwardParams& p_;
  ForwardShared& shared_;
  int warp_, lane_, row_;
  Cursor cursor_;
  int mask_slot_ = 0, token_parity_ = 0;
  uint32_t q_parity_ = 0;
  bool q_awaited_ = false;
  float o_[2][64];
  float top_[2], sum_[2], tile_sum_[2];
};

__global__ void __launch_bounds__(kForwardThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams p) {
  ForwardShared& shared = *reinterpret_cast<ForwardShared*>(forward_dynamic);
  if (threadIdx.x == 0) {
    const auto init = [](uint64_t& barrier, uint32_t arrivals) {
      hopper::barrier_init(hopper::smem_address(&barrier), arrivals);
    };
    for (int i = 0; i < kSlots; ++i) {
      init(shared.full[i], 128 + 1);
      init(shared.empty[i], 4);
    }
    for (int i = 0; i < kQuarters; ++i) init(shared.q_full[i], 128);
    init(shared.q_empty, 8);
    hopper::fence_barrier_init();
  }
  __syncthreads();
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
  if (group == 0) {
    hopper::more_registers<216>();
    Products<0>(p, shared, thread).run();
  } else if (group == 1) {
    hopper::more_registers<216>();
    Products<1>(p, shared, thread).run();
  } else {
    hopper::fewer_registers<72>();
    Copier(p, shared, thread).run();
  }
}

}  // namespace lockstep::model::mla
