#pragma once

// The four products of the output head for sm_90a, one kernel: persistent clusters of two blocks
// take 256 x 256 tiles, 128 rows each, the columns' operand multicast; tiles are handed out so that
// those at work at one time share operands in L2. What follows the sum differs:
// - kPanels: maximum and sums of exponentials of a row's 256 logits, and the label's logit.
// - kLogits: gradient of the logits, bf16.
// - kInput: added to the fp32 gradient of h; with the last slice, rounded.
// - kWeights: gradient of the weights, rounded.
// What lies outside a tensor is read as zeros and not written.

#include "model/ops/gemm_tiles.cuh"

namespace lockstep::model::head {

using namespace gemm;

enum class Product {
  kPanels,   // h weight^T
  kLogits,   // h weight^T
  kInput,    // dlogits weight
  kWeights,  // dlogits^T h
};

constexpr int kSharedBytes = kTilesEnd;
constexpr float kLog2E = 1.44269504f;

struct ProductParams {
  CUtensorMap a, b;
  CUtensorMap out;  // kLogits, kWeights
  int* next;        // 0 at launch: next tile to hand out
  int rows, columns;
  int depth_tiles;
  float factor;
  const int64_t* labels;  // kPanels, kLogits, of the rows here
  // kPanels: [column tile][rows]; weighted may be null
  float2* panels;
  float* weighted;
  float* label_logits;  // [rows]
  // kLogits
  const float *log_sum, *dlogprobs;
  int64_t first_column;  // of the vocabulary
  // kInput
  float* sums;       // fp32 [rows][columns]
  uint16_t* result;  // bf16, with the last slice
  bool first, last;
};

/// Row pairs in bands: within a band all rows before the next columns.
struct Tiles {
  int pairs, column_tiles;
  LOCKSTEP_DEVICE explicit Tiles(const ProductParams& p)
      : pairs((p.rows + 2 * kTileRows - 1) / (2 * kTileRows)),
        column_tiles((p.columns + kTileColumns - 1) / kTileColumns) {}
  LOCKSTEP_DEVICE int count() const { return pairs * column_tiles; }
  LOCKSTEP_DEVICE int2 at(int index, int rank) const {  // first row, column tile
    constexpr int kBand = 8;
    const int first = index / (kBand * column_tiles) * kBand;
    const int band = min(kBand, pairs - first), in_band = index - first * column_tiles;
    return {(first + in_band % band) * 2 * kTileRows + rank * kTileRows, in_band / band};
  }
};

template <Product kProduct>
struct Order {
  static constexpr bool kOuterA = kProduct == Product::kWeights;
  static constexpr bool kOuterB = kProduct == Product::kWeights || kProduct == Product::kInput;
};

/// One thread.
template <Product kProduct>
LOCKSTEP_DEVICE void copy_tiles(const ProductParams& p, uint32_t shared, int rank) {
  using O = Order<kProduct>;
  const Tiles tiles(p);
  Ring ring;
  Turns turns;
  for (;;) {
    const int index = turns.take(shared);
    if (index >= tiles.count()) return;
    const int2 t = tiles.at(index, rank);
    for (int k = 0; k < p.depth_tiles; ++k, ring.next()) {
      const uint32_t full = shared + kFullAt + ring.stage * 8;
      const uint32_t stage = shared + ring.stage * kStageBytes;
      barrier_wait(shared + kEmptyAt + ring.stage * 8, ring.parity ^ 1);
      barrier_expect_bytes(full, kStageBytes);
      for (int slab = 0; slab < kSlabsA; ++slab) {
        const int outer = t.x + 64 * slab, depth = k * kTileDepth;
        tensor_load(stage + slab * kSlabBytes,
                    &p.a,
                    O::kOuterA ? outer : depth,
                    O::kOuterA ? depth : outer,
                    0,
                    full);
      }
      for (int slab = 2 * rank; slab < 2 * rank + 2; ++slab) {
        const int outer = t.y * kTileColumns + 64 * slab, depth = k * kTileDepth;
        tensor_load_to(stage + (kSlabsA + slab) * kSlabBytes,
                       &p.b,
                       O::kOuterB ? outer : depth,
                       O::kOuterB ? depth : outer,
                       0,
                       full,
                       3);
      }
    }
  }
}

// Sums of a thread: d[4 j + 2 half + i] is column 8 j + 2 (lane % 4) + i of row lane / 4 + 8 half.

/// Logits before the factor; rounded ones stay packed. A new array, not changes in place: those
/// would keep the compiler from overlapping the next tile's products.
template <bool kRound>
class Logits {
 public:
  LOCKSTEP_DEVICE explicit Logits(const float (&d)[128]) : sums_(d) {
    if constexpr (kRound)
#pragma unroll
      for (int i = 0; i < 64; ++i) pairs_[i] = pack_bf16(d[2 * i], d[2 * i + 1]);
  }
  LOCKSTEP_DEVICE float at(int i) const {
    if constexpr (kRound) return i % 2 == 0 ? low_bf16(pairs_[i / 2]) : high_bf16(pairs_[i / 2]);
    return sums_[i];
  }
  /// The same, but not shared with other uses, which would take registers for all of them.
  LOCKSTEP_DEVICE float at_once(int i) const {
    if constexpr (kRound) {
      const uint32_t pair = opaque(pairs_[i / 2]);
      return i % 2 == 0 ? low_bf16(pair) : high_bf16(pair);
    }
    return sums_[i];
  }

