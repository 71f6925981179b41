#pragma once

// Gradients of a chunk and head from q, k, f, do and what the chains left: S, dS, N, dv.
// A group of 256 threads walks over the chunks of one head. Here: loads, decayed operands, and the
// matrix products; what follows them row by row is in kda_backward_rows.cuh.
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
// A warpgroup owns half of the channels. The accumulators of wgmma (state terms) are those of the
// 16x8x16 product that adds the pairs, and dM, dG are packed from accumulators straight into its
// left operands, so nothing but the results passes through shared memory.

#include "model/ops/kda_backward_tiles.cuh"
#include "model/ops/kda_forward_prepare.cuh"

namespace lockstep::model::kda {

constexpr int kGradientThreads = 128 + kPrepareThreads;  // GroupThread counts from 128

// Shared memory: the preparation group's, where kDecayedK, kValue and kScores have other uses, and
// more behind it.
constexpr int kTileN = kDecayedK;
constexpr int kTileOut = kValue;           // do
constexpr int kStateSums = kScores;        // [8 warps][128] fp32: parts of rowsum(S dS)
constexpr int kTailSums = kScores + 4096;  // [8 warps][128] fp32: sums of k tail
constexpr int kPairFactors = kFactors;     // [10 pairs][128] bf16: 2^(B_I - B_J)
constexpr int kTileGrad = kPrepareBytes;
constexpr int kTileState = kTileGrad + kTile;
constexpr int kTileStateGrad = kTileState + kStateBytes;
constexpr int kMiddle = kTileStateGrad + kStateBytes;  // [4][128] fp32: B_I
constexpr int kDecaySums = kMiddle + 4 * kDim * 4;     // [8 warps][128] fp32: sums of db
constexpr int kStateTerm = kDecaySums + 8 * kDim * 4;  // [128] fp32: s exp(b_C) rowsum(S dS)
constexpr int kDiagonalM = kStateTerm + kDim * 4;      // [64] fp32: diagonal of s do N^T
constexpr int kRateSums = kDiagonalM + kChunk * 4;     // [8] fp32
constexpr int kGradientBarrier = kRateSums + 32;
constexpr int kGradientBytes = (kGradientBarrier + 8 + 1023) / 1024 * 1024;
static_assert(kGradientBytes <= 227 * 1024, "shared memory of one block");
// Results, fp32 [64][128] (result_offset), over tiles that are dead by then.
constexpr int kResultQ = kTileState;        // dq' exp2(B - b)
constexpr int kResultRow = kTileStateGrad;  // row exp2(B - b)
constexpr int kResultTail = kTileN;         // tail exp2(b - B); over N and do
constexpr int kResultCol = kRowK;           // col exp2(b - B); over both row operands

LOCKSTEP_DEVICE uint32_t result_offset(uint32_t row, uint32_t channel) {
  return row * 512 + ((((channel >> 3) ^ row) & 15) << 5) + (channel & 7) * 4;
}

/// One thread of the group: S, dS, N and dv of a chunk.
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

/// do of a chunk into shared memory, zero rows behind its end.
LOCKSTEP_DEVICE void load_out_gradient(
    uint32_t shared, const BackwardParams& p, const ChunkInfo& info, int head, int thread) {
  const uint32_t row_bytes = p.base.row_heads * (kDim * 2);
  const uint32_t piece = thread & 15, first_row = thread >> 4;
  const char* from =
      reinterpret_cast<const char*>(p.dout) + chunk_origin(p.base, info, head) + piece * 16;
  const uint32_t to = shared + kTileOut + (piece >> 3) * kSlab + slab_offset(first_row, piece & 7);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t row = first_row + 16 * i;
    const bool valid = static_cast<int>(row) < info.length;
    copy16(to + i * 2048, from + (valid ? row * row_bytes : 0u), valid);
  }
  copy_commit();
}

