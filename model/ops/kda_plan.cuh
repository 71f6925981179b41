#pragma once

// The chunk table of a packed batch, made on the device so that a call needs no host
// synchronisation.

#include "model/ops/kda_forward_tiles.cuh"

namespace lockstep::model::kda {

constexpr int kPlanThreads = 1024;

/// Chunk table from the document bounds, and cleared flags. One block.
static __global__ void __launch_bounds__(kPlanThreads) plan_kernel(Params p) {
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
    p.chunks[chunk] = {
        begin, static_cast<int32_t>(left < kChunk ? left : kChunk), static_cast<int32_t>(low)};
  }
  for (int i = thread; i < p.heads * (p.ring + 2); i += kPlanThreads) p.ready[i] = 0;
}

}  // namespace lockstep::model::kda
