#pragma once

// Preparation of one (chunk, head) by a group of 256 threads: everything that does not depend on the
// state. Reads q, k, v, f, beta; writes one tile record. Groups are independent of each other, so any
// number of them may share a block (each with its own named barrier and shared memory).
//
// Thread layout: warp w owns rows 8w..8w+7, lane l owns channels 4l..4l+3. A row then lives in one
// warp (l2norm is a butterfly) and the cumulative sum runs inside a thread, except for one exchange
// of 8-row totals.

#include "model/ops/kda_forward_tiles.cuh"

namespace lockstep::model::kda {

using namespace hopper;

constexpr int kPrepareThreads = 256;

// Shared memory of a group. The Gram operands die after the Gram products; W, U, M and the small
// matrices of the inverse then take their place.
constexpr int kRowK = 0;                      // k exp(b - start of sub-chunk); later W
constexpr int kRowQ = kRowK + kTile;          // s q exp(b - start of sub-chunk); later U
constexpr int kColumns = kRowQ + kTile;       // ten 16 x 128 blocks, see column_block
constexpr int kDecayedK = kColumns + 10 * 4096;  // K~
constexpr int kValue = kDecayedK + kTile;     // v
constexpr int kTotals = kValue + kTile;       // [8 warps][128] fp32: decay over the warp's 8 rows
constexpr int kBeta = kTotals + 8 * kDim * 4;    // [64] fp32
constexpr int kNorms = kBeta + kChunk * 4;       // [8 warps][16] fp32: 1/norm of k rows, then q rows
constexpr int kPrepareBytes = (kNorms + 8 * 16 * 4 + 1023) / 1024 * 1024;
// Inside kColumns, after the Gram products:
constexpr int kLower = kColumns;              // L, fp16, slab (blocks below the diagonal)
constexpr int kScores = kLower + kSlab;       // M, bf16, slab
constexpr int kSolve = kScores + kSlab;       // P, bf16, slab
constexpr int kDiagonal = kSolve + kSlab;     // diagonal blocks of L, fp32
constexpr int kDiagonalRow = 80;              // bytes: 16 floats and padding
constexpr int kDiagonalBlock = 16 * kDiagonalRow + 64;
constexpr int kInverse = kDiagonal + (4 * kDiagonalBlock + 127) / 128 * 128;  // their inverses, fp16
constexpr int kInverseRow = 48;               // bytes: 16 fp16 and padding
constexpr int kInverseBlock = 16 * kInverseRow;
static_assert(kInverse + 4 * kInverseBlock <= kDecayedK, "small matrices outgrow the Gram operands");

/// Block of column operands for row block I and column block J <= I: rows j of J hold
/// k_j exp(start of I - b_j). Anchored at the row block's start, so the product with the row operand
/// needs no further factor.
LOCKSTEP_DEVICE int column_block(int row_block, int column_block_index) {
  return kColumns + (row_block * (row_block + 1) / 2 + column_block_index) * 4096;
}

/// One step of a butterfly over 2 * kHalf values: lanes split the values between them.
template <int kHalf>
LOCKSTEP_DEVICE void butterfly_step(float (&value)[16], int lane) {
  constexpr int kMask = 2 * kHalf;
  const bool upper = (lane & kMask) != 0;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float keep = upper ? value[i + kHalf] : value[i];
    const float give = upper ? value[i] : value[i + kHalf];
    value[i] = keep + __shfl_xor_sync(0xffffffffu, give, kMask);
  }
}
/// Sums 16 values over a warp; lane l gets the total of value l / 2.
LOCKSTEP_DEVICE float butterfly_sum16(float (&value)[16], int lane) {
  butterfly_step<8>(value, lane);
  butterfly_step<4>(value, lane);
  butterfly_step<2>(value, lane);
  butterfly_step<1>(value, lane);
  return value[0] + __shfl_xor_sync(0xffffffffu, value[0], 1);
}

