#pragma once

// Gradients of a chunk and head from q, k, v, f, do and what the chains left: S, dS, N, dv. A block
// of 512 threads walks over the chunks of one head. Here: shared memory, loads and decayed
// operands; products are in kda_backward_products.cuh, what follows row by row in
// kda_backward_rows.cuh.
//
// Anchors. Row block I (16 rows) is anchored at its middle, B_I: b after its eighth row, rounded to
// an integer. Rows carry exp2(b_i - B_I), columns exp2(B_J - b_j), both within 2^+-58, and a pair
// I > J still lacks 2^(B_I - B_J) <= 1, a power of two:
//   dq'_i = exp2(b_i - B_I) [2^(B_I) s (do S^T)_i
//                            + sum_{J<=I} dM_IJ (k_j exp2(B_J - b_j)) 2^(B_I - B_J)],
// row likewise with -dv S^T and dG, and for key block J, with rows i of blocks I >= J,
//   col_j = exp2(B_J - b_j) sum [dG_IJ^T (k_i exp2(b_i - B_I)) + dM_IJ^T (q_i exp2(b_i - B_I))]
//           2^(B_I - B_J),
//   tail_j = exp2(B_J - b_j) exp2(b_C - B_J) s (N dS^T)_j,
// where dM = s stril(do N^T) and dG = -stril(dv N^T). The diagonal of do N^T only adds to dq and
// dk.
//
// Thread layout outside the products: warp w owns rows 4w..4w+3, lane l channels 4l..4l+3.

#include "model/ops/kda_backward_tiles.cuh"
#include "model/ops/kda_forward_prepare.cuh"

