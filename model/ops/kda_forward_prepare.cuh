#pragma once

// Preparation: everything of a (chunk, head) that does not depend on the state. A group of 256 threads
// walks over items; it reads q, k, v, f, beta and writes one tile record per item. Groups are
// independent of each other, so several share a block, each with its own named barriers and shared
// memory.
//
// Thread layout: warp w owns rows 8w..8w+7, lane l owns channels 4l..4l+3. A row then lives in one
// warp (l2norm is a butterfly) and the cumulative sum runs inside a thread, except for one exchange
// of 8-row totals.
//
// Anchors. b is the running sum of log2 decay in the chunk, P_I its value before 16-row block I, and
// A_I = P_I rounded to an integer. Rows of block I carry exp2(b_i - A_I), columns of block J carry
// exp2(A_{J+1} - b_j); a pair (I, J) still lacks 2^(A_I - A_{J+1}), and K~, Q~ lack 2^(A_I): powers of
// two, so every rescaled operand is the once-rounded bf16 operand with another exponent, and costs one
// packed product instead of two products and a rounding.

#include "model/ops/kda_forward_tiles.cuh"

namespace lockstep::model::kda {

using namespace hopper;

constexpr int kPrepareThreads = 256;

// Shared memory of a group. The Gram operands die after the Gram products; W, U, M and the matrices of
// the inverse then take their place.
constexpr int kRowK = 0;                      // k exp2(b - A_I); later W
constexpr int kRowQ = kRowK + kTile;          // s q exp2(b - A_I); later U
constexpr int kColumns = kRowQ + kTile;       // ten 16 x 128 blocks, see column_block
constexpr int kDecayedK = kColumns + 10 * 4096;  // K~
constexpr int kValue = kDecayedK + kTile;     // v
constexpr int kTotals = kValue + kTile;       // [8 warps][128] fp32: decay over the warp's 8 rows
constexpr int kDiagonal = kTotals;            // later: diagonal blocks of L, fp32 [4][16][16]
constexpr int kInverse = kTotals + 8 * kDim * 4;  // their inverses, fp16
constexpr int kInverseRow = 48;               // bytes: 16 fp16 and padding
constexpr int kInverseBlock = 16 * kInverseRow;
constexpr int kBeta = kInverse + 4 * kInverseBlock;  // [64] fp32
constexpr int kNorms = kBeta + kChunk * 4;    // [8 warps][16] fp32: 1/norm of k rows, then q rows
constexpr int kPrepareBytes = (kNorms + 8 * 16 * 4 + 1023) / 1024 * 1024;
// Inside kColumns, after the Gram products:
constexpr int kLower = kColumns;              // L, fp16, slab (blocks below the diagonal)
constexpr int kScores = kLower + kSlab;       // M, bf16, slab
constexpr int kSolve = kScores + kSlab;       // P, bf16, slab
constexpr int kGate = kSolve + kSlab;         // f of the next item, rows of 256 bytes
static_assert(kGate + kTile <= kDecayedK, "small matrices outgrow the Gram operands");

/// Block of column operands for row block I and column block J <= I: rows j of J hold
/// k_j exp2(A_I - b_j).
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
#pragma unroll 4  // all eight at once would hold too many operands
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
    *reinterpret_cast<__half*>(base + kInverse + block * kInverseBlock + i * kInverseRow +
                               column * 2) = __float2half_rn(x[i]);
  }
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
      *reinterpret_cast<__nv_bfloat16*>(
          solve + slab_offset(block * kSub + i, block * 2 + (column >> 3))) =
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
  const uint64_t a = operand_k_major(shared + kSolve);
  const int warp = thread >> 5, lane = thread & 31;
  const uint32_t at = shared + destination + slab_offset(warp * 16 + (lane & 15), lane >> 4);
  float d[32];