LOCKSTEP_DEVICE float square_sum4(uint2 packed) {
  const float a = low_bf16(packed.x), b = high_bf16(packed.x);
  const float c = low_bf16(packed.y), d = high_bf16(packed.y);
  return fmaf(a, a, fmaf(b, b, fmaf(c, c, d * d)));
}
/// Scales four bf16 values and rounds them to bf16 again.
LOCKSTEP_DEVICE uint2 scale4(uint2 packed, float factor) {
  return {pack_bf16(low_bf16(packed.x) * factor, high_bf16(packed.x) * factor),
          pack_bf16(low_bf16(packed.y) * factor, high_bf16(packed.y) * factor)};
}
LOCKSTEP_DEVICE void unpack4(float (&value)[4], uint2 packed) {
  value[0] = low_bf16(packed.x);
  value[1] = high_bf16(packed.x);
  value[2] = low_bf16(packed.y);
  value[3] = high_bf16(packed.y);
}
LOCKSTEP_DEVICE uint2 pack4(float a, float b, float c, float d) {
  return {pack_bf16(a, b), pack_bf16(c, d)};
}

/// Gram products of one (row block, column block) pair: 16 x 16 entries of k k^T and q k^T.
LOCKSTEP_DEVICE void gram_pair(
    float (&kk)[2][4], float (&qk)[2][4], uint32_t shared, int row_block, int col_block, int lane) {
  const uint32_t row = row_block * kSub + (lane & 15);
  const uint32_t column = (lane & 7) + ((lane >> 4) << 3);
  const uint32_t rows_at = shared + slab_offset(row, lane >> 4);
  const uint32_t columns_at =
      shared + column_block(row_block, col_block) + slab_offset(column, (lane >> 3) & 1);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) kk[n][e] = qk[n][e] = 0.0f;
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    // The swizzle is an exclusive or on address bits 4-6, so it composes with the step.
    const uint32_t slab = step >> 2, piece = (step & 3) * 2;
    const uint32_t at = (rows_at ^ (piece << 4)) + slab * kSlab;
    uint32_t a_k[4], a_q[4], b[4];
    load_matrix4(a_k, at + kRowK);
    load_matrix4(a_q, at + kRowQ);
    load_matrix4(b, (columns_at ^ (piece << 4)) + slab * 2048);
    mma_bf16(kk[0], a_k, b[0], b[1]);
    mma_bf16(qk[0], a_q, b[0], b[1]);
    mma_bf16(kk[1], a_k, b[2], b[3]);
    mma_bf16(qk[1], a_q, b[2], b[3]);
  }
}

/// Writes L and M entries of one pair. Above the diagonal zeros are selected, whatever was computed.
LOCKSTEP_DEVICE void store_pair(const float (&kk)[2][4],
                                const float (&qk)[2][4],
                                uint32_t shared,
                                const float* beta,
                                float* diagonal,
                                int row_block,
                                int col_block,
                                int lane) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = g + 8 * half, j = 8 * n + 2 * t;
      const int row = row_block * kSub + i;
      const uint32_t at = slab_offset(row, col_block * 2 + n) + 4 * t;
      float l0 = kk[n][2 * half] * beta[row], l1 = kk[n][2 * half + 1] * beta[row];
      float m0 = qk[n][2 * half], m1 = qk[n][2 * half + 1];
      if (row_block == col_block) {
        l0 = i > j ? l0 : 0.0f;
        l1 = i > j + 1 ? l1 : 0.0f;
        m0 = i >= j ? m0 : 0.0f;
        m1 = i >= j + 1 ? m1 : 0.0f;
        float* at_diagonal = diagonal + row_block * (kDiagonalBlock / 4) + i * (kDiagonalRow / 4) + j;
        *reinterpret_cast<float2*>(at_diagonal) = make_float2(l0, l1);
      } else {
        store_shared(shared + kLower + at, pack_fp16(l0, l1));
      }
      store_shared(shared + kScores + at, pack_bf16(m0, m1));
    }
}