namespace lockstep::model::kda {

constexpr int kGradientThreads = 512;
constexpr int kGradientWarps = kGradientThreads / 32;
constexpr int kRows = kChunk / kGradientWarps;  // of a warp

// Shared memory. Tiles are 64 x 128 bf16, kRowsBytes is 16 warps x 128 channels fp32.
constexpr int kRowsBytes = kGradientWarps * kDim * 4;
constexpr int kOperandK = 0;                       // k exp2(b - B)
constexpr int kOperandQ = kOperandK + kTile;       // q exp2(b - B)
constexpr int kOperandColumn = kOperandQ + kTile;  // k exp2(B - b)
constexpr int kTileN = kOperandColumn + kTile;     // N
constexpr int kTileOut = kTileN + kTile;           // do
constexpr int kTileGate = kTileOut + kTile;        // f, rows of 256 bytes
constexpr int kTileGrad = kTileGate + kTile;       // dv
constexpr int kTileState = kTileGrad + kTile;
constexpr int kTileStateGrad = kTileState + kStateBytes;
constexpr int kRowTotals = kTileStateGrad + kStateBytes;  // decay over each warp's rows
constexpr int kStateSums = kRowTotals + kRowsBytes;       // parts of rowsum(S dS)
constexpr int kTailSums = kStateSums + kRowsBytes;        // sums of k tail
constexpr int kDecaySums = kTailSums + kRowsBytes;        // sums of the rest of db
constexpr int kBlockStart = kDecaySums + kRowsBytes;      // [5][128] fp32: b before a row block
constexpr int kMiddle = kBlockStart + 5 * kDim * 4;       // [4][128] fp32: B_I
constexpr int kPairFactors = kMiddle + 4 * kDim * 4;      // [10 pairs][128] bf16: 2^(B_I - B_J)
constexpr int kStateTerm = kPairFactors + 10 * kDim * 2;  // [128] fp32: s exp(b_C) rowsum(S dS)
constexpr int kHeadBias = kStateTerm + kDim * 4;          // [128] fp32: dt_bias
constexpr int kRowNorms = kHeadBias + kDim * 4;           // [16 warps][4 k, 4 q] fp32: 1/norm
constexpr int kDiagonalM = kRowNorms + kChunk * 8;        // [64] fp32: diagonal of s do N^T
constexpr int kRateSums = kDiagonalM + kChunk * 4;        // [16] fp32
constexpr int kGradientBarrier = kRateSums + 64;
constexpr int kGradientBytes = (kGradientBarrier + 8 + 1023) / 1024 * 1024;
static_assert(kGradientBytes <= 227 * 1024, "shared memory of one block");
// Results, fp32 [64][128] (result_offset), over tiles that are dead by then.
constexpr int kResultQ = kTileState;        // dq' exp2(B - b)
constexpr int kResultRow = kTileStateGrad;  // row exp2(B - b)
constexpr int kResultTail = kTileN;         // tail exp2(b - B); over N and do
constexpr int kResultCol = kOperandK;       // col exp2(b - B); over both row operands

constexpr int kGradientGroup = 1;  // named barrier of the block, reached from different places
LOCKSTEP_DEVICE void gradient_barrier() { named_barrier(kGradientGroup, kGradientThreads); }

/// The calling thread, read anew in each phase (see GroupThread).
struct GradientThread {
  int thread, warp, lane;
  LOCKSTEP_DEVICE GradientThread() {
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    warp = thread >> 5;
    lane = thread & 31;
  }
};

/// Constants of a head.
struct GateScale {
  float decay;     // lower bound * log2(e)
  float gradient;  // lower bound * exp(A_log)
  float slope;     // -exp(A_log) * log2(e)
};

LOCKSTEP_DEVICE void load4(float (&value)[4], const unsigned char* from) {
  const float4 v = *reinterpret_cast<const float4*>(from);
  value[0] = v.x;
  value[1] = v.y;
  value[2] = v.z;
  value[3] = v.w;
}
LOCKSTEP_DEVICE void store4(unsigned char* to, const float (&value)[4]) {
  *reinterpret_cast<float4*>(to) = make_float4(value[0], value[1], value[2], value[3]);
}
/// Sums 8 values over a warp; lane l gets the total of value (l & 15) / 2.
LOCKSTEP_DEVICE float butterfly_sum8(const float (&from)[8], int lane) {
  float value[16];
#pragma unroll
  for (int i = 0; i < 8; ++i) value[i] = from[i];
  butterfly_step<4>(value, lane);
  butterfly_step<2>(value, lane);
  butterfly_step<1>(value, lane);
  const float pair = value[0] + __shfl_xor_sync(0xffffffffu, value[0], 1);
  return pair + __shfl_xor_sync(0xffffffffu, pair, 16);
}

LOCKSTEP_DEVICE uint32_t result_offset(uint32_t row, uint32_t channel) {
  return row * 512 + ((((channel >> 3) ^ row) & 15) << 5) + (channel & 7) * 4;
}

/// One thread: S, dS, N and dv of a chunk.
LOCKSTEP_DEVICE void load_chain_tiles(const BackwardParams& p,
                                      int chunk,
                                      int head,
                                      uint32_t shared) {
  const int64_t pair = pair_at(p, chunk, head);
  const uint32_t bar = shared + kGradientBarrier;
  barrier_expect_bytes(bar, 2 * kStateBytes + 2 * kTile);
  bulk_load(shared + kTileN, p.n + pair * kTile, kTile, bar);
  bulk_load(shared + kTileGrad, p.dv_tiles + pair * kTile, kTile, bar);
  bulk_load(shared + kTileState, p.state + pair * kStateBytes, kStateBytes, bar);
  bulk_load(shared + kTileStateGrad, p.state_grad + pair * kStateBytes, kStateBytes, bar);
}

/// f and do of a chunk into shared memory, zero rows behind its end; f is one group of copies, do
/// the next.
LOCKSTEP_DEVICE void load_gradient_rows(
    uint32_t shared, const BackwardParams& p, const ChunkInfo& info, int head, int thread) {
  const uint32_t row_bytes = p.base.row_heads * (kDim * 2);
  const uint32_t piece = thread & 15, first_row = thread >> 4;
  const int64_t at = chunk_origin(p.base, info, head) + piece * 16;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t row = first_row + 32 * i;
    const bool valid = static_cast<int>(row) < info.length;
    copy16(shared + kTileGate + row * 256 + piece * 16,
           reinterpret_cast<const char*>(p.base.f) + at + (valid ? row * row_bytes : 0u),
           valid);
  }
  copy_commit();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t row = first_row + 32 * i;
    const bool valid = static_cast<int>(row) < info.length;
    copy16(shared + kTileOut + (piece >> 3) * kSlab + slab_offset(row, piece & 7),
           reinterpret_cast<const char*>(p.dout) + at + (valid ? row * row_bytes : 0u),
           valid);
  }
  copy_commit();
}