 private:
  const float (&sums_)[128];
  uint32_t pairs_[kRound ? 64 : 1];
};

LOCKSTEP_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
LOCKSTEP_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

/// kPartial: the tile has columns beyond the vocabulary.
template <bool kRound, bool kPartial>
LOCKSTEP_DEVICE void finish_panels(
    const ProductParams& p, const Group& g, const float (&d)[128], int row, int column_tile) {
  const int first = column_tile * kTileColumns, column = first + 2 * (g.lane & 3);
  const Logits<kRound> logits(d);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto valid = [&](int j, int i) { return !kPartial || column + 8 * j + i < p.columns; };
    const int t = row + 8 * half;
    const bool exists = t < p.rows;
    const int64_t label = exists ? __ldg(p.labels + t) - first : -1;
    const bool here = label >= 0 && label < kTileColumns && label + first < p.columns;
    if (__any_sync(~0u, here)) {
      const int wanted = here ? static_cast<int>(label) - 2 * (g.lane & 3) : -1;
#pragma unroll
      for (int j = 0; j < 32; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (wanted == 8 * j + i)
            p.label_logits[t] = p.factor * logits.at_once(4 * j + 2 * half + i);
    }
    float top = -INFINITY;  // a positive factor keeps the order
#pragma unroll
    for (int j = 0; j < 32; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (valid(j, i)) top = fmaxf(top, logits.at_once(4 * j + 2 * half + i));
    top = quad_max(top) * p.factor;
    const float shift = top * kLog2E;
    float sum = 0.0f, weighted = 0.0f;
#pragma unroll
    for (int j = 0; j < 32; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float z = p.factor * logits.at(4 * j + 2 * half + i);
        const float e = valid(j, i) ? exp2_approx(__fmaf_rn(z, kLog2E, -shift)) : 0.0f;
        sum += e;
        if (p.weighted != nullptr) weighted = __fmaf_rn(e, z - top, weighted);
      }
    sum = quad_sum(sum);
    if (p.weighted != nullptr) weighted = quad_sum(weighted);
    if (exists && (g.lane & 3) == 0) {
      const int64_t at = int64_t{column_tile} * p.rows + t;
      p.panels[at] = make_float2(top, sum);
      if (p.weighted != nullptr) p.weighted[at] = weighted;
    }
  }
}

/// Pair i of a thread's 64: sums 2 i and 2 i + 1.
template <class Pair>
LOCKSTEP_DEVICE void store_tile(
    const ProductParams& p, const Group& g, int first_row, int column_tile, const Pair& pair) {
#pragma unroll
  for (int c = 0; c < kSlabsB; ++c)
    g.store(c & 1,
            &p.out,
            column_tile * kTileColumns + 64 * c,
            first_row,
            0,
            [&](int q, uint32_t(&w)[4]) {
#pragma unroll
              for (int i = 0; i < 4; ++i) w[i] = pair(16 * c + 4 * q + i);
            });
}

template <bool kRound>
LOCKSTEP_DEVICE void finish_logits(const ProductParams& p,
                                   const Group& g,
                                   const float (&d)[128],
                                   int row,
                                   int first_row,
                                   int column_tile) {
  const int64_t column = p.first_column + int64_t{column_tile} * kTileColumns + 2 * (g.lane & 3);
  float gradient[2], shift[2];
  int64_t wanted[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int t = row + 8 * half;
    const int64_t label = t < p.rows ? __ldg(p.labels + t) : -1;
    gradient[half] = label >= 0 ? __ldg(p.dlogprobs + t) * p.factor : 0.0f;
    shift[half] = gradient[half] != 0.0f ? __ldg(p.log_sum + t) * kLog2E : 0.0f;
    wanted[half] = label - column;
  }
  const Logits<kRound> logits(d);
  store_tile(p, g, first_row, column_tile, [&](int pair) {
    const int half = pair % 2, j = pair / 2;
    float dz[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float z = p.factor * logits.at(2 * pair + i);
      const float e = exp2_approx(__fmaf_rn(z, kLog2E, -shift[half]));
      const float one = wanted[half] == 8 * j + i ? 1.0f : 0.0f;
      dz[i] = gradient[half] != 0.0f ? gradient[half] * (one - e) : 0.0f;
    }
    return pack_bf16(dz[0], dz[1]);
  });
}

LOCKSTEP_DEVICE void finish_input(
    const ProductParams& p, const Group& g, const float (&d)[128], int row, int column_tile) {
  const int first = column_tile * kTileColumns + 2 * (g.lane & 3);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int t = row + 8 * half;
    if (t >= p.rows) continue;
    float* const sums = p.sums + int64_t{t} * p.columns + first;
    uint16_t* const result = p.result + int64_t{t} * p.columns + first;
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      if (first + 8 * j >= p.columns) continue;
      float2 v = make_float2(d[4 * j + 2 * half], d[4 * j + 2 * half + 1]);
      if (!p.first) {
        const float2 before = *reinterpret_cast<const float2*>(sums + 8 * j);
        v.x += before.x, v.y += before.y;
      }
      if (p.last) {
        *reinterpret_cast<uint32_t*>(result + 8 * j) = pack_bf16(v.x, v.y);
      } else {
        *reinterpret_cast<float2*>(sums + 8 * j) = v;
      }
    }
  }
}