#pragma unroll 1  // the thread also holds its next item's rows: one accumulator of 32 has to do
  for (int half = 0; half < 2; ++half) {
    const uint64_t b = operand_outer_major(shared + source + half * kSlab, kSlab);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) wgmma_64_shared(d, a + step * 2, b + step * 128, step > 0);
    wgmma_commit();
    wgmma_wait<0>();
    pin(d);
#pragma unroll
    for (int j = 0; j < 8; j += 2)
      store_matrix4((at ^ (j << 4)) + half * kSlab,
                    pack_bf16(d[4 * j], d[4 * j + 1]),
                    pack_bf16(d[4 * j + 2], d[4 * j + 3]),
                    pack_bf16(d[4 * j + 4], d[4 * j + 5]),
                    pack_bf16(d[4 * j + 6], d[4 * j + 7]));
  }
}

/// What a thread fetches ahead for its next item.
struct RawRows {
  uint2 k[8], q[8];
  uint16_t beta_logit;
};

/// `zero` is 0 in a way the compiler cannot see: an address that looks uniform would make the values
/// uniform registers, which are waited for at once.
LOCKSTEP_DEVICE ChunkInfo load_chunk_info(const Params& p, int chunk, int zero) {
  const ChunkInfo* at = p.chunks + (chunk + zero);
  ChunkInfo info;
  info.first_token = __ldg(&at->first_token);
  info.length = __ldg(&at->length);
  info.document = 0;
  return info;
}

/// Byte offset of the chunk's first row of this head in q, k, v and f.
LOCKSTEP_DEVICE int64_t chunk_origin(const Params& p, const ChunkInfo& info, int head) {
  return (info.first_token * p.heads + head) * (kDim * 2);
}

LOCKSTEP_DEVICE void load_rows(
    RawRows& raw, const Params& p, const ChunkInfo& info, int head, int thread) {
  const int warp = thread >> 5, lane = thread & 31;
  const uint32_t row_bytes = p.heads * (kDim * 2);
  const int64_t origin = chunk_origin(p, info, head) + 8 * warp * int64_t{row_bytes} + 8 * lane;
  const char* k = reinterpret_cast<const char*>(p.k) + origin;
  const char* q = reinterpret_cast<const char*>(p.q) + origin;
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    raw.k[r] = raw.q[r] = uint2{0, 0};
    if (8 * warp + r < info.length) {
      raw.k[r] = __ldg(reinterpret_cast<const uint2*>(k));
      raw.q[r] = __ldg(reinterpret_cast<const uint2*>(q));
    }
    k += row_bytes;
    q += row_bytes;
  }
  raw.beta_logit = thread < info.length
                       ? __ldg(p.beta_logit + (info.first_token + thread) * p.heads + head)
                       : uint16_t{0};
}

/// f of a warp's own rows into kGate, as one group of asynchronous copies. Rows behind the chunk's end
/// become zero.
LOCKSTEP_DEVICE void load_gate(
    uint32_t shared, const Params& p, const ChunkInfo& info, int head, int warp, int lane) {
  const uint32_t row_bytes = p.heads * (kDim * 2);
  const char* f = reinterpret_cast<const char*>(p.f) + chunk_origin(p, info, head) + (lane & 15) * 16;
  const uint32_t to = shared + kGate + (8 * warp + (lane >> 4)) * 256 + (lane & 15) * 16;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t row = 8 * warp + (lane >> 4) + 2 * i;
    const bool valid = static_cast<int>(row) < info.length;
    copy16(to + i * 512, f + (valid ? row * row_bytes : 0u), valid);
  }
  copy_commit();
}

/// v of a chunk straight into shared memory, zero rows behind its end.
LOCKSTEP_DEVICE void load_value(
    uint32_t shared, const Params& p, const ChunkInfo& info, int head, int thread) {
  const uint32_t row_bytes = p.heads * (kDim * 2);
  const uint32_t piece = thread & 15, first_row = thread >> 4;
  const char* v = reinterpret_cast<const char*>(p.v) + chunk_origin(p, info, head) + piece * 16;
  const uint32_t to =
      shared + kValue + (piece >> 3) * kSlab + slab_offset(first_row, piece & 7);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t row = first_row + 16 * i;
    const bool valid = static_cast<int>(row) < info.length;
    copy16(to + i * 2048, v + (valid ? row * row_bytes : 0u), valid);
  }
  copy_commit();
}