/// Two threads per channel: one writes P_I and B_I, one the factors of pairs.
LOCKSTEP_DEVICE void find_middles(unsigned char* base, int thread) {
  const int channel = thread & (kDim - 1);
  const float* totals = reinterpret_cast<const float*>(base + kTotals) + channel;
  float sum[5], middle[4];
  sum[0] = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float first = totals[2 * i * kDim], second = totals[(2 * i + 1) * kDim];
    middle[i] = sum[i] + first;
    sum[i + 1] = sum[i] + (first + second);
  }
  if (thread < kDim) {
    float* prefix = reinterpret_cast<float*>(base + kPrefix) + channel;
    float* anchors = reinterpret_cast<float*>(base + kMiddle) + channel;
#pragma unroll
    for (int i = 0; i < 5; ++i) prefix[i * kDim] = sum[i];
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
  const float4* prefix = reinterpret_cast<const float4*>(base + kPrefix) + lane;
  const float4* middles = reinterpret_cast<const float4*>(base + kMiddle) + lane;
  const float4* totals = reinterpret_cast<const float4*>(base + kTotals) + lane;
  const float4 now = prefix[(warp >> 1) * 32], middle = middles[(warp >> 1) * 32];
  float4 half = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (warp & 1) half = totals[(warp - 1) * 32];
  offset[0] = now.x - middle.x + half.x;
  offset[1] = now.y - middle.y + half.y;
  offset[2] = now.z - middle.z + half.z;
  offset[3] = now.w - middle.w + half.w;
}

/// Decayed operands of this thread's eight rows.
LOCKSTEP_DEVICE void write_gradient_operands(
    const RawRows& raw, const float (&b)[8][4], unsigned char* base, int warp, int lane) {
  float offset[4];
  decay_offsets(offset, base, warp, lane);
  const uint32_t at0 = smem_address(base) + (lane >> 4) * kSlab + warp * 1024 + (lane & 15) * 8;
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    const uint32_t at = (at0 ^ (r << 4)) + r * 128;
    float k[4], q[4], row_k[4], row_q[4], col_k[4];
    unpack4(k, raw.k[r]);
    unpack4(q, raw.q[r]);
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
    store_shared(at + kRowK, rows_k.x, rows_k.y);
    store_shared(at + kRowQ, rows_q.x, rows_q.y);
    store_shared(at + kColumns, cols_k.x, cols_k.y);
  }
}

/// A warp's part of sum over V of S dS for every key channel: 16 V rows.
LOCKSTEP_DEVICE void sum_state_products(unsigned char* base, int warp, int lane) {
  float sum[8] = {};
  const uint32_t piece = lane & 15;
  const uint32_t at = smem_address(base) + (warp >> 2) * kStateHalf + (piece >> 3) * kSlab;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t row = (warp & 3) * 16 + 2 * i + (lane >> 4);
    const uint4 s = load_shared16(at + kTileState + slab_offset(row, piece & 7));
    const uint4 d = load_shared16(at + kTileStateGrad + slab_offset(row, piece & 7));
    const uint32_t a[4] = {s.x, s.y, s.z, s.w}, b[4] = {d.x, d.y, d.z, d.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      sum[2 * e] = fmaf(low_bf16(a[e]), low_bf16(b[e]), sum[2 * e]);
      sum[2 * e + 1] = fmaf(high_bf16(a[e]), high_bf16(b[e]), sum[2 * e + 1]);
    }
  }
#pragma unroll
  for (int e = 0; e < 8; ++e) sum[e] += __shfl_xor_sync(0xffffffffu, sum[e], 16);
  if (lane < 16) {
    float4* to = reinterpret_cast<float4*>(base + kStateSums + (warp * kDim + piece * 8) * 4);
    to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
  }
}

/// a b^T of two 64 x 128 tiles (contraction over V).
LOCKSTEP_DEVICE void multiply_tiles(float (&d)[32], uint64_t a, uint64_t b) {
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const int step = (k >> 2) * (kSlab >> 4) + (k & 3) * 2;
    wgmma_64_shared_k(d, a + step, b + step, k > 0);
  }
}
/// A 64 x 128 tile times 64 key channels of a transposed state.
LOCKSTEP_DEVICE void multiply_state(float (&d)[32], uint64_t a, uint64_t state) {
#pragma unroll
  for (int k = 0; k < 8; ++k)
    wgmma_64_shared(d,
                    a + (k >> 2) * (kSlab >> 4) + (k & 3) * 2,
                    state + (k >> 2) * (kStateHalf >> 4) + (k & 3) * 128,
                    k > 0);
}

