#pragma once

// A preparation group: its threads, named barriers and shared memory.

#include "model/ops/kda_forward_tiles.cuh"

namespace lockstep::model::kda {

using namespace hopper;

constexpr int kPrepareThreads = 256;
constexpr int kPublishThreads = kPrepareThreads + 32;  // with the warp that publishes

// Named barriers of a block.
constexpr int kGroupBarrier = 1;    // the group
constexpr int kWrittenBarrier = 2;  // group -> publisher: P and M lie in shared memory
constexpr int kGoBarrier =
    3;  // both: P and M have left it and the next slot is free; rows are read

// Shared memory of a group. The column operands die after the Gram products; the small matrices of
// the inverse then take their place.
constexpr int kRowK = 0;                        // k exp2(b - A_I)
constexpr int kRowQ = kRowK + kTile;            // q exp2(b - A_I)
constexpr int kColumns = kRowQ + kTile;         // k exp2(A_{J+1} - b); later L and P
constexpr int kLower = kColumns;                // L, fp16, slab (blocks below the diagonal)
constexpr int kSolve = kLower + kSlab;          // P, bf16, slab
constexpr int kRaw = kColumns + kTile;          // f, k, q of the next item, rows of 256 bytes
constexpr int kRawTensor = kChunk * kDim * 2;   // bytes of one of them
constexpr int kScores = kRaw + 3 * kRawTensor;  // M, bf16, slab
constexpr int kTotals = kScores + kSlab;        // [8 warps][128] fp32: decay over the warp's 8 rows
constexpr int kDiagonal = kTotals;              // later: diagonal blocks of L, fp32 [4][16][16]
constexpr int kPrefix = kTotals + 8 * kDim * 4;     // [5][128] fp32: P_I
constexpr int kFactors = kPrefix + 5 * kDim * 4;    // [10 pairs][128] bf16: 2^(A_I - A_{J+1})
constexpr int kInverse = kFactors + 10 * kDim * 2;  // inverses of the diagonal blocks, fp16
constexpr int kInverseRow = 48;                     // bytes: 16 fp16 and padding
constexpr int kInverseBlock = 16 * kInverseRow;
constexpr int kBeta = kInverse + 4 * kInverseBlock;  // [64] fp32
constexpr int kNorms = kBeta + kChunk * 4;  // [8 warps][16] fp32: 1/norm of k rows, then q rows
constexpr int kBias =
    kNorms + 8 * 16 * 4;  // [128] fp32 dt_bias of the head, then -exp(A_log) log2(e)
constexpr int kRawBarrier = kBias + kDim * 4 + 16;  // completed by the copies of the next item
constexpr int kPrepareBytes = (kRawBarrier + 8 + 1023) / 1024 * 1024;

LOCKSTEP_DEVICE int pair_index(int row_block, int col_block) {
  return row_block * (row_block + 1) / 2 + col_block;
}

/// The calling thread's place in its group, read anew each time: kept across phases, everything
/// that the compiler derives from it would be spilled, and with this much shared memory a spill
/// comes back from L2.
struct GroupThread {
  int thread, warp, lane;
  LOCKSTEP_DEVICE GroupThread() {
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    thread -= 128;
    warp = thread >> 5;
    lane = thread & 31;
  }
};

}  // namespace lockstep::model::kda
