#pragma once

// Absorbed sparse MLA backward for sm_90a: dq token by token, the gradient of the latent by way of
// a share of 512 numbers for every used entry of the selection, which a second kernel adds up for
// each key in the order of the tokens. No atomics.
//
// The main kernel. A block takes tokens in turn; q and da of a token stay in shared memory, tiles
// of 64 selected keys pass through a ring of five quarters. Two warpgroups of products. Group g
// makes, for all keys of the tile and its 32 heads, scores and da c (one product: its rows of q and
// da stand below one another), from which P and dS follow without a word to the other group; then
// both publish them, keys x heads. dq (heads x columns) takes dS transposed, the shares (keys x
// columns) dS q + P da; group g does columns [256 g, 256 g + 256): dq in 128 registers, the shares
// in four chunks of 64 columns, one being stored while the next is computed and the last while the
// scores of the next tile are.
//
// Shares are fp16 with a power of two for each row and chunk, taken from the largest of the chunk:
// 2^-12 relative, which is little beside the bf16 of P and dS. Columns of a chunk lie in the order
// in which the accumulators have them.
//
// Registers: 2 x 224 and 56 a thread are all that 384 threads are launched with; the copying warps
// keep a few values in local memory.
// Next: the sum of some tokens beside the products of the next; shares of neighbouring tokens added
// up before they are stored.

#include "model/ops/sparse_mla_tile.cuh"

namespace lockstep::model::mla::backward {

constexpr int kSlots = 5;
constexpr int kGroupHeads = kHeads / 2;
constexpr int kChunk = 64, kChunks = kRank / kChunk;
constexpr int kShareExponent = 14;  ///< the largest of a chunk is scaled to [2^14, 2^15)
constexpr int kMadeBarrier = 1;     // named barrier of the two product groups
constexpr int kStatsWarps = 8, kSumThreads = 256;

/// Of the tokens that are done at once.
struct Params {
  Selection selection;
  int heads;
  const uint16_t *q, *a, *da;
  const float* lse;
  float2* stats;                ///< [tokens, 64] lse log2 e and da . a
  float exponent_scale, scale;  ///< of the scores, times log2 e and as it is
  uint16_t* dq;
  uint16_t* shares;   ///< fp16 [tokens * width, 512]
  int8_t* exponents;  ///< [tokens * width, kChunks]
};

/// Rows of 128 bytes, 16-byte pieces swizzled over 8 rows.
struct Shared {
  unsigned char ring[kSlots][kQuarterBytes];
  unsigned char qd[2][8][kSlabBytes];  ///< group, 64 columns: 32 rows of q, then of da
  unsigned char made[2][kSlabBytes];   ///< dS and P, keys x heads
  float2 stats[kHeads];
  uint64_t used[kMasks];  ///< bit per entry of a tile
  uint64_t mask_full[kMasks];
  uint64_t full[kSlots], empty[kSlots];
  uint64_t qd_full[kQuarters], qd_empty[kQuarters];
  uint64_t made_empty;  ///< ds and p have been read
};
static_assert(sizeof(Shared) <= 227 * 1024, "shared memory of one block");

extern __shared__ __align__(1024) unsigned char dynamic[];

/// A warp per token and head. Heads that there are not get P = 0.
__global__ void __launch_bounds__(32 * kStatsWarps) stats_kernel(Params p) {
  const int lane = threadIdx.x % 32;
  const int64_t row = int64_t{blockIdx.x} * kStatsWarps + threadIdx.x / 32;
  const int64_t token = row / kHeads;
  const int head = static_cast<int>(row % kHeads);
  if (token >= p.selection.tokens) return;
  if (head >= p.heads) {
    if (lane == 0) p.stats[row] = make_float2(INFINITY, 0.0f);
    return;
  }
  const int64_t at = token * p.heads + head;
  float sum = 0.0f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t piece = at * (kRank / 8) + half * 32 + lane;
    const uint4 x = __ldg(reinterpret_cast<const uint4*>(p.a) + piece);
    const uint4 y = __ldg(reinterpret_cast<const uint4*>(p.da) + piece);
    const uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum = fmaf(hopper::low_bf16(xs[i]), hopper::low_bf16(ys[i]), sum);
      sum = fmaf(hopper::high_bf16(xs[i]), hopper::high_bf16(ys[i]), sum);
    }
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  if (lane == 0) p.stats[row] = make_float2(p.lse[at] * 1.44269504088896340736f, sum);
}