/// A math warpgroup.
template <Product kProduct, bool kRound>
LOCKSTEP_DEVICE void multiply_tiles(const ProductParams& p, const Group& g, int rank) {
  using O = Order<kProduct>;
  constexpr int kStepA = O::kOuterA ? 2048 : 32, kStepB = O::kOuterB ? 2048 : 32;  // bytes, k + 16
  const Tiles tiles(p);
  Ring ring;
  Turns turns;
  float d[128];
  for (;;) {
    const int index = turns.take_warp(g.shared, g.lane);
    if (index >= tiles.count()) break;
    const int2 t = tiles.at(index, rank);
    const int first_row = t.x + 64 * g.index;
    if (first_row >= p.rows) {  // nothing to do, but its stages still pass
      for (int k = 0; k < p.depth_tiles; ++k, ring.next()) {
        barrier_wait(g.full(ring.stage), ring.parity);
        __syncwarp();
        g.release(ring.stage);
      }
      continue;
    }
    int before = -1;
    for (int k = 0; k < p.depth_tiles; ++k, ring.next()) {
      barrier_wait(g.full(ring.stage), ring.parity);
      const uint32_t a_at = g.shared + ring.stage * kStageBytes + g.index * kSlabBytes;
      const uint32_t b_at = g.shared + ring.stage * kStageBytes + kSlabsA * kSlabBytes;
      const uint64_t a = O::kOuterA ? operand_outer_major(a_at, kSlabBytes) : operand_k_major(a_at);
      const uint64_t b = O::kOuterB ? operand_outer_major(b_at, kSlabBytes) : operand_k_major(b_at);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kTileDepth / 16; ++i)
        wgmma_256<O::kOuterA, O::kOuterB>(
            d, a + i * (kStepA >> 4), b + i * (kStepB >> 4), k > 0 || i > 0);
      wgmma_commit();
      wgmma_wait<1>();
      if (before >= 0) g.release(before);
      before = ring.stage;
    }
    wgmma_wait<0>();
    pin(d);
    g.release(before);
    const int row = first_row + (g.thread >> 5) * 16 + g.lane / 4;
    if constexpr (kProduct == Product::kPanels) {
      if ((t.y + 1) * kTileColumns > p.columns) {
        finish_panels<kRound, true>(p, g, d, row, t.y);
      } else {
        finish_panels<kRound, false>(p, g, d, row, t.y);
      }
    } else if constexpr (kProduct == Product::kLogits) {
      finish_logits<kRound>(p, g, d, row, first_row, t.y);
    } else if constexpr (kProduct == Product::kInput) {
      finish_input(p, g, d, row, t.y);
    } else {
      store_tile(p, g, first_row, t.y, [&](int i) { return pack_bf16(d[2 * i], d[2 * i + 1]); });
    }
  }
  if (g.thread == 0) bulk_wait_all();
}

