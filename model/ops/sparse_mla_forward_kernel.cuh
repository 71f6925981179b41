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
// Measured: about 3400.
// Tried: 8 instead of 9 quarters, 2 or 4 of 32 column steps of q kept in registers: no difference;
// 8 of them: spills. Scores of group 1 held back until those of group 0 are done: 3% slower.
// Scores of group 1 still running while its sum is rescaled: the compiler waits for them anyway.
// Values of tile 0 started before the softmax of tile 1: 5 to 10% slower.
// Next: pools of two tokens with much in common gathered once for a cluster.

#include "model/ops/sparse_mla_tile.cuh"

namespace lockstep::model::mla {

constexpr int kSlots = 9;
constexpr int kSumsBarrier = 1;  // named barrier of the two product groups

struct ForwardParams {
  Selection selection;
  int heads;
  const uint16_t* q;
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
  uint64_t used[kMasks];           ///< bit per entry of a tile
  uint64_t mask_full[kMasks];
  uint64_t full[kSlots], empty[kSlots], q_full[kQuarters], q_empty;
  uint64_t p_full[2], p_empty[2], top_full;  ///< top_full: of group 0, whose p comes later
};
static_assert(sizeof(ForwardShared) <= 227 * 1024, "shared memory of one block");

extern __shared__ __align__(1024) unsigned char forward_dynamic[];

/// The copying warpgroup: rows of q and of the latent into shared memory.
class Copier {
 public:
  LOCKSTEP_DEVICE Copier(const ForwardParams& params, ForwardShared& shared, int thread)
      : p_(params),
        shared_(shared),
        gatherer_(params.selection, thread),
        ring_(hopper::smem_address(shared.ring) + gatherer_.offset(kSlabBytes)),
        q_(hopper::smem_address(shared.q) + gatherer_.offset(kSlabBytes)) {}

  LOCKSTEP_DEVICE void run() {
    const Selection& s = p_.selection;
    const TokenPlan none{0, 0};
    Cursor<kSlots> cursor{0, 1};
    uint32_t q_parity = 1;
    int mask_slot = 0;
    TokenPlan plan = s.plan[blockIdx.x];
    bool fetched = false;
    for (int64_t token = blockIdx.x; token < s.tokens; token += gridDim.x) {
      const int64_t token_after = token + gridDim.x;
      const TokenPlan plan_after = token_after < s.tokens ? s.plan[token_after] : none;
      if (plan.tiles > 0 && !fetched) gatherer_.fetch(token, 0);
      fetched = false;
      for (int tile = 0; tile < plan.tiles; ++tile) {
        // The place is free: the tile four before this one has left the ring, which holds two.
        gatherer_.begin_tile(plan.filler, shared_.used[mask_slot], shared_.mask_full[mask_slot]);
        mask_slot = (mask_slot + 1) % kMasks;
        if (tile + 1 < plan.tiles) {
          gatherer_.fetch(token, tile + 1);
        } else if (plan_after.tiles > 0) {
          gatherer_.fetch(token_after, 0);
          fetched = true;
        }
        if (tile == 0) {
          hopper::barrier_wait(hopper::smem_address(&shared_.q_empty), q_parity);
          q_parity ^= 1;
        }
#pragma unroll
        for (int position = 0; position < kQuarters; ++position) {
          const int columns = quarter_columns(position);
          if (tile == 0) copy_q(token, columns);
          hopper::barrier_wait(hopper::smem_address(shared_.empty) + cursor.slot * 8,
                               cursor.parity);
          gatherer_.copy(ring_ + cursor.slot * kQuarterBytes, columns);
          hopper::copy_arrive(hopper::smem_address(shared_.full) + cursor.slot * 8);
          cursor = cursor.after(1);
        }
      }
      plan = plan_after;
    }
  }

 private:
  LOCKSTEP_DEVICE void copy_q(int64_t token, int columns) const {
    const char* const from = reinterpret_cast<const char*>(p_.q) +
                             (token * p_.heads * kRank + columns * 128) * 2 +
                             gatherer_.column_bytes();
    const int row = hopper::opaque(gatherer_.row());  // or every address is computed ahead
#pragma unroll 4
    for (int i = 0; i < 8; ++i)  // rows behind the last head: any, nobody looks at the result
      hopper::copy16(q_ + columns * kQuarterBytes + i * 1024,
                     from + min(row + 8 * i, p_.heads - 1) * (kRank * 2));
    hopper::copy_arrive(hopper::smem_address(&shared_.q_full[columns]));
  }

  const ForwardParams& p_;
  ForwardShared& shared_;
  Gatherer gatherer_;
  uint32_t ring_, q_;
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
    for (int64_t token = blockIdx.x; token < p_.selection.tokens; token += gridDim.x) {
      const int tiles = p_.selection.plan[token].tiles;
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
  }