/// l2norm of a thread's rows: fp32 sums, then bf16.
LOCKSTEP_DEVICE void normalize(RawRows& raw, unsigned char* base, int warp, int lane) {
  float sums[16];
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    sums[r] = square_sum4(raw.k[r]);
    sums[8 + r] = square_sum4(raw.q[r]);
  }
#pragma unroll
  for (int r = 0; r < 8; ++r) {  // or all 64 unpacked values stay in registers until they are scaled
    raw.k[r] = {opaque(raw.k[r].x), opaque(raw.k[r].y)};
    raw.q[r] = {opaque(raw.q[r].x), opaque(raw.q[r].y)};
  }
  const float total = butterfly_sum16(sums, lane);
  float* norms = reinterpret_cast<float*>(base + kNorms) + warp * 16;
  if ((lane & 1) == 0) norms[lane >> 1] = rsqrtf(total + 1e-6f);
  __syncwarp();
#pragma unroll
  for (int r4 = 0; r4 < 2; ++r4) {
    const float4 k = reinterpret_cast<const float4*>(norms)[r4];
    const float4 q = reinterpret_cast<const float4*>(norms)[r4 + 2];
    raw.k[4 * r4] = scale4(raw.k[4 * r4], k.x);
    raw.k[4 * r4 + 1] = scale4(raw.k[4 * r4 + 1], k.y);
    raw.k[4 * r4 + 2] = scale4(raw.k[4 * r4 + 2], k.z);
    raw.k[4 * r4 + 3] = scale4(raw.k[4 * r4 + 3], k.w);
    raw.q[4 * r4] = scale4(raw.q[4 * r4], q.x);
    raw.q[4 * r4 + 1] = scale4(raw.q[4 * r4 + 1], q.y);
    raw.q[4 * r4 + 2] = scale4(raw.q[4 * r4 + 2], q.z);
    raw.q[4 * r4 + 3] = scale4(raw.q[4 * r4 + 3], q.w);
  }
}

/// Gate and its running sum over this thread's eight rows, in base 2; the totals go to kTotals.
LOCKSTEP_DEVICE void accumulate_gate(
    float (&b)[8][4], float4 bias, float a_log, float decay_scale, int length, unsigned char* base, int warp,
    int lane) {
  const float slope = -__expf(a_log) * 1.4426950408889634f;
  const float offset[4] = {
      bias.x * slope, bias.y * slope, bias.z * slope, bias.w * slope};
  float sum[4] = {};
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    const float scale = 8 * warp + r < length ? decay_scale : 0.0f;
    float f[4];
    unpack4(f, *reinterpret_cast<const uint2*>(base + kGate + (8 * warp + r) * 256 + lane * 8));
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

/// Per-channel constants of one 16-row block, for a thread's four channels.
struct Anchors {
  float row[4];       // b_i - A_I without the thread's own running sum
  float column[4];    // A_{I+1} - A_I
  float end[4];       // exp2(b_C - A_{I+1})
  float chunk_sum[4]; // b_C
  uint32_t start[2];  // 2^(A_I), packed bf16
  uint32_t factor[3][2];  // 2^(A_I - A_{I+1}), 2^(A_{I+2} - A_{I+1}), 2^(A_{I+3} - A_{I+1})
};

/// Packed bf16 powers of two; exponents below the format's range give zero.
LOCKSTEP_DEVICE uint32_t pack_powers(int low, int high) {
  return static_cast<uint32_t>((max(low, -127) + 127) << 7 | (max(high, -127) + 127) << 23);
}

/// The block is a run-time value on purpose: one copy of this code for all warps, because the
/// instruction cache is the scarcest resource here.
LOCKSTEP_DEVICE Anchors
find_anchors(const unsigned char* base, int block, bool second_half, int lane) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: a sum with it holds the nearest integer
  Anchors a;
  int now[4] = {}, target[4][4] = {};  // exponents A_I, and A_{I+1} .. A_{I+3} in target[1..3]
  float sum[4] = {};
#pragma unroll
  for (int c = 0; c < 4; ++c) a.row[c] = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4* totals = reinterpret_cast<const float4*>(base + kTotals) + 2 * i * 32 + lane;
    const float4 first4 = totals[0], second4 = totals[32];
    const float first[4] = {first4.x, first4.y, first4.z, first4.w};
    const float second[4] = {second4.x, second4.y, second4.z, second4.w};
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (i == block) a.row[c] = sum[c] + (second_half ? first[c] : 0.0f);
      sum[c] += first[c] + second[c];
      const int exponent = __float_as_int(sum[c] + kRound) - 0x4b400000;
      if (i < block) now[c] = exponent;
#pragma unroll
      for (int d = 1; d < 4; ++d)
        if (i + 1 == block + d) target[d][c] = exponent;
    }
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    a.chunk_sum[c] = sum[c];
    a.row[c] -= static_cast<float>(now[c]);
    a.column[c] = static_cast<float>(target[1][c] - now[c]);
    a.end[c] = exp2_approx(sum[c] - static_cast<float>(target[1][c]));
  }