/// The copying warpgroup: rows of q, da and the latent into shared memory.
class Copier {
 public:
  LOCKSTEP_DEVICE Copier(const Params& params, Shared& shared, int thread)
      : p_(params),
        shared_(shared),
        gatherer_(params.selection, thread),
        ring_(hopper::smem_address(shared.ring) + gatherer_.offset(kSlabBytes)),
        qd_(hopper::smem_address(shared.qd) + gatherer_.offset(kSlabBytes)),
        thread_(thread) {}

  LOCKSTEP_DEVICE void run() {
    const Selection& s = p_.selection;
    const TokenPlan none{0, 0};
    const uint32_t tokens = static_cast<uint32_t>(s.tokens);  // 32 bits for want of registers
    Cursor<kSlots> cursor{0, 1};
    uint32_t qd_parity = 1;
    int mask_slot = 0;
    TokenPlan plan = s.plan[blockIdx.x];
    if (plan.tiles > 0) gatherer_.fetch(blockIdx.x, 0);
    for (uint32_t token = blockIdx.x; token < tokens; token += gridDim.x) {
      const uint32_t token_after = token + gridDim.x;
      const TokenPlan plan_after = token_after < tokens ? s.plan[token_after] : none;
      for (int tile = 0; tile < plan.tiles; ++tile) {
        // The place is free: the ring holds less than two tiles, and a tile that has left it was
        // published, before which all masks up to its own were read.
        gatherer_.begin_tile(plan.filler, shared_.used[mask_slot], shared_.mask_full[mask_slot]);
        mask_slot = (mask_slot + 1) % kMasks;
        if (tile + 1 < plan.tiles) {
          gatherer_.fetch(token, tile + 1);
        } else if (plan_after.tiles > 0) {
          gatherer_.fetch(token_after, 0);
        }
#pragma unroll
        for (int position = 0; position < kQuarters; ++position) {
          const int columns = quarter_columns(position);
          if (tile == 0) {
            hopper::barrier_wait(hopper::smem_address(&shared_.qd_empty[columns]), qd_parity);
            copy_qd(token, columns);
          }
          hopper::barrier_wait(hopper::smem_address(shared_.empty) + cursor.slot * 8,
                               cursor.parity);
          gatherer_.copy(ring_ + cursor.slot * kQuarterBytes, columns);
          hopper::copy_arrive(hopper::smem_address(shared_.full) + cursor.slot * 8);
          cursor = cursor.after(1);
        }
      }
      if (plan.tiles == 0 && plan_after.tiles > 0) gatherer_.fetch(token_after, 0);
      qd_parity ^= plan.tiles > 0;
      plan = plan_after;
    }
  }

 private:
  LOCKSTEP_DEVICE void copy_qd(int64_t token, int columns) const {
    const int64_t from = (token * p_.heads * kRank + columns * 128) * 2 + gatherer_.column_bytes();
    const uint32_t to = qd_ + columns * kQuarterBytes;
    const int row = hopper::opaque(gatherer_.row());  // or every address is computed ahead
#pragma unroll 1
    for (int role = 0; role < 2; ++role) {
      const char* const base = reinterpret_cast<const char*>(role == 0 ? p_.q : p_.da) + from;
#pragma unroll 4
      for (int i = 0; i < 8; ++i)  // rows behind the last head: any, their P and dS are 0
        hopper::copy16(to + i / 4 * (8 * kSlabBytes) + (i % 4 + 4 * role) * 1024,
                       base + min(row + 8 * i, p_.heads - 1) * (kRank * 2));
    }
    if (columns == 0 && thread_ < 32)
      hopper::copy16(hopper::smem_address(shared_.stats) + thread_ * 16,
                     p_.stats + token * kHeads + thread_ * 2);
    hopper::copy_arrive(hopper::smem_address(&shared_.qd_full[columns]));
  }

  const Params& p_;
  Shared& shared_;
  Gatherer gatherer_;
  uint32_t ring_, qd_;
  int thread_;
};

