#pragma once

// The matrix part of a preparation: Gram products, M, and the inverse (I + L)^-1.

#include "model/ops/kda_forward_group.cuh"

namespace lockstep::model::kda {

/// Operands of one k step of kPairs Gram products with the same rows.
template <int kPairs>
struct GramStep {
  uint32_t k[4], q[4], column[kPairs][4], low[kPairs], high[kPairs];
};

/// Gram products of a row block with kPairs column blocks at once, 16 x 16 entries of k k^T and q
/// k^T each. The column operand gets the pair's power of two on the way. Operands of the next step
/// are loaded before the products of this one: the compiler keeps the order, and one warp alone on
/// its scheduler has nothing else to hide the latency of shared memory with.
template <int kPairs>
LOCKSTEP_DEVICE void gram_pairs(float (&kk)[kPairs][2][4],
                                float (&qk)[kPairs][2][4],
                                uint32_t shared,
                                int row_block,
                                const int (&col_block)[kPairs],
                                int lane) {
  const uint32_t rows_at = shared + slab_offset(row_block * kSub + (lane & 15), lane >> 4);
  uint32_t columns_at[kPairs], factors_at[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const uint32_t column = col_block[i] * kSub + (lane & 7) + ((lane >> 4) << 3);
    columns_at[i] = shared + kColumns + slab_offset(column, (lane >> 3) & 1);
    factors_at[i] =
        shared + kFactors + pair_index(row_block, col_block[i]) * (kDim * 2) + (lane & 3) * 4;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) kk[i][n][e] = qk[i][n][e] = 0.0f;
  }
  const auto load = [&](GramStep<kPairs>& s, int step) {
    // The swizzle is an exclusive or on address bits 4-6, so it composes with the step.
    const uint32_t slab = (step >> 2) * kSlab, piece = (step & 3) << 5;
    load_matrix4(s.k, (rows_at ^ piece) + slab + kRowK);
    load_matrix4(s.q, (rows_at ^ piece) + slab + kRowQ);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      load_matrix4(s.column[i], (columns_at[i] ^ piece) + slab);
      s.low[i] = load_shared4(factors_at[i] + step * 32);
      s.high[i] = load_shared4(factors_at[i] + step * 32 + 16);
    }
  };
  const auto multiply = [&](GramStep<kPairs>& s) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const uint32_t b[4] = {multiply_bf16(s.column[i][0], s.low[i]),
                             multiply_bf16(s.column[i][1], s.high[i]),
                             multiply_bf16(s.column[i][2], s.low[i]),
                             multiply_bf16(s.column[i][3], s.high[i])};
      mma_bf16(kk[i][0], s.k, b[0], b[1]);
      mma_bf16(qk[i][0], s.q, b[0], b[1]);
      mma_bf16(kk[i][1], s.k, b[2], b[3]);
      mma_bf16(qk[i][1], s.q, b[2], b[3]);
    }
  };
  GramStep<kPairs> even, odd;
  load(even, 0);
#pragma unroll
  for (int step = 0; step < 8; step += 2) {
    load(odd, step + 1);
    multiply(even);
    if (step < 6) load(even, step + 2);
    multiply(odd);
  }
}

/// Writes M of one pair, and L if the pair lies below the diagonal. In a diagonal pair zeros are
/// selected above the diagonal, whatever was computed there.
template <bool kOnDiagonal>
LOCKSTEP_DEVICE void store_pair(const float (&kk)[2][4],
                                const float (&qk)[2][4],
                                uint32_t shared,
                                const float* beta,
                                int row_block,
                                int col_block,
                                int lane) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = g + 8 * half, row = row_block * kSub + i;
    const float row_beta = beta[row];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int j = 8 * n + 2 * t;
      const uint32_t at = shared + slab_offset(row, col_block * 2 + n) + 4 * t;
      float m0 = qk[n][2 * half], m1 = qk[n][2 * half + 1];
      if constexpr (kOnDiagonal) {
        m0 = i >= j ? m0 : 0.0f;
        m1 = i >= j + 1 ? m1 : 0.0f;
      } else {
        store_shared(at + kLower,
                     pack_fp16(kk[n][2 * half] * row_beta, kk[n][2 * half + 1] * row_beta));
      }
      store_shared(at + kScores, pack_bf16(m0, m1));
    }
  }
}

/// One warp: inverse of the unit lower diagonal block I + L_II by substitution in fp32; lane l (and
/// l + 16 again) solves column l. x receives the column; the fp16 inverse goes to kInverse.
LOCKSTEP_DEVICE void invert_diagonal(float (&x)[16],
                                     const float (&kk)[2][4],
                                     unsigned char* base,
                                     const float* beta,
                                     int block,
                                     int lane) {
  float* lower = reinterpret_cast<float*>(base + kDiagonal) + block * 256;
  const int g = lane >> 2, t = lane & 3, column = lane & 15;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = g + 8 * half;
    const float row_beta = beta[block * kSub + i];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int j = 8 * n + 2 * t;
      *reinterpret_cast<float2*>(lower + i * 16 + j) =
          make_float2(i > j ? kk[n][2 * half] * row_beta : 0.0f,
                      i > j + 1 ? kk[n][2 * half + 1] * row_beta : 0.0f);
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float sum0 = i == column ? 1.0f : 0.0f, sum1 = 0.0f;
#pragma unroll
    for (int j = 0; j < i; j += 4) {
      const float4 row = *reinterpret_cast<const float4*>(lower + i * 16 + j);
      sum0 = fmaf(-row.x, x[j], sum0);
      if (j + 1 < i) sum1 = fmaf(-row.y, x[j + 1], sum1);
      if (j + 2 < i) sum0 = fmaf(-row.z, x[j + 2], sum0);
      if (j + 3 < i) sum1 = fmaf(-row.w, x[j + 3], sum1);
    }
    x[i] = sum0 + sum1;
  }
  // Stores last: between the rows they would hold back the loads of the following rows.
