#pragma once

// Grouped products of the experts for sm_90a: one kernel, five kinds (moe_gemm_schedule.cuh).
//
// Persistent clusters of two blocks take 256 x 256 tiles of an expert, 128 rows each, the columns'
// operand multicast: alone, blocks would ask L2 for half as much again. Where at most 128 rows are
// left, the two blocks take neighbouring columns of the same rows, and a warpgroup without rows
// lets its stages pass. Transposed operands are read as they lie (outer-major descriptors). Tensor
// maps per expert, made on the device, give zeros beyond its rows and drop what is stored there,
// so nothing is padded and sums over rows need no mask.
//
// SwiGLU needs gate and up of a column in one thread: a tile's 256 columns are 128 of each. Its
// gradient gets gate and up through the ring of stages, as if the sum went on for four more steps,
// and writes its three results from there; otherwise they would arrive too late.
//
// Limits (131072 rows, 36 experts, ncu): tensor cores active 90% (gate and up), 90% (down), 82%
// (gradient of h), 94% (the others) of the cycles, at 1.6 GHz: power sets the clock. Both math
// warpgroups finish a tile together, so what follows the sum (4% to 15%) is not hidden. Many small
// experts (227 rows) waste a part of their tiles, and their weights come from device memory.
// - release.cluster on the arrivals that free a stage is a fence of the whole device for every
//   step: 41 instead of 31 ms for both passes.
// - tiles handed out in order instead of every 66th to a cluster: device memory moves 6 instead of
//   12 to 14 GB for the large products, since clusters no longer drift apart; both passes 3% to 4%
//   faster.
// - roundings of D53 as template arguments: 2% to 3%.
// - bands of 16 row pairs instead of 8: a quarter more bytes. One barrier less for each stored
//   slab: no difference.

#include "model/ops/moe_gemm_epilogue.cuh"