#pragma unroll
  for (int c = 0; c < 4; c += 2) {
    a.start[c / 2] = pack_powers(now[c], now[c + 1]);
    a.factor[0][c / 2] = pack_powers(now[c] - target[1][c], now[c + 1] - target[1][c + 1]);
#pragma unroll
    for (int d = 2; d < 4; ++d)
      a.factor[d - 1][c / 2] =
          pack_powers(target[d][c] - target[1][c], target[d][c + 1] - target[1][c + 1]);
  }
  return a;
}

/// Decayed operands of this thread's eight rows: Gram operands and K~ to shared memory, Q~, K- and
/// exp(b_C) to the record.
LOCKSTEP_DEVICE void write_operands(const RawRows& raw,
                                    const float (&b)[8][4],
                                    unsigned char* base,
                                    unsigned char* out,
                                    int warp,
                                    int lane) {
  const int block = warp >> 1;
  const Anchors a = find_anchors(base, block, (warp & 1) != 0, lane);
  if (warp == 0)
    *reinterpret_cast<float4*>(out + kTileDecay + 16 * lane) =
        make_float4(exp2_approx(a.chunk_sum[0]),
                    exp2_approx(a.chunk_sum[1]),
                    exp2_approx(a.chunk_sum[2]),
                    exp2_approx(a.chunk_sum[3]));
  const uint32_t shared = smem_address(base);
  const uint32_t slab = lane >> 4, byte = (lane & 15) * 8;  // swizzled below: row & 7 is r
  const uint32_t rows_at = shared + slab * kSlab + warp * 1024 + byte;
  const uint32_t columns_at = shared + slab * 2048 + (warp & 1) * 1024 + byte;
  const uint32_t out_at = slab * kSlab + warp * 1024 + byte;
  uint32_t column_at[4];
#pragma unroll
  for (int d = 0; d < 4; ++d) column_at[d] = columns_at + column_block(block + d, block);
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    const uint32_t at = (rows_at ^ (r << 4)) + r * 128;
    unsigned char* const out_row = out + (out_at ^ (r << 4)) + r * 128;
    float k[4], q[4], row_k[4], row_q[4], col_k[4];
    unpack4(k, raw.k[r]);
    unpack4(q, raw.q[r]);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float exponent = a.row[c] + b[r][c];
      const float from_start = exp2_approx(exponent);
      row_k[c] = k[c] * from_start;
      row_q[c] = q[c] * (from_start * 0.08838834764831845f);
      col_k[c] = k[c] * exp2_approx(a.column[c] - exponent);
    }
    const uint2 rows_k = pack4(row_k[0], row_k[1], row_k[2], row_k[3]);
    const uint2 rows_q = pack4(row_q[0], row_q[1], row_q[2], row_q[3]);
    const uint2 cols_k = pack4(col_k[0], col_k[1], col_k[2], col_k[3]);
    store_shared(at + kRowK, rows_k.x, rows_k.y);
    store_shared(at + kRowQ, rows_q.x, rows_q.y);
    store_shared(at + kDecayedK,
                 multiply_bf16(rows_k.x, a.start[0]),
                 multiply_bf16(rows_k.y, a.start[1]));
    *reinterpret_cast<uint2*>(out_row + kTileQ) =
        uint2{multiply_bf16(rows_q.x, a.start[0]), multiply_bf16(rows_q.y, a.start[1])};
    *reinterpret_cast<uint2*>(out_row + kTileK) = pack4(
        col_k[0] * a.end[0], col_k[1] * a.end[1], col_k[2] * a.end[2], col_k[3] * a.end[3]);
    store_shared((column_at[0] ^ (r << 4)) + r * 128,
                 multiply_bf16(cols_k.x, a.factor[0][0]),
                 multiply_bf16(cols_k.y, a.factor[0][1]));
    if (block < 3) store_shared((column_at[1] ^ (r << 4)) + r * 128, cols_k.x, cols_k.y);
