#pragma once

// The matrix products of a chunk's gradients. Four warpgroups: two for dq' and row, two for tail
// and col, each with half of the channels. The accumulators of wgmma (state terms) are those of the
// 16x8x16 product that adds the pairs, and dM, dG (or their transposes) are packed from
// accumulators straight into its left operands, so nothing but the results passes through shared
// memory.

#include "model/ops/kda_backward_operands.cuh"

namespace lockstep::model::kda {

/// A warp's part of sum over V of S dS for every key channel: 8 V rows.
LOCKSTEP_DEVICE void sum_state_products(unsigned char* base, int warp, int lane) {
  float sum[8] = {};
  const uint32_t piece = lane & 15;
  const uint32_t at = smem_address(base) + (warp >> 3) * kStateHalf + (piece >> 3) * kSlab;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t row = (warp & 7) * 8 + 2 * i + (lane >> 4);
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

/// dq' and row of 16 rows and 64 channels per warp.
LOCKSTEP_DEVICE void row_products(unsigned char* base, int warp, int half, int lane) {
  const uint32_t shared = smem_address(base);
  const uint64_t out = operand_k_major(shared + kTileOut);
  const uint64_t n = operand_k_major(shared + kTileN);
  const uint64_t grad = operand_k_major(shared + kTileGrad);
  uint32_t dm[16], dg[16];
  float q[32], row[32];
  wgmma_fence();
  multiply_tiles(q, out, n);
  multiply_tiles(row, grad, n);
  wgmma_commit();
  sum_state_products(base, half * 4 + warp, lane);
  wgmma_wait<0>();
  pin(q);
  pin(row);
  if (half == 0) {
    float* diagonal = reinterpret_cast<float*>(base + kDiagonalM);
    const int row0 = warp * 16 + (lane >> 2), col0 = 2 * (lane & 3);
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = row0 + 8 * (e >> 1);
        if (i == col0 + 8 * j + (e & 1)) diagonal[i] = q[4 * j + e] * kScale;
      }
  }
  pack_triangle<false>(dm, q, kScale, warp, lane);
  pack_triangle<false>(dg, row, -1.0f, warp, lane);
  const uint64_t state = operand_outer_major(shared + kTileState + half * kSlab, kSlab);
  wgmma_fence();
  multiply_state(q, out, state);
  multiply_state(row, grad, state);
  wgmma_commit();
  wgmma_wait<0>();
  pin(q);
  pin(row);
  gradient_barrier();  // S, dS, N and do have been read
  const float* const middle =
      reinterpret_cast<const float*>(base + kMiddle) + warp * kDim + half * 64 + 2 * (lane & 3);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 anchor = *reinterpret_cast<const float2*>(middle + 8 * j);
    const float start0 = exp2_approx(anchor.x), start1 = exp2_approx(anchor.y);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      q[4 * j + 2 * h] *= start0 * kScale;
      q[4 * j + 2 * h + 1] *= start1 * kScale;
      row[4 * j + 2 * h] *= -start0;
      row[4 * j + 2 * h + 1] *= -start1;
    }
  }
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    if (block > warp) continue;
    const uint32_t factors =
        shared + kPairFactors + pair_index(warp, block) * (kDim * 2) + half * 128;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t b[4];
      load_scaled(b, shared + kOperandColumn + half * kSlab, factors, block, i, lane);
      mma_bf16_at(q + 8 * i, dm + 4 * block, b[0], b[1]);
      mma_bf16_at(row + 8 * i, dg + 4 * block, b[0], b[1]);
      mma_bf16_at(q + 8 * i + 4, dm + 4 * block, b[2], b[3]);
      mma_bf16_at(row + 8 * i + 4, dg + 4 * block, b[2], b[3]);
    }
  }
  store_result(q, shared + kResultQ, warp, half, lane);
  store_result(row, shared + kResultRow, warp, half, lane);
}

/// tail and col of 16 rows and 64 channels per warp.
LOCKSTEP_DEVICE void column_products(unsigned char* base, int warp, int half, int lane) {
  const uint32_t shared = smem_address(base);
  const uint64_t out = operand_k_major(shared + kTileOut);
  const uint64_t n = operand_k_major(shared + kTileN);
  const uint64_t grad = operand_k_major(shared + kTileGrad);
  uint32_t dm[16], dg[16];  // transposed
  float col[32], tail[32];
  wgmma_fence();
  multiply_tiles(col, n, out);
  multiply_tiles(tail, n, grad);
  wgmma_commit();
  sum_state_products(base, 8 + half * 4 + warp, lane);
  wgmma_wait<0>();
  pin(col);
  pin(tail);
  pack_triangle<true>(dm, col, kScale, warp, lane);
  pack_triangle<true>(dg, tail, -1.0f, warp, lane);
  wgmma_fence();
  multiply_state(tail, n, operand_outer_major(shared + kTileStateGrad + half * kSlab, kSlab));
  wgmma_commit();
#pragma unroll
  for (int i = 0; i < 32; ++i) col[i] = 0.0f;
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    if (block < warp) continue;
    const uint32_t factors =
        shared + kPairFactors + pair_index(block, warp) * (kDim * 2) + half * 128;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t b[4];
      load_scaled(b, shared + kOperandK + half * kSlab, factors, block, i, lane);
      mma_bf16_at(col + 8 * i, dg + 4 * block, b[0], b[1]);
      mma_bf16_at(col + 8 * i + 4, dg + 4 * block, b[2], b[3]);
      load_scaled(b, shared + kOperandQ + half * kSlab, factors, block, i, lane);
      mma_bf16_at(col + 8 * i, dm + 4 * block, b[0], b[1]);
      mma_bf16_at(col + 8 * i + 4, dm + 4 * block, b[2], b[3]);
    }
  }
  wgmma_wait<0>();
  pin(tail);
  gradient_barrier();  // S, dS, N, do and the row operands have been read
  const float* const middle =
      reinterpret_cast<const float*>(base + kMiddle) + warp * kDim + half * 64 + 2 * (lane & 3);
  const float* const all =
      reinterpret_cast<const float*>(base + kBlockStart) + 4 * kDim + half * 64 + 2 * (lane & 3);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 anchor = *reinterpret_cast<const float2*>(middle + 8 * j);
    const float2 end = *reinterpret_cast<const float2*>(all + 8 * j);
    const float end0 = exp2_approx(end.x - anchor.x) * kScale;
    const float end1 = exp2_approx(end.y - anchor.y) * kScale;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      tail[4 * j + 2 * h] *= end0;
      tail[4 * j + 2 * h + 1] *= end1;
    }
  }
  store_result(tail, shared + kResultTail, warp, half, lane);
  if (half == 0) {
    const int channel = warp * 32 + lane;
    const float* sums = reinterpret_cast<const float*>(base + kStateSums) + channel;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kGradientWarps; ++w) sum += sums[w * kDim];
    const float end = reinterpret_cast<const float*>(base + kBlockStart)[4 * kDim + channel];
    reinterpret_cast<float*>(base + kStateTerm)[channel] = exp2_approx(end) * (kScale * sum);
  }
  store_result(col, shared + kResultCol, warp, half, lane);
}

/// Ends with the results in shared memory, visible to the block.
LOCKSTEP_DEVICE void gradient_products(unsigned char* base) {
  const GradientThread me;
  const int half = (me.warp >> 2) & 1, warp = me.warp & 3;
  if (me.warp < 8) {
    row_products(base, warp, half, me.lane);
  } else {
    column_products(base, warp, half, me.lane);
  }
  gradient_barrier();
}

}  // namespace lockstep::model::kda