 private:
  // ---- what a tile needs ----

  LOCKSTEP_DEVICE void arrive(uint64_t* barrier) const {
    __syncwarp();
    if (lane_ == 0) hopper::barrier_arrive(hopper::smem_address(barrier));
  }

  /// s = q c^T of the tile at `at`, started.
  LOCKSTEP_DEVICE void start_scores(float (&s)[32], Cursor<kSlots> at) {
    const uint32_t q = hopper::smem_address(shared_.q);
#pragma unroll
    for (int position = 0; position < kQuarters; ++position) {
      const int columns = quarter_columns(position);
      const Cursor<kSlots> quarter = at.after(position);
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

  /// Largest score of each row, unused entries left out.
  LOCKSTEP_DEVICE void largest(float (&s)[32], float (&top)[2]) {
    hopper::barrier_wait(hopper::smem_address(&shared_.mask_full[tile_ % kMasks]),
                         tile_ / kMasks % 2);
    const uint64_t used = shared_.used[tile_ % kMasks];
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
      float part[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        part[i] = fmaxf(fmaxf(s[8 * i + 2 * r], s[8 * i + 2 * r + 1]),
                        fmaxf(s[8 * i + 4 + 2 * r], s[8 * i + 5 + 2 * r]));
      top[r] = fmaxf(fmaxf(part[0], part[1]), fmaxf(part[2], part[3]));
    }
#pragma unroll
    for (int distance = 1; distance <= 2; distance *= 2)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], distance));
  }
  /// Probabilities from scores; packed as the left operand of a product, four words per 16 keys.
  LOCKSTEP_DEVICE void softmax(float (&s)[32], uint32_t (&packed)[16]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float base = top_[r] == -INFINITY ? 0.0f : top_[r] * p_.exponent_scale;
      float sum[2] = {0.0f, 0.0f};
#pragma unroll
      for (int block = 0; block < 8; ++block) {
        float e[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          e[k] = hopper::exp2_approx(fmaf(s[4 * block + 2 * r + k], p_.exponent_scale, -base));
          sum[k] += e[k];
        }
        packed[2 * block + r] = hopper::pack_bf16(e[0], e[1]);
      }
      tile_sum_[r] = sum[0] + sum[1];
    }
  }
  LOCKSTEP_DEVICE void raise_both(const float (&top)[2], float (&factor)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) factor[r] = raise(r, fmaxf(top_[r], top[r]));
  }
  LOCKSTEP_DEVICE void publish_top() {
    if (lane_ % 4 == 0) {
      shared_.top[kGroup][row_] = top_[0];
      shared_.top[kGroup][row_ + 8] = top_[1];
    }
    if (kGroup == 0) hopper::barrier_arrive(hopper::smem_address(&shared_.top_full));
  }
  LOCKSTEP_DEVICE void await_top(float (&factor)[2]) {
    if (kGroup == 1) {
      hopper::barrier_wait(hopper::smem_address(&shared_.top_full), top_parity_);
      top_parity_ ^= 1;
    }
    factor[0] = raise(0, shared_.top[kGroup ^ 1][row_]);
    factor[1] = raise(1, shared_.top[kGroup ^ 1][row_ + 8]);
  }

  /// Probabilities and maximum to the other group.
  LOCKSTEP_DEVICE void publish(const uint32_t (&packed)[16]) {
    hopper::barrier_wait(hopper::smem_address(&shared_.p_empty[kGroup]), own_parity_ ^ 1);
    own_parity_ ^= 1;
    const int row = warp_ * 16 + lane_ % 16;
    const uint32_t to = hopper::smem_address(shared_.p[kGroup]) + row * 128;
#pragma unroll
    for (int step = 0; step < 4; ++step)
      hopper::store_matrix4(to + (((2 * step + lane_ / 16) ^ (row % 8)) << 4),
                            packed[4 * step],
                            packed[4 * step + 1],
                            packed[4 * step + 2],
                            packed[4 * step + 3]);
    if (kGroup == 1) publish_top();
    hopper::fence_async_shared();
    hopper::barrier_arrive(hopper::smem_address(&shared_.p_full[kGroup]));
  }

  LOCKSTEP_DEVICE void await_other() {
    hopper::barrier_wait(hopper::smem_address(&shared_.p_full[kGroup ^ 1]), other_parity_);
    other_parity_ ^= 1;
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

  LOCKSTEP_DEVICE uint32_t values(Cursor<kSlots> at, int half, int step) const {
    return hopper::smem_address(shared_.ring[at.after(2 * half + kGroup).slot]) + step * 2048;
  }
  LOCKSTEP_DEVICE void start_own_values(const uint32_t (&packed)[16], Cursor<kSlots> at) {
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
  LOCKSTEP_DEVICE void start_other_values(Cursor<kSlots> at) {
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
  LOCKSTEP_DEVICE void end_values(Cursor<kSlots> at) {
    hopper::wgmma_wait<1>();
    hopper::pin(o_[0]);
    arrive(&shared_.empty[at.after(kGroup).slot]);
    hopper::wgmma_wait<0>();
    hopper::pin(o_[1]);
    arrive(&shared_.empty[at.after(2 + kGroup).slot]);
  }
  LOCKSTEP_DEVICE void end_other_values(Cursor<kSlots> at) {
    end_values(at);
    hopper::barrier_arrive(hopper::smem_address(&shared_.p_empty[kGroup ^ 1]));
  }

  // ---- order of work ----

  LOCKSTEP_DEVICE void add_sums() {
    sum_[0] += tile_sum_[0];
    sum_[1] += tile_sum_[1];
  }
  /// Group 0.
  LOCKSTEP_DEVICE void own_tile(bool last_scores) {
    float s[32], top[2], factor[2];
    uint32_t packed[16];
    start_scores(s, cursor_);
    hopper::wgmma_wait<0>();
    hopper::pin(s);
    if (last_scores) arrive(&shared_.q_empty);
    largest(s, top);
    raise_both(top, factor);
    publish_top();
    softmax(s, packed);
    publish(packed);
    rescale(factor);
    add_sums();
    start_own_values(packed, cursor_);
    end_values(cursor_);
  }
  LOCKSTEP_DEVICE void other_tile() {
    float factor[2];
    if (kGroup == 1) await_top(factor);
    await_other();
    if (kGroup == 0) await_top(factor);
    rescale(factor);
    start_other_values(cursor_);
    end_other_values(cursor_);
  }

  LOCKSTEP_DEVICE void pair(bool last_scores) {
    const Cursor<kSlots> second = cursor_.after(4);
    if constexpr (kGroup == 0) {
      own_tile(last_scores);
      cursor_ = second;
      other_tile();
    } else {
      float s[32], top[2], factor[2], own_factor[2];
      uint32_t packed[16];
      start_scores(s, second);
      hopper::wgmma_wait<0>();
      hopper::pin(s);
      if (last_scores) arrive(&shared_.q_empty);
      ++tile_;
      largest(s, top);
      --tile_;
      await_top(factor);
      raise_both(top, own_factor);
      softmax(s, packed);
      publish(packed);
      await_other();
      rescale(factor);
      start_other_values(cursor_);
      end_other_values(cursor_);
      rescale(own_factor);
      add_sums();
      start_own_values(packed, second);
      end_values(second);
    }
    cursor_ = second.after(4);
    tile_ += 2;
  }

  /// The last tile of an odd number.
  LOCKSTEP_DEVICE void single() {
    if constexpr (kGroup == 0) {
      own_tile(true);
    } else {
      other_tile();
    }
    cursor_ = cursor_.after(4);
    ++tile_;
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
    store_rows(o_,
               inverse,
               p_.a + token * p_.heads * kRank + kGroup * (kRank / 2),
               row_,
               p_.heads,
               lane_ % 4);
  }

  const ForwardParams& p_;
  ForwardShared& shared_;
  int warp_, lane_, row_;
  Cursor<kSlots> cursor_;
  uint32_t tile_ = 0;  ///< over all tokens of the block
  int token_parity_ = 0;
  uint32_t q_parity_ = 0, own_parity_ = 0, other_parity_ = 0, top_parity_ = 0;
  bool q_awaited_ = false;
  float o_[2][64];
  float top_[2], sum_[2], tile_sum_[2];
};

__global__ void __launch_bounds__(kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams p) {
  ForwardShared& shared = *reinterpret_cast<ForwardShared*>(forward_dynamic);
  if (threadIdx.x == 0) {
    const auto init = [](uint64_t& barrier, uint32_t arrivals) {
      hopper::barrier_init(hopper::smem_address(&barrier), arrivals);
    };
    for (int i = 0; i < kSlots; ++i) {
      init(shared.full[i], 128);
      init(shared.empty[i], 4);
    }
    for (int i = 0; i < kQuarters; ++i) init(shared.q_full[i], 128);
    for (int i = 0; i < kMasks; ++i) init(shared.mask_full[i], 1);
    init(shared.q_empty, 8);
    for (int i = 0; i < 2; ++i) {
      init(shared.p_full[i], 128);
      init(shared.p_empty[i], 128);
    }
    init(shared.top_full, 128);
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