#pragma unroll
    for (int d = 2; d < 4; ++d)
      if (block + d < 4)
        store_shared((column_at[d] ^ (r << 4)) + r * 128,
                     multiply_bf16(cols_k.x, a.factor[d - 1][0]),
                     multiply_bf16(cols_k.y, a.factor[d - 1][1]));
  }
}

/// A group's share of all items: `worker`, `worker + workers`, ... in chunk-major order. With a ring, a
/// record is published once its bulk stores have completed, and a slot is written only after the chain
/// has copied what it held. An item waits only for a chain that waits only for earlier items, so the
/// launch cannot lock up while all blocks are resident.
LOCKSTEP_DEVICE void prepare_items(
    const Params& p, unsigned char* base, int barrier, int worker, int workers, int initial_thread) {
  const int chunks = p.chunk_begin[p.documents];
  const int chunk_step = workers / p.heads, head_step = workers % p.heads;
  int chunk = worker / p.heads, head = worker % p.heads;
  if (chunk >= chunks) return;
  const uint32_t shared = smem_address(base);
  float* const beta = reinterpret_cast<float*>(base + kBeta);
  RawRows raw;
  ChunkInfo info = load_chunk_info(p, chunk, 0);
  load_rows(raw, p, info, head, initial_thread);
  load_gate(shared, p, info, head, initial_thread >> 5, initial_thread & 31);
  load_value(shared, p, info, head, initial_thread);
  int previous_chunk = -1, previous_head = 0;  // whose bulk stores may still be under way
  const auto publish = [&] {
    bulk_wait_all();
    if (p.ring > 0 && previous_chunk >= 0) {
      fence_async_all();
      store_release(p.ready + previous_head * p.ring + previous_chunk % p.ring, previous_chunk + 1);
    }
  };

  while (chunk < chunks) {
    const int thread = opaque(initial_thread), warp = thread >> 5, lane = thread & 31;
    int next_chunk = chunk + chunk_step, next_head = head + head_step;
    if (next_head >= p.heads) {
      next_head -= p.heads;
      ++next_chunk;
    }
    const bool more = next_chunk < chunks;
    const int length = info.length;
    if (more) info = load_chunk_info(p, next_chunk, opaque(0));
    unsigned char* const out = record(p, chunk, head);

    const float4 bias = __ldg(reinterpret_cast<const float4*>(p.dt_bias + head * kDim + 4 * lane));
    const float a_log = __ldg(p.a_log + head);
    if (thread < kChunk)
      beta[thread] =
          thread < length
              ? 1.0f / (1.0f + __expf(-__uint_as_float(uint32_t{raw.beta_logit} << 16)))
              : 0.0f;
    normalize(raw, base, warp, lane);
    copy_wait<1>();  // f; v may still be on its way
    __syncwarp();
    float b[8][4];
    accumulate_gate(b, bias, a_log, p.decay_scale, length, base, warp, lane);
    if (thread == 0) {
      publish();
      if (p.ring > 0)
        while (load_acquire(p.consumed + head) < chunk + 1 - p.ring) __nanosleep(32);
    }
    named_barrier(barrier, kPrepareThreads);

    write_operands(raw, b, base, out, warp, lane);
    copy_wait<0>();
    fence_async_shared();  // K~ and v feed wgmma
    named_barrier(barrier, kPrepareThreads);
    // Gram products. Warps 0-3 take the diagonal pairs and invert their own block, warps 4-7 the six
    // pairs below. L, M and P wait in registers until every warp is done with the operands.
    if (warp < 4) {
      float kk[2][4], qk[2][4], x[16];
      gram_pair(kk, qk, shared, warp, warp, lane);
      invert_diagonal(x, kk, base, beta, warp, lane);
      named_barrier(barrier, kPrepareThreads);
      store_pair<true>(kk, qk, shared, beta, warp, warp, lane);
      store_diagonal_solve(x, base, beta, warp, lane);
    } else {
      float kk[2][2][4], qk[2][2][4];
      const int row_block = warp < 6 ? warp - 3 : 3, col_block = warp < 6 ? 0 : warp - 6;
      gram_pair(kk[0], qk[0], shared, row_block, col_block, lane);
      if (warp < 6) gram_pair(kk[1], qk[1], shared, warp - 2, warp - 3, lane);
      named_barrier(barrier, kPrepareThreads);
      store_pair<false>(kk[0], qk[0], shared, beta, row_block, col_block, lane);
      if (warp < 6) store_pair<false>(kk[1], qk[1], shared, beta, warp - 2, warp - 3, lane);
    }
    // Blocks of P and M above the diagonal: 6 blocks of 16 rows x two 16-byte pieces.
    if (thread >= 64) {
      const int which = warp - 2, row = lane >> 1, half = lane & 1;
      const int row_block = which < 3 ? 0 : which < 5 ? 1 : 2;
      const int col_block = which < 3 ? which + 1 : which < 5 ? which - 1 : 3;
      const uint32_t at = shared + slab_offset(row_block * kSub + row, col_block * 2 + half);
      store_shared_zero16(at + kSolve);
      store_shared_zero16(at + kScores);
    }
    if (more) load_gate(shared, p, info, next_head, warp, lane);
    named_barrier(barrier, kPrepareThreads);
    if (warp < 4) solve_block_column(shared, beta, warp, lane);
    if (more) load_rows(raw, p, info, next_head, thread);
    fence_async_shared();
    named_barrier(barrier, kPrepareThreads);

    if (warp < 4) {
      multiply_by_solve(shared, kDecayedK, kRowK, thread);
    } else {
      multiply_by_solve(shared, kValue, kRowQ, thread - 128);
    }
    fence_async_shared();
    named_barrier(barrier, kPrepareThreads);
    if (thread == 0) {
      bulk_store(out + kTileW, shared + kRowK, kTile);
      bulk_store(out + kTileU, shared + kRowQ, kTile);
      bulk_store(out + kTileM, shared + kScores, kSlab);
      bulk_commit();
    }
    if (more) load_value(shared, p, info, next_head, thread);
    previous_chunk = chunk;
    previous_head = head;
    chunk = next_chunk;
    head = next_head;
  }
  if (initial_thread == 0) publish();
}

}  // namespace lockstep::model::kda
