#pragma once

// Kernels of the KDA forward pass. (The design note stands at the end of this comment's file history;
// see below.)

#include "model/ops/kda_forward_chain.cuh"
#include "model/ops/kda_forward_prepare.cuh"
#include "model/ops/kda_forward_tiles.cuh"

namespace lockstep::model::kda {

constexpr int kPlanThreads = 1024;
constexpr int kChainThreads = 384;  // two warpgroups and one whose first thread copies
constexpr int kFusedThreads = 512;
constexpr int kFusedGroups = kFusedThreads / kPrepareThreads;
constexpr int kFusedBytes =
    kChainBytes > kFusedGroups * kPrepareBytes ? kChainBytes : kFusedGroups * kPrepareBytes;

extern __shared__ __align__(1024) unsigned char dynamic_shared[];

/// Chunk table from the document bounds, and cleared flags. One block.
__global__ void __launch_bounds__(kPlanThreads) plan_kernel(Params p) {
  __shared__ int warp_sum[32];
  __shared__ int carry;
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  if (thread == 0) carry = 0;
  __syncthreads();
  for (int64_t first = 0; first < p.documents; first += kPlanThreads) {
    const int64_t d = first + thread;
    const int count =
        d < p.documents
            ? static_cast<int>((p.cu_seqlens[d + 1] - p.cu_seqlens[d] + kChunk - 1) / kChunk)
            : 0;
    int sum = count;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == 31) warp_sum[warp] = sum;
    __syncthreads();
    int before = carry;
    for (int w = 0; w < warp; ++w) before += warp_sum[w];
    if (d < p.documents) p.chunk_begin[d] = before + sum - count;
    __syncthreads();
    if (thread == kPlanThreads - 1) carry = before + sum;
    __syncthreads();
  }
  const int total = carry;
  if (thread == 0) p.chunk_begin[p.documents] = total;
  __syncthreads();
  for (int chunk = thread; chunk < total; chunk += kPlanThreads) {
    int64_t low = 0, high = p.documents - 1;  // last document that begins at or before the chunk
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (p.chunk_begin[middle] <= chunk) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const int64_t begin = p.cu_seqlens[low] + int64_t{chunk - p.chunk_begin[low]} * kChunk;
    const int64_t left = p.cu_seqlens[low + 1] - begin;
    p.chunks[chunk] = {begin,
                       static_cast<int32_t>(left < kChunk ? left : kChunk),
                       static_cast<int32_t>(low)};
  }
  for (int i = thread; i < p.heads * (p.ring + 1); i += kPlanThreads) p.ready[i] = 0;
}

__global__ void __launch_bounds__(kPrepareThreads, 2) prepare_kernel(Params p) {
  prepare_items(p, dynamic_shared, 1, blockIdx.x, gridDim.x, threadIdx.x);
}

__global__ void __launch_bounds__(kChainThreads, 1) chain_kernel(Params p) {
  const int head = blockIdx.x % p.heads;
  const int64_t document = blockIdx.x / p.heads;
  const uint32_t shared = smem_address(dynamic_shared);
  if (threadIdx.x == 0) chain_init(shared);
  __syncthreads();
  if (threadIdx.x >= 256) {
    fewer_registers<24>();
    if (threadIdx.x == 256)
      chain_produce(p, head, p.chunk_begin[document], p.chunk_begin[document + 1], shared);
  } else {
    more_registers<232>();
    chain_consume(p, head, document, document + opaque(1), dynamic_shared, threadIdx.x >> 7,
                  threadIdx.x & 127);
  }
}

__global__ void __launch_bounds__(kFusedThreads, 1) fused_kernel(Params p) {
  const int chunks = p.chunk_begin[p.documents];
  if (blockIdx.x < static_cast<unsigned>(p.heads)) {
    const int head = blockIdx.x;
    const uint32_t shared = smem_address(dynamic_shared);
    if (threadIdx.x == 0) chain_init(shared);
    __syncthreads();
    if (threadIdx.x >= 256) {
      fewer_registers<24>();
      if (threadIdx.x == 256) chain_produce(p, head, 0, chunks, shared);
    } else {
      more_registers<232>();
      chain_consume(p, head, 0, p.documents, dynamic_shared, threadIdx.x >> 7, threadIdx.x & 127);
    }
  } else {
    const int group = threadIdx.x / kPrepareThreads;
    prepare_items(p,
                  dynamic_shared + group * kPrepareBytes,
                  1 + group,
                  static_cast<int>(blockIdx.x - p.heads) * kFusedGroups + group,
                  static_cast<int>(gridDim.x - p.heads) * kFusedGroups,
                  threadIdx.x % kPrepareThreads);
  }
}

}  // namespace lockstep::model::kda
