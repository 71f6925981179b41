#pragma once

// KDA backward for sm_90a. The batch is taken in windows of chunks, last window first; each is
// three launches:
// - preparation: the forward pass's, every record (64.5 KB) kept in device memory;
// - chains: states forward from the window's checkpoint, gradients of the state in reverse, 4
//   chains per head (direction, V half), two to a multiprocessor;
// - gradients: one block per multiprocessor over (chunk, head) pairs.
// What passes between them is 160.5 KB per pair, written once and read once or twice: about 5.4 GB
// for 8192 tokens and 64 heads with inputs and outputs, 1.3 ms of the device's bandwidth.
//
// Limits and what to try next. At 8192 tokens: preparation 0.37 ms, chains 0.49 ms (1.9 GB, bound
// by device memory), gradients 1.2 ms (2.5 GB, 1.7 instructions per cycle). Of the gradients' 30000
// cycles per chunk a third is the row phase, instructions; about a fifth waits for tiles, because
// all blocks ask for theirs at the same time and L2 hands out some 24 bytes per cycle to each.
// - q, k and f of the next chunk before its tiles: registers spill, 2.35 ms in all instead of 2.09.
// - eight warps with 240 registers instead of sixteen with 128: 2.24 ms in all instead of 2.07.
// - preparation of one window beside the gradients of another would fill both.

#include "model/ops/kda_backward_chain.cuh"
#include "model/ops/kda_backward_prepare.cuh"
#include "model/ops/kda_backward_rows.cuh"
#include "model/ops/kda_plan.cuh"

namespace lockstep::model::kda {

extern __shared__ __align__(1024) unsigned char backward_shared[];

/// gridDim.x = heads * step blocks; every head is prepared by `step` of them.
__global__ void __launch_bounds__(kWindowPrepareThreads, 1)
    backward_prepare_kernel(const __grid_constant__ BackwardParams p) {
  const int head = blockIdx.x % p.base.heads, step = gridDim.x / p.base.heads;
  const int first = p.first + blockIdx.x / p.base.heads, last = window_end(p);
  const int thread = threadIdx.x;
  if (thread == 0) {
    barrier_init(smem_address(backward_shared) + kRawBarrier, 32);
    fence_barrier_init();
  }
  __syncthreads();
  if (thread < 128) {
    if (thread < 32)
      publish_window(p, first, last, step, head, smem_address(backward_shared), thread);
  } else {
    prepare_items(p.base, first, last, step, head, backward_shared);
  }
}

/// gridDim.x = 4 * heads: reverse chains first, they take longer.
__global__ void __launch_bounds__(kWindowChainThreads, 2)
    backward_chain_kernel(const __grid_constant__ BackwardParams p) {
  const int chains = 2 * p.base.heads, block = blockIdx.x, thread = threadIdx.x;
  const bool reverse = block < chains;
  const int head = (reverse ? block : block - chains) >> 1, half = block & 1;
  const uint32_t shared = smem_address(backward_shared);
  if (thread == 0) window_chain_init(shared);
  __syncthreads();
  if (thread < 128) {
    more_registers<208>();
    if (reverse) {
      reverse_consume(p, head, half, backward_shared, thread);
    } else {
      replay_consume(p, head, half, backward_shared, thread);
    }
  } else {
    fewer_registers<40>();
    if (reverse) {
      if (thread == 128) reverse_fetch(p, head, shared);
      if (thread >= 256 - kRowThreads)
        fetch_rows<true>(p, p.dout, head, half, shared, thread - (256 - kRowThreads));
    } else {
      if (thread == 128) replay_fetch(p, head, shared);
      if (thread >= 256 - kRowThreads)
        fetch_rows<false>(p, p.base.v, head, half, shared, thread - (256 - kRowThreads));
    }
  }
}

/// gridDim.x = heads * step blocks.
__global__ void __launch_bounds__(kGradientThreads, 1)
    backward_gradient_kernel(const __grid_constant__ BackwardParams p) {
  const int head = blockIdx.x % p.base.heads, step = gridDim.x / p.base.heads;
  const int first = p.first + blockIdx.x / p.base.heads, last = window_end(p);
  const int thread = threadIdx.x;
  if (thread == 0) {
    barrier_init(smem_address(backward_shared) + kGradientBarrier, 1);
    fence_barrier_init();
  }
  __syncthreads();
  gradient_items(p, first, last, step, head, backward_shared);
}

/// Partials of all chunks to d(dt_bias) (blockIdx.y 0: eight groups of 128 threads, group i adds
/// chunks i, i + 8, ...) and d(A_log) (blockIdx.y 1: thread i adds chunks i, i + 1024, ...).
static __global__ void __launch_bounds__(1024)
    backward_sum_kernel(const __grid_constant__ BackwardParams p, float* da_log, float* ddt_bias) {
  __shared__ float part[1024];
  const int chunks = p.base.chunk_begin[p.base.documents], thread = threadIdx.x;
  const int head = blockIdx.x, channel = thread & (kDim - 1);
  const bool rates = blockIdx.y == 1;
  const int64_t stride = int64_t{p.base.row_heads} * kPartials;
  const float* from = p.partials + int64_t{head} * kPartials + (rates ? 0 : 1 + channel);
  const int first = rates ? thread : thread / kDim, step = rates ? 1024 : 8;
  float sum = 0.0f;
#pragma unroll 8
  for (int chunk = first; chunk < chunks; chunk += step) sum += from[chunk * stride];
  part[thread] = sum;
  __syncthreads();
  const int last = rates ? 1 : kDim;  // of the tree, which is the same for both
  for (int width = 512; width >= last; width /= 2) {
    if (thread < width) part[thread] += part[thread + width];
    __syncthreads();
  }
  if (thread < last) {
    if (rates) {
      da_log[head] = part[0];
    } else {
      ddt_bias[head * kDim + thread] = part[thread];
    }
  }
}

/// The initial state's gradient of documents without tokens is the final state's.
static __global__ void __launch_bounds__(256)
    backward_empty_kernel(const __grid_constant__ BackwardParams p) {
  const int64_t size = int64_t{p.base.row_heads} * kDim * kDim / 4;
  for (int64_t d = blockIdx.y; d < p.base.documents; d += gridDim.y) {
    if (p.base.cu_seqlens[d] != p.base.cu_seqlens[d + 1]) continue;
    const float4* from = reinterpret_cast<const float4*>(p.dfinal);
    float4* to = reinterpret_cast<float4*>(p.dinitial) + d * size;
    for (int64_t i = blockIdx.x * 256 + threadIdx.x; i < size; i += gridDim.x * 256)
      to[i] = from == nullptr ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : from[d * size + i];
  }
}

}  // namespace lockstep::model::kda