/// Inverse of a 16 x 16 unit lower block, one column per thread, by substitution in fp32. Writes the
/// fp16 inverse and the diagonal block of P = inverse * diag(beta).
LOCKSTEP_DEVICE void invert_diagonal(unsigned char* base, const float* beta, int thread) {
  const int block = thread >> 4, column = thread & 15;
  const float* lower = reinterpret_cast<const float*>(base + kDiagonal + block * kDiagonalBlock);
  float x[16];
  const float column_beta = beta[block * kSub + column];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float sum0 = i == column ? 1.0f : 0.0f, sum1 = 0.0f;
#pragma unroll
    for (int j4 = 0; j4 < i; j4 += 4) {
      const float4 row =
          *reinterpret_cast<const float4*>(lower + i * (kDiagonalRow / 4) + j4);
      sum0 = fmaf(-row.x, x[j4], sum0);
      if (j4 + 1 < i) sum1 = fmaf(-row.y, x[j4 + 1], sum1);
      if (j4 + 2 < i) sum0 = fmaf(-row.z, x[j4 + 2], sum0);
      if (j4 + 3 < i) sum1 = fmaf(-row.w, x[j4 + 3], sum1);
    }
    x[i] = sum0 + sum1;
  }
  const uint32_t piece = block * 2 + (column >> 3);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    *reinterpret_cast<__half*>(base + kInverse + block * kInverseBlock + i * kInverseRow +
                               column * 2) = __float2half_rn(x[i]);
    *reinterpret_cast<__nv_bfloat16*>(base + kSolve + slab_offset(block * kSub + i, piece) +
                                      (column & 7) * 2) = __float2bfloat16_rn(x[i] * column_beta);
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
  const uint32_t n = in + (matrix >> 1) * 8, half = matrix & 1;
#pragma unroll
  for (int distance = 1; distance < 4; ++distance) {
    const int row_block = block + distance;
    if (row_block < 4) {
      float sum[2][4] = {};
#pragma unroll
      for (int k = 0; k < distance; ++k) {
        uint32_t b[4];
        load_matrix4(
            b, shared + kLower + slab_offset(row_block * kSub + n, (block + k) * 2 + half));
        mma_fp16(sum[0], z[k], b[0], b[1]);
        mma_fp16(sum[1], z[k], b[2], b[3]);
      }
      const uint32_t a[4] = {pack_fp16(sum[0][0], sum[0][1]),
                             pack_fp16(sum[0][2], sum[0][3]),
                             pack_fp16(sum[1][0], sum[1][1]),
                             pack_fp16(sum[1][2], sum[1][3])};
      uint32_t b[4];
      load_matrix4(
          b, shared + kInverse + row_block * kInverseBlock + n * kInverseRow + half * 16);
      float t[2][4] = {};
      mma_fp16(t[0], a, b[0], b[1]);
      mma_fp16(t[1], a, b[2], b[3]);
      z[distance][0] = pack_fp16(-t[0][0], -t[0][1]);
      z[distance][1] = pack_fp16(-t[0][2], -t[0][3]);
      z[distance][2] = pack_fp16(-t[1][0], -t[1][1]);
      z[distance][3] = pack_fp16(-t[1][2], -t[1][3]);
      const uint32_t row = row_block * kSub + 8 * (matrix >> 1) + in;
      store_matrix4_transposed(shared + kSolve + slab_offset(row, block * 2 + (matrix & 1)),
                               pack_bf16(-t[0][0] * beta_low, -t[0][1] * beta_low),
                               pack_bf16(-t[0][2] * beta_high, -t[0][3] * beta_high),
                               pack_bf16(-t[1][0] * beta_low, -t[1][1] * beta_low),
                               pack_bf16(-t[1][2] * beta_high, -t[1][3] * beta_high));
    }
  }
}

/// One warpgroup: P times a 64 x 128 tile, rounded to bf16 into another tile.
LOCKSTEP_DEVICE void multiply_by_solve(uint32_t shared, int source, int destination, int thread) {
  float d[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) d[i] = 0.0f;
  const uint64_t a = operand_k_major(shared + kSolve);
  const uint64_t b = operand_outer_major(shared + source, kSlab);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < 4; ++step) wgmma_128_shared(d, a + step * 2, b + step * 128);
  wgmma_commit();
  wgmma_wait<0>();
  pin(d);
  const int warp = thread >> 5, lane = thread & 31;
  const uint32_t row = warp * 16 + (lane & 15);