/// Starts all that the next chunk reads on its way to L2, spread over the time of this one.
LOCKSTEP_DEVICE void prefetch_chunk(
    const BackwardParams& p, int chunk, const ChunkInfo& info, int head, int thread) {
  const auto tile = [](const unsigned char* from, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes));
  };
  if (thread == 0) {
    const int64_t pair = pair_at(p, chunk, head);
    tile(p.n + pair * kTile, kTile);
    tile(p.dv_tiles + pair * kTile, kTile);
    tile(p.state + pair * kStateBytes, kStateBytes);
    tile(p.state_grad + pair * kStateBytes, kStateBytes);
  }
  const int row = (thread >> 1) & 63;
  if (row >= info.length) return;
  const int64_t at = chunk_origin(p.base, info, head) +
                     row * (int64_t{p.base.row_heads} * (kDim * 2)) + (thread & 1) * 128;
  const auto line = [at](const uint16_t* from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(reinterpret_cast<const char*>(from) + at));
  };
  const int which = thread >> 7;
  line(which == 0 ? p.base.q : which == 1 ? p.base.k : which == 2 ? p.base.f : p.dout);
  if (which == 3) line(p.base.v);
}

/// Raw q and k of a thread's rows, zeros behind the chunk's end.
struct GradientRows {
  uint2 k[kRows], q[kRows];
  LOCKSTEP_DEVICE void load(
      const BackwardParams& p, const ChunkInfo& info, int head, int warp, int lane) {
    const int64_t row_bytes = int64_t{p.base.row_heads} * (kDim * 2);
    const int64_t at = chunk_origin(p.base, info, head) + kRows * warp * row_bytes + 8 * lane;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      k[r] = q[r] = uint2{0, 0};
      if (kRows * warp + r < info.length) {
        k[r] = __ldg(reinterpret_cast<const uint2*>(reinterpret_cast<const char*>(p.base.k) + at +
                                                    r * row_bytes));
        q[r] = __ldg(reinterpret_cast<const uint2*>(reinterpret_cast<const char*>(p.base.q) + at +
                                                    r * row_bytes));
      }
    }
  }
  /// l2norm: fp32 sums, then bf16. Leaves 1/norm in shared memory.
  LOCKSTEP_DEVICE void normalize(unsigned char* base, int warp, int lane) {
    float sums[8];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      sums[r] = square_sum4(k[r]);
      sums[kRows + r] = square_sum4(q[r]);
    }
    const float total = butterfly_sum8(sums, lane);
    float* norms = reinterpret_cast<float*>(base + kRowNorms) + warp * 8;
    if (lane < 16 && (lane & 1) == 0) norms[lane >> 1] = rsqrtf(total + 1e-6f);
    __syncwarp();
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      k[r] = scale4(k[r], norms[r]);
      q[r] = scale4(q[r], norms[kRows + r]);
    }
  }
};
static_assert(kRows == 4, "butterfly_sum8 adds four rows of two");

/// One row's gate: e = exp(-x), so that sigma = 1 / (1 + e); finite however far it saturates.
LOCKSTEP_DEVICE float gate_exponential(float f, float slope, float bias) {
  return exp2_approx(fminf(fmaf(f, slope, bias * slope), 126.0f));
}

/// Gate and its running sum over a thread's rows, in base 2; the totals go to kRowTotals.
LOCKSTEP_DEVICE void sum_gate(
    float (&b)[kRows][4], GateScale scale, int length, unsigned char* base, int warp, int lane) {
  float bias[4], sum[4] = {};
  load4(bias, base + kHeadBias + lane * 16);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = kRows * warp + r;
    const float decay = row < length ? scale.decay : 0.0f;
    float f[4];
    unpack4(f, *reinterpret_cast<const uint2*>(base + kTileGate + row * 256 + lane * 8));
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float e = gate_exponential(f[c], scale.slope, bias[c]);
      sum[c] = fmaf(decay, reciprocal_approx(1.0f + e), sum[c]);
      b[r][c] = sum[c];
    }
  }
  store4(base + kRowTotals + (warp * kDim + 4 * lane) * 4, sum);
}