/// Accumulators of a 64 x 64 product times `factor` to left operands, zeros selected outside the
/// strict lower (or, kUpper, upper) triangle.
template <bool kUpper>
LOCKSTEP_DEVICE void pack_triangle(
    uint32_t (&packed)[16], const float (&d)[32], float factor, int warp, int lane) {
  const int row0 = warp * 16 + (lane >> 2), col0 = 2 * (lane & 3);
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row0 + 8 * h, col = col0 + 8 * j;
      const bool keep0 = kUpper ? col > row : col < row;
      const bool keep1 = kUpper ? col + 1 > row : col + 1 < row;
      const float a = keep0 ? d[4 * j + 2 * h] : 0.0f, b = keep1 ? d[4 * j + 2 * h + 1] : 0.0f;
      packed[2 * j + h] = pack_bf16(a * factor, b * factor);
    }
}

/// Adds kCount products with one 16 x 64 block of decayed rows, scaled by the pair's powers of two.
LOCKSTEP_DEVICE void load_scaled(
    uint32_t (&b)[4], uint32_t tile, uint32_t factors, int block, int pieces, int lane) {
  load_matrix4_transposed(b,
                          tile + slab_offset(16 * block + (lane & 15), 2 * pieces + (lane >> 4)));
  uint32_t low, high;  // of channels 16 pieces + lane / 4 and eight more, in both halves
  asm volatile("{\n.reg .b16 x;\nld.shared.b16 x, [%1];\nmov.b32 %0, {x, x};\n}"
               : "=r"(low)
               : "r"(factors + (16 * pieces + (lane >> 2)) * 2)
               : "memory");
  asm volatile("{\n.reg .b16 x;\nld.shared.b16 x, [%1];\nmov.b32 %0, {x, x};\n}"
               : "=r"(high)
               : "r"(factors + (16 * pieces + 8 + (lane >> 2)) * 2)
               : "memory");
  b[0] = multiply_bf16(b[0], low);
  b[1] = multiply_bf16(b[1], low);
  b[2] = multiply_bf16(b[2], high);
  b[3] = multiply_bf16(b[3], high);
}

LOCKSTEP_DEVICE void store_result(const float (&d)[32], uint32_t to, int warp, int half, int lane) {
  const uint32_t row = warp * 16 + (lane >> 2);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const uint32_t channel = half * 64 + 8 * j + 2 * (lane & 3);
    store_shared(
        to + result_offset(row, channel), __float_as_uint(d[4 * j]), __float_as_uint(d[4 * j + 1]));
    store_shared(to + result_offset(row + 8, channel),
                 __float_as_uint(d[4 * j + 2]),
                 __float_as_uint(d[4 * j + 3]));
  }
}