/// A warpgroup of products: P and dS of heads [32 g, 32 g + 32), dq and shares of columns [256 g,
/// 256 g + 256).
template <int kGroup>
class Products {
 public:
  LOCKSTEP_DEVICE Products(const Params& params, Shared& shared, int thread)
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
        for (int i = 0; i < 64; ++i) dq_[half][i] = 0.0f;
      if (tiles > 0) {
        start_scores(true);
        end_scores();
      }
      entry_ = token * p_.selection.width + row_;
      for (int tile = 1; tile < tiles; ++tile) do_tile<false>();
      if (tiles > 0) do_tile<true>();
      qd_parity_ ^= tiles > 0;
      const float one[2] = {1.0f, 1.0f};
      store_rows(dq_,
                 one,
                 p_.dq + token * p_.heads * kRank + kGroup * (kRank / 2),
                 row_,
                 p_.heads,
                 lane_ % 4);
    }
  }

 private:
  LOCKSTEP_DEVICE void arrive(uint64_t* barrier) const {
    __syncwarp();
    if (lane_ == 0) hopper::barrier_arrive(hopper::smem_address(barrier));
  }

  /// s = c [q; da]^T of the tile at the cursor, started.
  LOCKSTEP_DEVICE void start_scores(bool first) {
    const uint32_t qd = hopper::opaque(hopper::smem_address(shared_.qd[kGroup]));
    hopper::forget(s_);
#pragma unroll
    for (int position = 0; position < kQuarters; ++position) {
      const int columns = quarter_columns(position);
      const Cursor<kSlots> quarter = cursor_.after(position);
      const uint32_t keys = hopper::smem_address(shared_.ring[quarter.slot]);
      if (first) hopper::barrier_wait(hopper::smem_address(&shared_.qd_full[columns]), qd_parity_);
      hopper::barrier_wait(hopper::smem_address(&shared_.full[quarter.slot]), quarter.parity);
      hopper::fence_async_shared();
      hopper::wgmma_fence();
#pragma unroll
      for (int step = 0; step < 8; ++step) {
        const uint32_t offset = (step / 4) * kSlabBytes + (step % 4) * 32;
        hopper::wgmma_64_shared_k(s_,
                                  hopper::operand_k_major(keys + offset),
                                  hopper::operand_k_major(qd + columns * kQuarterBytes + offset),
                                  position + step > 0);
      }
    }
    hopper::wgmma_commit();
  }

  LOCKSTEP_DEVICE void end_scores() {
    hopper::wgmma_wait<0>();
    hopper::pin(s_);
  }

  LOCKSTEP_DEVICE bool used(int r) const { return used_ >> (8 * r) & 1; }
  LOCKSTEP_DEVICE void read_mask() {
    hopper::barrier_wait(hopper::smem_address(&shared_.mask_full[tile_ % kMasks]),
                         tile_ / kMasks % 2);
    used_ = static_cast<uint32_t>(shared_.used[tile_ % kMasks] >> row_);
  }
  /// P and dS to shared memory, keys x heads.
  LOCKSTEP_DEVICE void publish() {
    uint32_t p[8], ds[8];
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      const float4 stats = reinterpret_cast<const float4*>(
          shared_.stats)[(kGroup * kGroupHeads + 8 * block) / 2 + lane_ % 4];
      const float lse[2] = {stats.x, stats.z}, delta[2] = {stats.y, stats.w};
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float weight[2], gradient[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int at = 4 * block + 2 * r + e;
          const float power = hopper::exp2_approx(fmaf(s_[at], p_.exponent_scale, -lse[e]));
          weight[e] = used(r) ? power : 0.0f;
          gradient[e] = weight[e] * p_.scale * (s_[16 + at] - delta[e]);
        }
        p[2 * block + r] = hopper::pack_bf16(weight[0], weight[1]);
        ds[2 * block + r] = hopper::pack_bf16(gradient[0], gradient[1]);
      }
    }
    hopper::barrier_wait(hopper::smem_address(&shared_.made_empty), (tile_ & 1) ^ 1);
    ++tile_;
    const int row = warp_ * 16 + lane_ % 16;
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const int to = row * 128 + (((4 * kGroup + 2 * step + lane_ / 16) ^ (row % 8)) << 4);
      const int i = 4 * step;
      hopper::store_matrix4(
          hopper::smem_address(shared_.made[0]) + to, ds[i], ds[i + 1], ds[i + 2], ds[i + 3]);
      hopper::store_matrix4(
          hopper::smem_address(shared_.made[1]) + to, p[i], p[i + 1], p[i + 2], p[i + 3]);
    }
    hopper::fence_async_shared();
    hopper::named_barrier(kMadeBarrier, 256);
  }

  LOCKSTEP_DEVICE void start_dq() {
    const uint32_t ds = hopper::opaque(hopper::smem_address(shared_.made[0]));
    hopper::wgmma_fence();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t keys =
          hopper::smem_address(shared_.ring[cursor_.after(2 * half + kGroup).slot]);
#pragma unroll
      for (int step = 0; step < 4; ++step)
        hopper::wgmma_128_shared_outer(dq_[half],
                                       hopper::operand_outer_major(ds + step * 2048, kSlabBytes),
                                       hopper::operand_outer_major(keys + step * 2048, kSlabBytes));
      hopper::wgmma_commit();
    }
  }
  LOCKSTEP_DEVICE void start_shares(float (&d)[32], int chunk) {
    const uint32_t made = hopper::opaque(hopper::smem_address(shared_.made));
    const uint32_t qd = hopper::opaque(hopper::smem_address(shared_.qd[0][4 * kGroup + chunk]));
    hopper::forget(d);
    hopper::wgmma_fence();
#pragma unroll
    for (int role = 0; role < 2; ++role)
#pragma unroll
      for (int step = 0; step < 4; ++step)
        hopper::wgmma_64_shared(
            d,
            hopper::operand_k_major(made + role * kSlabBytes + step * 32),
            hopper::operand_outer_major(
                qd + (step / 2) * (8 * kSlabBytes) + role * (kGroupHeads * 128) + (step % 2) * 2048,
                kSlabBytes),
            role + step > 0);
    hopper::wgmma_commit();
  }
  LOCKSTEP_DEVICE void store_shares(const float (&d)[32], int chunk) const {
    const int quad = lane_ % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = 0.0f;
#pragma unroll
      for (int block = 0; block < 8; ++block)
        top = fmaxf(top, fmaxf(fabsf(d[4 * block + 2 * r]), fabsf(d[4 * block + 2 * r + 1])));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      const int exponent = min(max(int(__float_as_uint(top) >> 23) - 127, -100), 127);
      const float factor = __uint_as_float(uint32_t(127 + kShareExponent - exponent) << 23);
      if (!used(r)) continue;
      const int64_t entry = entry_ + 8 * r;
      uint16_t* const to = p_.shares + entry * kRank + (4 * kGroup + chunk) * kChunk + quad * 8;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t w[4];
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const int at = 4 * (4 * i + m) + 2 * r;
          w[m] = hopper::pack_fp16(d[at] * factor, d[at + 1] * factor);
        }
        __stcs(reinterpret_cast<uint4*>(to + i * 32), make_uint4(w[0], w[1], w[2], w[3]));
      }
      if (quad == 0) p_.exponents[entry * kChunks + 4 * kGroup + chunk] = int8_t(exponent);
    }
  }

  template <bool kLast>
  LOCKSTEP_DEVICE void do_tile() {
    read_mask();
    publish();
    float odd[32];  // the even chunks go where the scores were
    start_dq();
    start_shares(s_, 0);
    hopper::wgmma_wait<2>();
    hopper::pin(dq_[0]);
    arrive(&shared_.empty[cursor_.after(kGroup).slot]);
    hopper::wgmma_wait<1>();
    hopper::pin(dq_[1]);
    arrive(&shared_.empty[cursor_.after(2 + kGroup).slot]);
    cursor_ = cursor_.after(4);
    start_shares(odd, 1);
    hopper::wgmma_wait<1>();
    hopper::pin(s_);
    store_shares(s_, 0);
    start_shares(s_, 2);
    hopper::wgmma_wait<1>();
    hopper::pin(odd);
    if (kLast) arrive(&shared_.qd_empty[2 * kGroup]);
    store_shares(odd, 1);
    start_shares(odd, 3);
    hopper::wgmma_wait<1>();
    hopper::pin(s_);
    store_shares(s_, 2);
    if (kLast) {
      hopper::wgmma_wait<0>();
    } else {
      start_scores(false);
      hopper::wgmma_wait<1>();
    }
    hopper::pin(odd);
    arrive(&shared_.made_empty);
    if (kLast) arrive(&shared_.qd_empty[2 * kGroup + 1]);
    store_shares(odd, 3);
    entry_ += kTileKeys;
    if (!kLast) end_scores();
  }

  const Params& p_;
  Shared& shared_;
  int warp_, lane_, row_;
  Cursor<kSlots> cursor_;
  uint32_t tile_ = 0;  ///< over all tokens of the block
  uint32_t qd_parity_ = 0;
  int64_t entry_ = 0;  ///< of row_ in the tile
  uint32_t used_ = 0;  ///< bits 0 and 8: of rows row_ and row_ + 8 of the tile
  float dq_[2][64];
  float s_[32];
};