#pragma unroll
  for (int i = 0; i < 16; ++i)
    *reinterpret_cast<__half*>(base + kInverse + block * kInverseBlock + i * kInverseRow +
                               column * 2) = __float2half_rn(x[i]);
}

/// The diagonal block of P = T diag(beta), from the columns that invert_diagonal left in registers.
LOCKSTEP_DEVICE void store_diagonal_solve(
    const float (&x)[16], unsigned char* base, const float* beta, int block, int lane) {
  const int column = lane & 15;
  const float column_beta = beta[block * kSub + column];
  unsigned char* const solve = base + kSolve + (column & 7) * 2;
  if (lane < 16) {
#pragma unroll
    for (int i = 0; i < 16; ++i)
      *reinterpret_cast<__nv_bfloat16*>(solve +
                                        slab_offset(block * kSub + i, block * 2 + (column >> 3))) =
          __float2bfloat16_rn(x[i] * column_beta);
  }
}

/// Block column `block` of T = (I+L)^-1 below the diagonal, by one warp:
/// T_IJ = -D_I sum_{J<=K<I} L_IK T_KJ, computed transposed so that each result is at once the left
/// operand of the next product. Writes P = T diag(beta).
LOCKSTEP_DEVICE void solve_block_column(uint32_t shared, const float* beta, int block, int lane) {
  const int matrix = lane >> 3, in = lane & 7;
  const float beta_low = beta[block * kSub + (lane >> 2)];
  const float beta_high = beta[block * kSub + 8 + (lane >> 2)];
  uint32_t z[4][4];  // T_KJ^T as left operands, K - J = 0..3
  load_matrix4_transposed(z[0],
                          shared + kInverse + block * kInverseBlock +
                              (in + (matrix >> 1) * 8) * kInverseRow + (matrix & 1) * 16);
  // All operands first: nothing of the chain of products below is needed to load them. Warps whose
  // column is shorter compute along and do not store.
  const uint32_t n = in + (matrix >> 1) * 8, half = matrix & 1;
  uint32_t lower[6][4], inverse[3][4];
#pragma unroll
  for (int distance = 1; distance < 4; ++distance) {
    const int row_block = min(block + distance, 3);
#pragma unroll
    for (int k = 0; k < distance; ++k)
      load_matrix4(
          lower[distance * (distance - 1) / 2 + k],
          shared + kLower + slab_offset(row_block * kSub + n, min(block + k, 3) * 2 + half));
    load_matrix4(inverse[distance - 1],
                 shared + kInverse + row_block * kInverseBlock + n * kInverseRow + half * 16);
  }
#pragma unroll
  for (int distance = 1; distance < 4; ++distance) {
    float sum[2][4] = {};
#pragma unroll
    for (int k = 0; k < distance; ++k) {
      const uint32_t* b = lower[distance * (distance - 1) / 2 + k];
      mma_fp16(sum[0], z[k], b[0], b[1]);
      mma_fp16(sum[1], z[k], b[2], b[3]);
    }
    const uint32_t a[4] = {pack_fp16(sum[0][0], sum[0][1]),
                           pack_fp16(sum[0][2], sum[0][3]),
                           pack_fp16(sum[1][0], sum[1][1]),
                           pack_fp16(sum[1][2], sum[1][3])};
    const uint32_t* b = inverse[distance - 1];
    float t[2][4] = {};
    mma_fp16(t[0], a, b[0], b[1]);
    mma_fp16(t[1], a, b[2], b[3]);
    z[distance][0] = pack_fp16(-t[0][0], -t[0][1]);
    z[distance][1] = pack_fp16(-t[0][2], -t[0][3]);
    z[distance][2] = pack_fp16(-t[1][0], -t[1][1]);
    z[distance][3] = pack_fp16(-t[1][2], -t[1][3]);
    if (block + distance < 4) {
      const uint32_t row = (block + distance) * kSub + 8 * (matrix >> 1) + in;
      store_matrix4_transposed(shared + kSolve + slab_offset(row, block * 2 + (matrix & 1)),
                               pack_bf16(-t[0][0] * beta_low, -t[0][1] * beta_low),
                               pack_bf16(-t[0][2] * beta_high, -t[0][3] * beta_high),
                               pack_bf16(-t[1][0] * beta_low, -t[1][1] * beta_low),
                               pack_bf16(-t[1][2] * beta_high, -t[1][3] * beta_high));
    }
  }
}

/// Slab offset of the 16 bytes that this thread (of warps 0-5) zeroes above the block diagonal.
LOCKSTEP_DEVICE uint32_t upper_offset(int warp, int lane) {
  const int row_block = warp < 3 ? 0 : warp < 5 ? 1 : 2;
  const int col_block = warp < 3 ? warp + 1 : warp < 5 ? warp - 1 : 3;
  return slab_offset(row_block * kSub + (lane >> 1), col_block * 2 + (lane & 1));
}

}  // namespace lockstep::model::kda
