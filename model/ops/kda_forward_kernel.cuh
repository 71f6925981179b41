#pragma once

// KDA forward for sm_90a: one cooperative launch, one block per multiprocessor. Why it looks like
// this:
//
// Work. Per chunk of 64 tokens and head there is a part that needs no state (gate, norms, Gram
// matrices, the inverse, W and U: "preparation") and a serial part (N = U - W S, O, S: "chain").
// The chain is short but sequential; preparation is where the instructions are (about 15000 warp
// instructions and 300 special-function ones per warp and chunk), so it must run on all
// multiprocessors, beside the chains.
//
// Chain. Columns of S (the V axis) never interact, so a head is cut into two V halves: 128 chains
// for 64 heads on 132 multiprocessors. A chain is one warpgroup working on S^T: accumulators of one
// wgmma are, register for register, the left operand of the next, so S, N and O never pass through
// shared memory between products; only W, U, Q~, K-, M are fetched, each again as soon as it has
// been used.
//
// Between them. A tile record (72.5 KB) per (chunk, head), laid out as it will lie in shared
// memory, in a ring of a few slots per head that stays in L2: device memory sees only inputs and o.
// A publisher warp stores and releases records, a fetching warp acquires them; a slot is written
// again after both halves have counted it. The same kernels in two launches with a record per chunk
// took 0.65 / 2.5 / 10.1 ms at 8K / 32K / 128K tokens, bound by device memory; chains on 64
// multiprocessors and preparation on the other 68 took 0.95 / 3.7 / 14.8, bound by preparation.
//
// Block: 512 threads. Warpgroup 0: chain, 208 registers. Warpgroups 1, 2: preparation, 136
// registers. Warpgroup 3: two fetching warps and the publisher, 32 registers. Shared memory 219 KB,
// hence one preparation group per block and nearly no L1: a spilled register comes back from L2,
// and what crosses phases is read again instead (GroupThread). The compiler must report no C7510 /
// C7514 (serialised wgmma) and next to no spills; long straight code costs instruction fetches, so
// one copy serves all warps.
//
// Limits and what to try next (64 heads, 8K: about 13500 cycles per chunk and group, floor 4000):
// - phases of one group do not overlap: half of the time goes to the latency of Gram products,
// inverse
//   and solve (about 6500 cycles), half to gate, norms and operands. Two groups per block, or the
//   next chunk's gate under this chunk's inverse, needs 60-100 KB of shared memory that the chain's
//   tiles occupy; with k, q, f fetched by asynchronous copies and single-buffered W, U the overlap
//   was built and won nothing, because the group then waits for its own W and U to leave shared
//   memory.
// - handing tiles to the peer block of a cluster through distributed shared memory instead of L2
// (both
//   halves of a head need the same Q~, K-, W, M) would halve L2 reads.
// - one exponential less per element by writing exp2(A' - x) as a product with a reciprocal; part
// of
//   the exponentials as polynomials on the FMA pipe.

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
  if (thread == 0 && has_chain) chain_init(smem_address(chain_shared));
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