#pragma unroll
  for (int j = 0; j < 16; j += 2) {
    const uint32_t piece = (j & 7) + (lane >> 4);
    store_matrix4(shared + destination + (j >> 3) * kSlab + slab_offset(row, piece),
                  pack_bf16(d[4 * j], d[4 * j + 1]),
                  pack_bf16(d[4 * j + 2], d[4 * j + 3]),
                  pack_bf16(d[4 * j + 4], d[4 * j + 5]),
                  pack_bf16(d[4 * j + 6], d[4 * j + 7]));
  }
}

/// The whole preparation of (chunk, head). `before_writing()` runs in thread 0 before anything is
/// written to the record or to shared memory that an earlier bulk store of this group may still read.
/// On return thread 0 has issued and committed the bulk stores; the caller waits for them.
template <class BeforeWriting>
LOCKSTEP_DEVICE void prepare_chunk(const Params& p,
                                   int64_t chunk,
                                   int head,
                                   unsigned char* base,
                                   int barrier,
                                   int thread,
                                   BeforeWriting before_writing) {
  const uint32_t shared = smem_address(base);
  const int warp = thread >> 5, lane = thread & 31;
  const ChunkInfo info = p.chunks[chunk];
  const int64_t row_stride = int64_t{p.heads} * kDim;
  const int64_t origin = info.first_token * row_stride + int64_t{head} * kDim;
  float* beta = reinterpret_cast<float*>(base + kBeta);
  unsigned char* const out = record(p, chunk, head);

  // Loads: gate inputs and k, q into registers, v straight to shared memory.
  uint2 raw_f[8], raw_k[8], raw_q[8];
  {
    const int64_t mine = origin + int64_t{8 * warp} * row_stride + 4 * lane;
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      const bool valid = 8 * warp + r < info.length;
      const int64_t at = mine + r * row_stride;
      raw_k[r] = valid ? __ldg(reinterpret_cast<const uint2*>(p.k + at)) : uint2{0, 0};
      raw_q[r] = valid ? __ldg(reinterpret_cast<const uint2*>(p.q + at)) : uint2{0, 0};
      raw_f[r] = valid ? __ldg(reinterpret_cast<const uint2*>(p.f + at)) : uint2{0, 0};
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = (thread >> 4) + 16 * i, piece = thread & 15;
    const bool valid = row < info.length;
    copy16(shared + kValue + (piece >> 3) * kSlab + slab_offset(row, piece & 7),
           p.v + origin + (valid ? row : 0) * row_stride + piece * 8,
           valid);
  }
  if (thread < kChunk) {
    float value = 0.0f;
    if (thread < info.length) {
      const uint32_t bits = __ldg(p.beta_logit + (info.first_token + thread) * p.heads + head);
      value = 1.0f / (1.0f + __expf(-__uint_as_float(bits << 16)));
    }
    beta[thread] = value;
  }
  const float slope = -__expf(__ldg(p.a_log + head)) * 1.4426950408889634f;
  const float4 bias = __ldg(reinterpret_cast<const float4*>(p.dt_bias + head * kDim + 4 * lane));

  // l2norm: fp32 sums, then bf16.
  {
    float sums[16];
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      sums[r] = square_sum4(raw_k[r]);
      sums[8 + r] = square_sum4(raw_q[r]);
    }
    const float total = butterfly_sum16(sums, lane);
    float* norms = reinterpret_cast<float*>(base + kNorms) + warp * 16;
    __syncwarp();
    if ((lane & 1) == 0) norms[lane >> 1] = rsqrtf(total + 1e-6f);
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      raw_k[r] = scale4(raw_k[r], norms[r]);
      raw_q[r] = scale4(raw_q[r], norms[8 + r]);
    }
  }

  // Gate and its running sum over this thread's eight rows, in base 2.
  float b[8][4];
  {
    const float offset[4] = {bias.x * slope, bias.y * slope, bias.z * slope, bias.w * slope};
    float sum[4] = {};
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      const float scale = 8 * warp + r < info.length ? p.decay_scale : 0.0f;
      float f[4];
      unpack4(f, raw_f[r]);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float e = exp2_approx(fmaf(f[c], slope, offset[c]));
        sum[c] = fmaf(scale, reciprocal_approx(1.0f + e), sum[c]);
        b[r][c] = sum[c];
      }
    }
    *reinterpret_cast<float4*>(base + kTotals + (warp * kDim + 4 * lane) * 4) =
        make_float4(sum[0], sum[1], sum[2], sum[3]);
  }
  if (thread == 0) before_writing();
  named_barrier(barrier, kPrepareThreads);

  // Anchors of this thread's sub-chunk, from the totals of all warps.
  const int block = warp >> 1;
  float inside[4] = {}, block_total[4], start_factor[4], end_factor[4], far_factor[3][4];
  {
    float before[4] = {}, after[4] = {}, next[2][4] = {};
#pragma unroll
    for (int c = 0; c < 4; ++c) block_total[c] = 0.0f;
#pragma unroll
    for (int w = 0; w < 8; ++w) {
      const float4 total =
          *reinterpret_cast<const float4*>(base + kTotals + (w * kDim + 4 * lane) * 4);
      const float value[4] = {total.x, total.y, total.z, total.w};
      const int distance = (w >> 1) - block;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (distance < 0) before[c] += value[c];
        if (distance == 0) block_total[c] += value[c];
        if (distance == 0 && w < warp) inside[c] = value[c];
        if (distance > 0) after[c] += value[c];
        if (distance == 1) next[0][c] += value[c];
        if (distance == 1 || distance == 2) next[1][c] += value[c];
      }
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      start_factor[c] = exp2_approx(before[c]);
      end_factor[c] = exp2_approx(after[c]);
      far_factor[0][c] = exp2_approx(-block_total[c]);
      far_factor[1][c] = exp2_approx(next[0][c]);
      far_factor[2][c] = exp2_approx(next[1][c]);
    }
    if (warp == 0) {
      *reinterpret_cast<float4*>(out + kTileDecay + 16 * lane) =
          make_float4(exp2_approx(block_total[0] + after[0]),
                      exp2_approx(block_total[1] + after[1]),
                      exp2_approx(block_total[2] + after[2]),
                      exp2_approx(block_total[3] + after[3]));
    }
  }

  // Decayed operands.
  {
    const uint32_t slab = lane >> 4, byte = (lane & 15) * 8;  // swizzled below: row & 7 is r
    const uint32_t shared_at = shared + slab * kSlab + warp * 1024 + byte;
    const uint32_t columns_at = shared + slab * 2048 + (warp & 1) * 1024 + byte;
    const uint64_t out_at = reinterpret_cast<uint64_t>(out) + slab * kSlab + warp * 1024 + byte;
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      const uint32_t at = (shared_at ^ (r << 4)) + r * 128;
      unsigned char* const out_row =
          reinterpret_cast<unsigned char*>(out_at ^ static_cast<uint64_t>(r << 4)) + r * 128;
      float k[4], q[4], row_k[4], row_q[4], col_k[4];
      unpack4(k, raw_k[r]);
      unpack4(q, raw_q[r]);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float sum = inside[c] + b[r][c];
        const float from_start = exp2_approx(sum);
        row_k[c] = k[c] * from_start;
        row_q[c] = q[c] * (from_start * 0.08838834764831845f);
        col_k[c] = k[c] * exp2_approx(block_total[c] - sum);
      }
      uint2 packed = pack4(row_k[0], row_k[1], row_k[2], row_k[3]);
      store_shared(at + kRowK, packed.x, packed.y);
      packed = pack4(row_q[0], row_q[1], row_q[2], row_q[3]);
      store_shared(at + kRowQ, packed.x, packed.y);
      packed = pack4(row_k[0] * start_factor[0],
                     row_k[1] * start_factor[1],
                     row_k[2] * start_factor[2],
                     row_k[3] * start_factor[3]);
      store_shared(at + kDecayedK, packed.x, packed.y);
      *reinterpret_cast<uint2*>(out_row + kTileQ) = pack4(row_q[0] * start_factor[0],
                                                           row_q[1] * start_factor[1],
                                                           row_q[2] * start_factor[2],
                                                           row_q[3] * start_factor[3]);
      *reinterpret_cast<uint2*>(out_row + kTileK) = pack4(col_k[0] * end_factor[0],
                                                           col_k[1] * end_factor[1],
                                                           col_k[2] * end_factor[2],
                                                           col_k[3] * end_factor[3]);
      const uint32_t in_block = (columns_at ^ (r << 4)) + r * 128;