__global__ void __launch_bounds__(kThreads, 1) backward_kernel(const __grid_constant__ Params p) {
  Shared& shared = *reinterpret_cast<Shared*>(dynamic);
  if (threadIdx.x == 0) {
    const auto init = [](uint64_t& barrier, uint32_t arrivals) {
      hopper::barrier_init(hopper::smem_address(&barrier), arrivals);
    };
    for (int i = 0; i < kSlots; ++i) {
      init(shared.full[i], 128);
      init(shared.empty[i], 4);
    }
    for (int i = 0; i < kQuarters; ++i) {
      init(shared.qd_full[i], 128);
      init(shared.qd_empty[i], 4);
    }
    for (int i = 0; i < kMasks; ++i) init(shared.mask_full[i], 1);
    init(shared.made_empty, 8);
    hopper::fence_barrier_init();
  }
  __syncthreads();
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
  if (group == 0) {
    hopper::more_registers<224>();
    Products<0>(p, shared, thread).run();
  } else if (group == 1) {
    hopper::more_registers<224>();
    Products<1>(p, shared, thread).run();
  } else {
    hopper::fewer_registers<56>();
    Copier(p, shared, thread).run();
  }
}

// ---- sums of shares -----------------------------------------------------------------------------

/// Keys to sort by (unused entries behind all of them) and the entries they stand for.
__global__ void list_entries(Selection s, uint32_t* keys, uint32_t* entries) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= s.tokens * s.width) return;
  keys[i] = min(static_cast<uint32_t>(s.entries[i]), s.keys);
  entries[i] = static_cast<uint32_t>(i);
}
/// Where each key's entries stand among the sorted ones; `ranges` is zero before.
__global__ void find_ranges(const uint32_t* sorted, int64_t count, uint32_t keys, int2* ranges) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const uint32_t key = sorted[i];
  if (key >= keys) return;
  if (i == 0 || sorted[i - 1] != key) ranges[key].x = static_cast<int>(i);
  if (i + 1 == count || sorted[i + 1] != key) ranges[key].y = static_cast<int>(i + 1);
}

