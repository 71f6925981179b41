#pragma once

// KDA forward for sm_90a: one cooperative launch, one block per multiprocessor. Why it looks like
// this:
//
// Work. Per chunk of 64 tokens and head there is a part that needs no state (gate, norms, Gram
// matrices, the inverse: "preparation") and a serial part (N = P (V - K~ S), O, S: "chain"). The
// chain is short but sequential; preparation is where the instructions are, so it must run on all
// multiprocessors, beside the chains.
//
// Chain. Columns of S (the V axis) never interact, so a head is cut into two V halves: 128 chains
// for 64 heads on 132 multiprocessors. A chain is one warpgroup working on S^T: accumulators of one
// wgmma are, register for register, the left operand of the next, so S, N and O never pass through
// shared memory between products; only K~, V, P, Q~, K-, M are fetched, each again as soon as it
// has been used.
//
// Between them. A tile record (64.5 KB) per (chunk, head), laid out as it will lie in shared
// memory, in a ring of a few slots per head that stays in L2: device memory sees only inputs and o.
// A publisher warp fetches raw rows, stores P and M and releases records, a fetching warp acquires
// them; a slot is written again after both halves have counted it. Two launches with a record per
// chunk took 0.65 / 2.5 / 10.1 ms at 8K / 32K / 128K tokens, bound by device memory; chains on 64
// multiprocessors and preparation on the other 68 took 0.95 / 3.7 / 14.8, bound by preparation.
//
// Block: 512 threads. Warpgroup 0: chain, 208 registers. Warpgroups 1, 2: preparation, 136
// registers. Warpgroup 3: three fetching warps and the publisher, 32 registers. Shared memory
// 227 KB, hence one preparation group per block and nearly no L1: a spilled register comes back
// from L2, and what crosses phases is read again instead (GroupThread). The compiler must report no
// C7510 / C7514 (serialised wgmma) and next to no spills; long straight code costs instruction
// fetches, so one copy serves all warps.
//
// Limits and what to try next. 64 heads: about 12000 cycles per chunk and group (floor 4000), by
// the clock of one warp: gate and norms 2000 to 3300, anchors 600, operands 3000, Gram products
// 1600 to 2000, inverse of the diagonal blocks 950, solve 970, barriers and small stores the rest.
// A chain waits 4500 cycles of these for K~.
// - W = P K~ and U = P V in the preparation instead of P in the chain, raw k and q in registers:
//   0.52 / 2.0 / 7.8 ms at 8K / 32K / 128K instead of 0.48 / 1.9 / 7.7. Gram products of two pairs
//   without operands loaded a step ahead: 3700 cycles instead of 2000.
// - raw rows by bulk copies of 256 bytes: 192 of them take 10000 cycles, issued by whichever warp.
// - two groups of four warps, each with its own chunk, so that phases overlap: now 60 KB apart from
//   the raw rows would do for a group.
// - one exponential less per element by writing exp2(A' - x) as a product with a reciprocal; part
//   of the exponentials as polynomials on the FMA pipe.

#include "model/ops/kda_forward_chain.cuh"
#include "model/ops/kda_forward_prepare.cuh"
#include "model/ops/kda_forward_tiles.cuh"
#include "model/ops/kda_plan.cuh"

namespace lockstep::model::kda {

constexpr int kForwardThreads = 512;  // chain | preparation, twice | copying and publishing warps
constexpr int kForwardBytes = kPrepareBytes + kChainBytes;
static_assert(kForwardBytes <= 227 * 1024, "shared memory of one block");

extern __shared__ __align__(1024) unsigned char dynamic_shared[];

/// One block per multiprocessor, all resident. Blocks below 2 * heads carry a chain (head, V half).
/// Every head is prepared by the same number of blocks, its chains' own among them.
__global__ void __launch_bounds__(kForwardThreads, 1) forward_kernel(Params p) {
  const int chunks = p.chunk_begin[p.documents];
  unsigned char* const chain_shared = dynamic_shared + kPrepareBytes;
  const int block = blockIdx.x, thread = threadIdx.x, role = thread >> 7;
  const bool has_chain = block < 2 * p.heads;
  const int head = has_chain ? block >> 1 : block % p.heads;
  const int half = block & 1;
  const int step = gridDim.x / p.heads;  // blocks that prepare one head
  const int first = has_chain ? half : block / p.heads;
  const int own_chunks = first < step ? chunks : 0;
  if (thread == 0) barrier_init(smem_address(dynamic_shared) + kRawBarrier, 32);
  if (thread == 0 && has_chain) chain_init(smem_address(chain_shared));
  if (thread == 0) fence_barrier_init();
  __syncthreads();
  if (role == 0) {
    more_registers<208>();
    if (has_chain) chain_consume(p, head, half, chain_shared, thread);
  } else if (role == 3) {
    fewer_registers<32>();
    if (thread == 384 && has_chain) chain_fetch_ahead(p, head, chunks, smem_address(chain_shared));
    if (thread == 448 && has_chain) chain_fetch(p, head, chunks, smem_address(chain_shared));
    if (thread >= 480 && has_chain)
      chain_fetch_value(p, head, half, chunks, smem_address(chain_shared), thread & 31);
    if (thread >= 416 && thread < 448)
      publish_items(p, first, own_chunks, step, head, smem_address(dynamic_shared), thread & 31);
  } else {
    more_registers<136>();
    prepare_items(p, first, own_chunks, step, head, dynamic_shared);
  }
}

}  // namespace lockstep::model::kda