namespace lockstep::model::moe {

template <Product kProduct>
LOCKSTEP_DEVICE void load_stage(const ProductParams& p,
                                const Tile& t,
                                int expert,
                                int k,
                                int rank,
                                uint32_t stage,
                                uint32_t full) {
  constexpr bool kSums = kProduct == Product::kWeights;
  constexpr uint16_t kBoth = 3;
  const auto a = [&](int slab, bool both) {
    const int outer = t.row + 64 * slab;
    const uint32_t to = stage + slab * kSlabBytes;
    const int x = kSums ? outer : k, y = kSums ? k : outer;
    both ? tensor_load_to(to, p.a + expert, x, y, 0, full, kBoth)
         : tensor_load(to, p.a + expert, x, y, 0, full);
  };
  const auto b = [&](int slab, bool both) {
    const uint32_t to = stage + (kSlabsA + slab) * kSlabBytes;
    int x = k, y = t.column * kTileColumns + 64 * slab;  // kDown
    if (kProduct == Product::kGateUp) y = t.column * 128 + 64 * (slab & 1) + (slab / 2) * p.inner;
    if (kProduct != Product::kGateUp && kProduct != Product::kDown) x = y, y = k;
    const CUtensorMap* map = kSums ? p.b + expert : &p.weights;
    both ? tensor_load_to(to, map, x, y, kSums ? 0 : expert, full, kBoth)
         : tensor_load(to, map, x, y, kSums ? 0 : expert, full);
  };
  if (t.wide) {
    a(rank, true);
    for (int slab = 0; slab < kSlabsB; ++slab) b(slab, false);
  } else {
    for (int slab = 0; slab < kSlabsA; ++slab) a(slab, false);
    b(2 * rank, true);
    b(2 * rank + 1, true);
  }
}

/// One thread.
template <Product kProduct>
LOCKSTEP_DEVICE void copy_tiles(const ProductParams& p,
                                const int* first,
                                uint32_t shared,
                                int rank) {
  Ring ring;
  Turns turns;
  Walk walk(p, first, rank);
  int expert = -1;
  while (walk.at(turns.take(shared))) {
    if (walk.expert() != expert) {
      expert = walk.expert();
      tensor_map_acquire(p.a + expert);
      if (kProduct == Product::kWeights) tensor_map_acquire(p.b + expert);
      if (kProduct == Product::kHidden) tensor_map_acquire(p.kept + expert);
    }
    const Tile t = walk.tile();
    const int depth = depth_tiles<kProduct>(p, walk.rows());
    for (int k = 0; k < depth; ++k, ring.next()) {
      const uint32_t full = shared + kFullAt + ring.stage * 8;
      barrier_wait(shared + kEmptyAt + ring.stage * 8, ring.parity ^ 1);
      barrier_expect_bytes(full, kStageBytes);
      load_stage<kProduct>(
          p, t, expert, k * kTileDepth, rank, shared + ring.stage * kStageBytes, full);
    }
    if (kProduct == Product::kHidden) {
      const int steps = kept_steps(p, t, rank);
      for (int c = 0; c < steps; ++c, ring.next()) {
        const uint32_t full = shared + kFullAt + ring.stage * 8;
        const uint32_t stage = shared + ring.stage * kStageBytes;
        barrier_wait(shared + kEmptyAt + ring.stage * 8, ring.parity ^ 1);
        barrier_expect_bytes(full, 4 * kSlabBytes);
        for (int slab = 0; slab < 4; ++slab)
          tensor_load(stage + slab * kSlabBytes,
                      p.kept + expert,
                      t.column * kTileColumns + 64 * c + (slab / 2) * p.inner,
                      t.row + 64 * (slab & 1),
                      0,
                      full);
      }
    }
  }
}

/// A math warpgroup.
template <Product kProduct, int kRoundings>
LOCKSTEP_DEVICE void multiply_tiles(const ProductParams& p,
                                    const int* first,
                                    const Group& g,
                                    int rank) {
  constexpr bool kOuterA = kProduct == Product::kWeights;
  constexpr bool kOuterB = kProduct != Product::kGateUp && kProduct != Product::kDown;
  constexpr int kStepA = kOuterA ? 2048 : 32, kStepB = kOuterB ? 2048 : 32;  // bytes, k + 16
  Ring ring;
  Turns turns;
  Walk walk(p, first, rank);
  int expert = -1;
  float d[128];
  while (walk.at(turns.take_warp(g.shared, g.lane))) {
    if (walk.expert() != expert) {
      expert = walk.expert();
      if (g.thread == 0) {
        if (kProduct == Product::kGateUp && p.keep) tensor_map_acquire(p.kept + expert);
        if (kProduct == Product::kGateUp || kProduct == Product::kHidden)
          tensor_map_acquire(p.hidden + expert);
        if (kProduct != Product::kGateUp && kProduct != Product::kWeights)
          tensor_map_acquire(p.out + expert);
      }
      __syncwarp();
    }
    const Tile t = walk.tile();
    const int depth = depth_tiles<kProduct>(p, walk.rows());
    const int rows = kProduct == Product::kWeights ? p.outer : walk.rows();
    // The multiplier has nothing to do beyond the last row or column, but its stages still pass.
    const bool active = t.row + 64 * g.index < rows && t.column < p.column_tiles;
    if (!active) {
      const int steps = kProduct == Product::kHidden ? kept_steps(p, t, rank) : 0;
      for (int k = 0; k < depth + steps; ++k, ring.next()) {
        barrier_wait(g.full(ring.stage), ring.parity);
        __syncwarp();
        g.release(ring.stage);
      }
      continue;
    }
    if (depth == 0) {
#pragma unroll
      for (int i = 0; i < 128; ++i) d[i] = 0.0f;
    }
    int before = -1;
    for (int k = 0; k < depth; ++k, ring.next()) {
      barrier_wait(g.full(ring.stage), ring.parity);
      const uint32_t a_at = g.shared + ring.stage * kStageBytes + g.index * kSlabBytes;
      const uint32_t b_at = g.shared + ring.stage * kStageBytes + kSlabsA * kSlabBytes;
      const uint64_t a = kOuterA ? operand_outer_major(a_at, kSlabBytes) : operand_k_major(a_at);
      const uint64_t b = kOuterB ? operand_outer_major(b_at, kSlabBytes) : operand_k_major(b_at);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kTileDepth / 16; ++i)
        wgmma_256<kOuterA, kOuterB>(
            d, a + i * (kStepA >> 4), b + i * (kStepB >> 4), k > 0 || i > 0);
      wgmma_commit();
      wgmma_wait<1>();
      if (before >= 0) g.release(before);
      before = ring.stage;
    }
    wgmma_wait<0>();
    pin(d);
    if (before >= 0) g.release(before);
    if constexpr (kProduct == Product::kGateUp) {
      finish_gate_up<kRoundings>(p, g, d, expert, t);
    } else if constexpr (kProduct == Product::kHidden) {
      finish_hidden<kRoundings>(p, g, ring, d, expert, t, kept_steps(p, t, rank));
    } else {
      finish_plain<kProduct>(p, g, d, expert, t);
    }
  }
  if (g.thread == 0) bulk_wait_all();
}