#pragma unroll
      for (int distance = 0; distance < 4; ++distance) {
        if (block + distance < 4) {
          if (distance == 1) {
            packed = pack4(col_k[0], col_k[1], col_k[2], col_k[3]);
          } else {
            const int which = distance == 0 ? 0 : distance - 1;
            packed = pack4(col_k[0] * far_factor[which][0],
                           col_k[1] * far_factor[which][1],
                           col_k[2] * far_factor[which][2],
                           col_k[3] * far_factor[which][3]);
          }
          store_shared(in_block + column_block(block + distance, block), packed.x, packed.y);
        }
      }
    }
  }
  copy_wait_all();
  fence_async_shared();  // K~ and v feed wgmma
  named_barrier(barrier, kPrepareThreads);

  // Gram products; results wait in registers until every warp is done with the operands.
  {
    float kk[2][2][4], qk[2][2][4];
    const int row_block0 = warp == 0 ? 0 : warp < 3 ? 1 : warp < 6 ? 2 : 3;
    const int col_block0 = warp - row_block0 * (row_block0 + 1) / 2;
    gram_pair(kk[0], qk[0], shared, row_block0, col_block0, lane);
    if (warp < 2) gram_pair(kk[1], qk[1], shared, 3, 2 + warp, lane);
    named_barrier(barrier, kPrepareThreads);
    float* diagonal = reinterpret_cast<float*>(base + kDiagonal);
    store_pair(kk[0], qk[0], shared, beta, diagonal, row_block0, col_block0, lane);
    if (warp < 2) store_pair(kk[1], qk[1], shared, beta, diagonal, 3, 2 + warp, lane);
  }
  // Blocks of P and M above the diagonal: 6 blocks of 16 rows x two 16-byte pieces.
  if (thread < 192) {
    const int which = thread >> 5, row = (thread & 31) >> 1, half = thread & 1;
    const int row_block = which < 3 ? 0 : which < 5 ? 1 : 2;
    const int col_block = which < 3 ? which + 1 : which < 5 ? which - 1 : 3;
    const uint32_t at = slab_offset(row_block * kSub + row, col_block * 2 + half);
    store_shared_zero16(shared + kSolve + at);
    store_shared_zero16(shared + kScores + at);
  }
  named_barrier(barrier, kPrepareThreads);

  // Inverse: diagonal blocks, then the blocks below them; warps 4-7 wait at the next full barrier.
  if (warp < 4) {
    if (warp < 2) invert_diagonal(base, beta, thread);
    named_barrier(barrier + 1, 128);
    solve_block_column(shared, beta, warp, lane);
  }
  fence_async_shared();
  named_barrier(barrier, kPrepareThreads);

  if (warp < 4) {
    multiply_by_solve(shared, kDecayedK, kRowK, thread);
  } else {
    multiply_by_solve(shared, kValue, kRowQ, thread - 128);
  }
  fence_async_shared();
  __threadfence();
  named_barrier(barrier, kPrepareThreads);
  if (thread == 0) {
    bulk_store(out + kTileW, shared + kRowK, kTile);
    bulk_store(out + kTileU, shared + kRowQ, kTile);
    bulk_store(out + kTileM, shared + kScores, kSlab);
    bulk_commit();
  }
}

}  // namespace lockstep::model::kda