/// Two threads per channel: one writes b before each row block and B_I, one the factors of pairs.
LOCKSTEP_DEVICE void find_middles(unsigned char* base, int thread) {
  if (thread >= 2 * kDim) return;
  const int channel = thread & (kDim - 1);
  const float* totals = reinterpret_cast<const float*>(base + kRowTotals) + channel;
  float sum[5], middle[4];
  sum[0] = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float first = totals[4 * i * kDim] + totals[(4 * i + 1) * kDim];
    middle[i] = sum[i] + first;
    sum[i + 1] = sum[i] + (first + (totals[(4 * i + 2) * kDim] + totals[(4 * i + 3) * kDim]));
  }
  if (thread < kDim) {
    float* start = reinterpret_cast<float*>(base + kBlockStart) + channel;
    float* anchors = reinterpret_cast<float*>(base + kMiddle) + channel;
#pragma unroll
    for (int i = 0; i < 5; ++i) start[i * kDim] = sum[i];
#pragma unroll
    for (int i = 0; i < 4; ++i) anchors[i * kDim] = (middle[i] + kRound) - kRound;
  } else {
    uint16_t* factor = reinterpret_cast<uint16_t*>(base + kPairFactors) + channel;
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j <= i; ++j)
        factor[(i * (i + 1) / 2 + j) * kDim] = static_cast<uint16_t>(
            (max(__float_as_int(middle[i] + kRound) - __float_as_int(middle[j] + kRound), -127) +
             127)
            << 7);
  }
}

/// b_i - B_I of a thread's four channels less the sum over its own rows. Both users add that sum
/// the same way, so their factors are the same bits.
LOCKSTEP_DEVICE void decay_offsets(float (&offset)[4],
                                   const unsigned char* base,
                                   int warp,
                                   int lane) {
  const int block = warp >> 2;
  float middle[4];
  load4(offset, base + kBlockStart + (block * kDim + 4 * lane) * 4);
  load4(middle, base + kMiddle + (block * kDim + 4 * lane) * 4);
#pragma unroll
  for (int c = 0; c < 4; ++c) offset[c] -= middle[c];
  for (int w = warp & ~3; w < warp; ++w) {
    float total[4];
    load4(total, base + kRowTotals + (w * kDim + 4 * lane) * 4);
#pragma unroll
    for (int c = 0; c < 4; ++c) offset[c] += total[c];
  }
}

/// Decayed operands of a thread's rows.
LOCKSTEP_DEVICE void write_gradient_operands(
    const GradientRows& rows, const float (&b)[kRows][4], unsigned char* base, int warp, int lane) {
  float offset[4];
  decay_offsets(offset, base, warp, lane);
  const uint32_t to = smem_address(base) + (lane >> 4) * kSlab;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const uint32_t at = to + slab_offset(kRows * warp + r, (lane & 15) >> 1) + (lane & 1) * 8;
    float k[4], q[4], row_k[4], row_q[4], col_k[4];
    unpack4(k, rows.k[r]);
    unpack4(q, rows.q[r]);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float from_middle = exp2_approx(offset[c] + b[r][c]);
      row_k[c] = k[c] * from_middle;
      row_q[c] = q[c] * from_middle;
      col_k[c] = k[c] * exp2_approx(-(offset[c] + b[r][c]));
    }
    const uint2 rows_k = pack4(row_k[0], row_k[1], row_k[2], row_k[3]);
    const uint2 rows_q = pack4(row_q[0], row_q[1], row_q[2], row_q[3]);
    const uint2 cols_k = pack4(col_k[0], col_k[1], col_k[2], col_k[3]);
    store_shared(at + kOperandK, rows_k.x, rows_k.y);
    store_shared(at + kOperandQ, rows_q.x, rows_q.y);
    store_shared(at + kOperandColumn, cols_k.x, cols_k.y);
  }
}

}  // namespace lockstep::model::kda