/// dlatent (+)= shares of each key, one after another in fp32. A warp takes 256 columns of a key.
__global__ void __launch_bounds__(kSumThreads)
    sum_shares(Params p, const int2* ranges, const uint32_t* sorted, float* dlatent, bool first) {
  const int lane = threadIdx.x % 32;
  const int64_t warp = int64_t{blockIdx.x} * (kSumThreads / 32) + threadIdx.x / 32;
  const int64_t key = warp / 2;
  const int half = static_cast<int>(warp % 2);
  if (key >= p.selection.keys) return;
  const int2 range = ranges[key];
  if (range.x == range.y && !first) return;
  const int chunk = lane / 8;
  float* const to =
      dlatent + key * kRank + half * 256 + chunk * kChunk + lane / 4 % 2 * 32 + lane % 4 * 2;
  float2 sum[4];
#pragma unroll
  for (int m = 0; m < 4; ++m)
    sum[m] = first ? make_float2(0.0f, 0.0f) : *reinterpret_cast<const float2*>(to + 8 * m);
  const uint16_t* const shares = p.shares + half * 256 + lane * 8;
  const uint32_t* const exponents = reinterpret_cast<const uint32_t*>(p.exponents) + half;
  constexpr int kBatch = 16;
  for (int at = range.x; at < range.y; at += 32) {
    const int count = min(32, range.y - at);
    const uint32_t entry = lane < count ? sorted[at + lane] : 0;
    const uint32_t exponent = lane < count ? __ldcs(exponents + entry * size_t{2}) : 0;
    for (int begin = 0; begin < count; begin += kBatch) {
      uint4 share[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const uint32_t from = __shfl_sync(0xffffffffu, entry, begin + i);
        if (begin + i < count)
          share[i] = __ldcs(reinterpret_cast<const uint4*>(shares + from * size_t{kRank}));
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const uint32_t packed = __shfl_sync(0xffffffffu, exponent, begin + i);
        if (begin + i >= count) continue;
        const int power = static_cast<int8_t>(packed >> (8 * chunk));
        const float factor = __uint_as_float(uint32_t(127 - kShareExponent + power) << 23);
        const uint32_t w[4] = {share[i].x, share[i].y, share[i].z, share[i].w};
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const float2 value = __half22float2(*reinterpret_cast<const __half2*>(&w[m]));
          sum[m].x = fmaf(value.x, factor, sum[m].x);
          sum[m].y = fmaf(value.y, factor, sum[m].y);
        }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < 4; ++m) *reinterpret_cast<float2*>(to + 8 * m) = sum[m];
}

}  // namespace lockstep::model::mla::backward