extern __shared__ __align__(1024) unsigned char head_shared[];

template <Product kProduct, bool kRound>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    product_kernel(const __grid_constant__ ProductParams p) {
  const uint32_t shared = smem_address(head_shared);
  const int thread = threadIdx.x, rank = static_cast<int>(cluster_rank());
  if (thread == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(shared + kFullAt + s * 8, 1);
      barrier_init(shared + kEmptyAt + s * 8, 16);  // 8 warps in each block of the cluster
    }
    Turns::init(shared);
    fence_barrier_init();
  }
  __syncthreads();
  cluster_sync();
  if (thread < 128) {
    fewer_registers<40>();
    if (thread == 0) copy_tiles<kProduct>(p, shared, rank);
    if (thread == 32 && rank == 0) Turns::hand_out(Tiles(p).count(), p.next, shared);
    __syncwarp();
  } else {
    more_registers<232>();
    multiply_tiles<kProduct, kRound>(p, Group(shared, thread / 128 - 1, thread % 128), rank);
    __syncwarp();
  }
  cluster_sync();  // the partner may still copy into this block and arrive at its barriers
}

struct MergeParams {
  int rows, tiles;
  int64_t vocab;
  const int64_t* labels;
  const float2* panels;
  const float* weighted;
  const float* label_logits;
  float *logprobs, *log_sum, *entropy;
};
constexpr int kMergeThreads = 128;
/// A thread for each token, tiles in order.
static __global__ void __launch_bounds__(kMergeThreads)
    merge_kernel(const __grid_constant__ MergeParams p) {
  const int t = blockIdx.x * kMergeThreads + threadIdx.x;
  if (t >= p.rows) return;
  const float2* panels = p.panels + t;
  float top = panels[0].x;
#pragma unroll 8
  for (int i = 1; i < p.tiles; ++i) top = fmaxf(top, panels[int64_t{i} * p.rows].x);
  float sum = 0.0f, weighted = 0.0f;
#pragma unroll 8
  for (int i = 0; i < p.tiles; ++i) {
    const float2 panel = panels[int64_t{i} * p.rows];
    const float below = panel.x - top, factor = exp2f(below * kLog2E);
    sum = __fmaf_rn(panel.y, factor, sum);
    if (p.weighted != nullptr)
      weighted = __fmaf_rn(
          __fmaf_rn(panel.y, below, p.weighted[int64_t{i} * p.rows + t]), factor, weighted);
  }
  const float log_sum = top + logf(sum);
  const int64_t label = p.labels[t];
  p.log_sum[t] = log_sum;
  p.logprobs[t] = label < 0          ? 0.0f
                  : label >= p.vocab ? __uint_as_float(0x7fffffffu)
                                     : p.label_logits[t] - log_sum;
  if (p.entropy != nullptr) p.entropy[t] = logf(sum) - weighted / sum;
}

}  // namespace lockstep::model::head