extern __shared__ __align__(1024) unsigned char product_shared[];

/// kRoundings: D53, for kGateUp and kHidden.
template <Product kProduct, int kRoundings>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    product_kernel(const __grid_constant__ ProductParams p) {
  const uint32_t shared = smem_address(product_shared);
  int* first = reinterpret_cast<int*>(product_shared + kFirstAt);
  const int thread = threadIdx.x, rank = static_cast<int>(cluster_rank());
  if (thread < 32) count_tiles(p, first, thread);
  if (thread == 32) {
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
    if (thread == 0) copy_tiles<kProduct>(p, first, shared, rank);
    if (thread == 32 && rank == 0) Turns::hand_out(first[p.experts], p.next, shared);
    __syncwarp();
  } else {
    more_registers<232>();
    multiply_tiles<kProduct, kRoundings>(
        p, first, Group(shared, thread / 128 - 1, thread % 128), rank);
    __syncwarp();
  }
  cluster_sync();  // the partner may still copy into this block and arrive at its barriers
}

/// Per-expert maps of row tensors, [tensor][expert], from a map, a base and bytes a row each; and
/// counters of tiles.
constexpr int kMaxRowTensors = 6;
struct MapParams {
  CUtensorMap whole[kMaxRowTensors];
  const unsigned char* base[kMaxRowTensors];
  int64_t row_bytes[kMaxRowTensors];
  CUtensorMap* to;
  int* next;  // [kCounters]
  const int64_t* offsets;
  int experts;
};
constexpr int kCounters = 4;  // one a product
/// grid (experts, tensors), one warp each.
static __global__ void map_kernel(const __grid_constant__ MapParams p) {
  __shared__ alignas(128) uint32_t map[32];
  const int expert = blockIdx.x, tensor = blockIdx.y, lane = threadIdx.x;
  if (expert == 0 && tensor == 0 && lane < kCounters) p.next[lane] = 0;
  map[lane] = reinterpret_cast<const uint32_t*>(&p.whole[tensor])[lane];
  __syncwarp();
  if (lane == 0) {
    const int64_t begin = p.offsets[expert], rows = p.offsets[expert + 1] - begin;
    tensor_map_set(smem_address(map),
                   p.base[tensor] + begin * p.row_bytes[tensor],
                   static_cast<uint32_t>(rows > 0 ? rows : 1));
  }
  __syncwarp();
  tensor_map_release(p.to + int64_t{tensor} * p.experts + expert, smem_address(map));
}

}  // namespace lockstep::model::moe