/// All matrix products of a chunk. Ends with the results in shared memory, visible to the group.
LOCKSTEP_DEVICE void gradient_products(unsigned char* base) {
  const GroupThread me;
  const uint32_t shared = smem_address(base);
  const int half = me.warp >> 2, warp = me.warp & 3, lane = me.lane;
  const uint64_t out = operand_k_major(shared + kTileOut);
  const uint64_t n = operand_k_major(shared + kTileN);
  const uint64_t y = operand_k_major(shared + kTileGrad);
  uint32_t dm[16], dg[16], dm_t[16], dg_t[16];
  {
    float first[32], second[32];
    wgmma_fence();
    multiply_tiles(first, out, n);
    multiply_tiles(second, y, n);
    wgmma_commit();
    sum_state_products(base, me.warp, lane);
    wgmma_wait<0>();
    pin(first);
    pin(second);
    if (half == 0) {
      float* diagonal = reinterpret_cast<float*>(base + kDiagonalM);
      const int row0 = warp * 16 + (lane >> 2), col0 = 2 * (lane & 3);
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = row0 + 8 * (e >> 1), col = col0 + 8 * j + (e & 1);
          if (row == col) diagonal[row] = first[4 * j + e] * kScale;
        }
    }
    pack_triangle<false>(dm, first, kScale, warp, lane);
    pack_triangle<false>(dg, second, -1.0f, warp, lane);
    wgmma_fence();
    multiply_tiles(first, n, out);
    multiply_tiles(second, n, y);
    wgmma_commit();
    wgmma_wait<0>();
    pin(first);
    pin(second);
    pack_triangle<true>(dm_t, first, kScale, warp, lane);
    pack_triangle<true>(dg_t, second, -1.0f, warp, lane);
  }
  const float* const middle =
      reinterpret_cast<const float*>(base + kMiddle) + warp * kDim + half * 64 + 2 * (lane & 3);
  {
    float q[32], row[32], tail[32];
    const uint64_t state = operand_outer_major(shared + kTileState + half * kSlab, kSlab);
    const uint64_t grad = operand_outer_major(shared + kTileStateGrad + half * kSlab, kSlab);
    wgmma_fence();
    multiply_state(q, out, state);
    multiply_state(row, y, state);
    multiply_state(tail, n, grad);
    wgmma_commit();
    wgmma_wait<0>();
    pin(q);
    pin(row);
    pin(tail);
    named_barrier(kGroupBarrier, kPrepareThreads);  // S, dS, N and do have been read
    const float* const all = reinterpret_cast<const float*>(base + kPrefix) + 4 * kDim;
    if (me.thread < kDim) {
      const float* sums = reinterpret_cast<const float*>(base + kStateSums) + me.thread;
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < 8; ++w) sum += sums[w * kDim];
      reinterpret_cast<float*>(base + kStateTerm)[me.thread] =
          exp2_approx(all[me.thread]) * (kScale * sum);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 anchor = *reinterpret_cast<const float2*>(middle + 8 * j);
      const float2 end = *reinterpret_cast<const float2*>(all + half * 64 + 2 * (lane & 3) + 8 * j);
      const float start0 = exp2_approx(anchor.x), start1 = exp2_approx(anchor.y);
      const float end0 = exp2_approx(end.x - anchor.x) * kScale;
      const float end1 = exp2_approx(end.y - anchor.y) * kScale;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        q[4 * j + 2 * h] *= start0 * kScale;
        q[4 * j + 2 * h + 1] *= start1 * kScale;
        row[4 * j + 2 * h] *= -start0;
        row[4 * j + 2 * h + 1] *= -start1;
        tail[4 * j + 2 * h] *= end0;
        tail[4 * j + 2 * h + 1] *= end1;
      }
    }
    store_result(tail, shared + kResultTail, warp, half, lane);
    const uint32_t keys = shared + kColumns + half * kSlab;
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      if (block > warp) continue;
      const uint32_t factors =
          shared + kPairFactors + pair_index(warp, block) * (kDim * 2) + half * 128;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t b[4];
        load_scaled(b, keys, factors, block, i, lane);
        mma_bf16_at(q + 8 * i, dm + 4 * block, b[0], b[1]);
        mma_bf16_at(row + 8 * i, dg + 4 * block, b[0], b[1]);
        mma_bf16_at(q + 8 * i + 4, dm + 4 * block, b[2], b[3]);
        mma_bf16_at(row + 8 * i + 4, dg + 4 * block, b[2], b[3]);
      }
    }
    store_result(q, shared + kResultQ, warp, half, lane);
    store_result(row, shared + kResultRow, warp, half, lane);
  }
  {
    float col[32] = {};
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      if (block < warp) continue;
      const uint32_t factors =
          shared + kPairFactors + pair_index(block, warp) * (kDim * 2) + half * 128;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t b[4];
        load_scaled(b, shared + kRowK + half * kSlab, factors, block, i, lane);
        mma_bf16_at(col + 8 * i, dg_t + 4 * block, b[0], b[1]);
        mma_bf16_at(col + 8 * i + 4, dg_t + 4 * block, b[2], b[3]);
        load_scaled(b, shared + kRowQ + half * kSlab, factors, block, i, lane);
        mma_bf16_at(col + 8 * i, dm_t + 4 * block, b[0], b[1]);
        mma_bf16_at(col + 8 * i + 4, dm_t + 4 * block, b[2], b[3]);
      }
    }
    named_barrier(kGroupBarrier, kPrepareThreads);  // the row operands have been read
    store_result(col, shared + kResultCol, warp, half, lane);
  }
  named_barrier(kGroupBarrier, kPrepareThreads);
}

}  // namespace lockstep::model::kda
