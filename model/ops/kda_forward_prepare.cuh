#pragma once

// Preparation: everything of a (chunk, head) that does not depend on the state. A group of 256
// threads walks over its chunks; it reads q, k, f, beta and writes one tile record per chunk.
// Here: loads, gate, l2norm, decayed operands and the loop; the matrix part is in
// kda_forward_solve.cuh.
//
// Thread layout: warp w owns rows 8w..8w+7, lane l owns channels 4l..4l+3. A row then lives in one
// warp (l2norm is a butterfly) and the cumulative sum runs inside a thread, except for one exchange
// of 8-row totals.
//
// Anchors. b is the running sum of log2 decay in the chunk, P_I its value before 16-row block I,
// and A_I = P_I rounded to an integer. Rows of block I carry exp2(b_i - A_I), columns of block J
// carry exp2(A_{J+1} - b_j); a pair (I, J) still lacks 2^(A_I - A_{J+1}), and K~, Q~ lack 2^(A_I):
// powers of two, so every rescaled operand is the once-rounded bf16 operand with another exponent,
// and costs one packed product instead of two products and a rounding.

#include "model/ops/kda_forward_group.cuh"
#include "model/ops/kda_forward_solve.cuh"

namespace lockstep::model::kda {

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

/// k and q of a thread's eight rows.
struct RawRows {
  uint2 k[8], q[8];
};

/// `zero` is 0 in a way the compiler cannot see: an address that looks uniform would make the
/// values uniform registers, which are waited for at once.
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
  return (info.first_token * p.row_heads + head) * (kDim * 2);
}

/// A warp: starts f, k and q of a chunk into shared memory, zeros behind the chunk's end. 16 bytes
/// a copy: bulk copies of single rows of 256 bytes took 50 cycles each.
LOCKSTEP_DEVICE void load_raw(
    uint32_t shared, const Params& p, const ChunkInfo& info, int head, int lane) {
  const int64_t row_bytes = int64_t{p.row_heads} * (kDim * 2);
  const int piece = lane & 15, first_row = lane >> 4;
  const int64_t origin = chunk_origin(p, info, head) + first_row * row_bytes + piece * 16;
  const uint32_t to = shared + kRaw + first_row * (kDim * 2) + piece * 16;
#pragma unroll 1
  for (int tensor = 0; tensor < 3; ++tensor) {
    const char* from = reinterpret_cast<const char*>(tensor == 0   ? p.f
                                                     : tensor == 1 ? p.k
                                                                   : p.q) +
                       origin;
#pragma unroll 4
    for (int row = first_row; row < kChunk; row += 2) {
      const bool valid = row < info.length;
      copy16(to + tensor * kRawTensor + (row - first_row) * (kDim * 2), from, valid);
      if (row + 2 < info.length) from += 2 * row_bytes;
    }
  }
  copy_arrive(shared + kRawBarrier);
}

LOCKSTEP_DEVICE uint2 raw_row(const unsigned char* base, int tensor, int row, int lane) {
  return *reinterpret_cast<const uint2*>(base + kRaw + tensor * kRawTensor + row * (kDim * 2) +
                                         lane * 8);
}

/// l2norm of a thread's rows: fp32 sums, then bf16.
LOCKSTEP_DEVICE void normalize(RawRows& raw, unsigned char* base, int warp, int lane) {
  float sums[16];
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    raw.k[r] = raw_row(base, 1, 8 * warp + r, lane);
    raw.q[r] = raw_row(base, 2, 8 * warp + r, lane);
    sums[r] = square_sum4(raw.k[r]);
    sums[8 + r] = square_sum4(raw.q[r]);
  }
#pragma unroll
  for (int r = 0; r < 8;
       ++r) {  // or all 64 unpacked values stay in registers until they are scaled
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
    float (&b)[8][4], float decay_scale, int length, unsigned char* base, int warp, int lane) {
  const float4 bias = reinterpret_cast<const float4*>(base + kBias)[lane];
  const float slope = *reinterpret_cast<const float*>(base + kBias + kDim * 4);
  const float offset[4] = {bias.x * slope, bias.y * slope, bias.z * slope, bias.w * slope};
  float sum[4] = {};
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    const float scale = 8 * warp + r < length ? decay_scale : 0.0f;
    float f[4];
    unpack4(f, raw_row(base, 0, 8 * warp + r, lane));
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

/// Adding it to a float of moderate size leaves the nearest integer in the low mantissa bits.
constexpr float kRound = 12582912.0f;  // 1.5 * 2^23

/// Two threads per channel: one writes P_I and, for the record, exp(b_C); one the pairs' powers of
/// two.
LOCKSTEP_DEVICE void find_anchors(unsigned char* base, unsigned char* out, int thread) {
  const int channel = thread & (kDim - 1);
  const float* totals = reinterpret_cast<const float*>(base + kTotals) + channel;
  float sum[5];
  sum[0] = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    sum[i + 1] = sum[i] + (totals[2 * i * kDim] + totals[(2 * i + 1) * kDim]);
  if (thread < kDim) {
    float* prefix = reinterpret_cast<float*>(base + kPrefix) + channel;
#pragma unroll
    for (int i = 0; i < 5; ++i) prefix[i * kDim] = sum[i];
    reinterpret_cast<float*>(out + kTileDecay)[channel] = exp2_approx(sum[4]);
  } else {
    uint16_t* factor = reinterpret_cast<uint16_t*>(base + kFactors) + channel;
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j <= i; ++j)
        factor[(i * (i + 1) / 2 + j) * kDim] = static_cast<uint16_t>(
            (max(__float_as_int(sum[i] + kRound) - __float_as_int(sum[j + 1] + kRound), -127) + 127)
            << 7);
  }
}

/// Decayed operands of this thread's eight rows: Gram operands to shared memory, K~, Q~ and
/// K- to the record. One copy of this code for all warps, the block being a run-time value: the
/// instruction cache is scarce here.
LOCKSTEP_DEVICE void write_operands(const RawRows& raw,
                                    const float (&b)[8][4],
                                    unsigned char* base,
                                    unsigned char* out,
                                    int warp,
                                    int lane) {
  float row[4], column[4],
      end[4];         // b_i - A_I less the own sum; A_{I+1} - A_I; exp2(b_C - A_{I+1})
  uint32_t start[2];  // 2^(A_I), packed bf16
  {
    const float4* prefix = reinterpret_cast<const float4*>(base + kPrefix) + lane;
    const float4 now4 = prefix[(warp >> 1) * 32], next4 = prefix[((warp >> 1) + 1) * 32];
    const float4 all4 = prefix[4 * 32];
    float4 half4 = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (warp & 1) half4 = (reinterpret_cast<const float4*>(base + kTotals) + lane)[(warp - 1) * 32];
    const float now[4] = {now4.x, now4.y, now4.z, now4.w};
    const float next[4] = {next4.x, next4.y, next4.z, next4.w};
    const float all[4] = {all4.x, all4.y, all4.z, all4.w};
    const float half[4] = {half4.x, half4.y, half4.z, half4.w};
    int exponent[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float anchor = (now[c] + kRound) - kRound, anchor_next = (next[c] + kRound) - kRound;
      row[c] = now[c] - anchor + half[c];
      column[c] = anchor_next - anchor;
      end[c] = exp2_approx(all[c] - anchor_next);
      exponent[c] = max(__float_as_int(now[c] + kRound) - 0x4b400000, -127) + 127;
    }
    start[0] = static_cast<uint32_t>(exponent[0] << 7 | exponent[1] << 23);
    start[1] = static_cast<uint32_t>(exponent[2] << 7 | exponent[3] << 23);
  }
  // Swizzle: row & 7 is r, so piece ^ r is an exclusive or on address bits 4-6.
  const uint32_t offset = (lane >> 4) * kSlab + warp * 1024 + (lane & 15) * 8;
  const uint32_t rows_at = smem_address(base) + offset;
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    const uint32_t at = (rows_at ^ (r << 4)) + r * 128;
    unsigned char* const out_row = out + (offset ^ (r << 4)) + r * 128;
    float k[4], q[4], row_k[4], row_q[4], col_k[4];
    unpack4(k, raw.k[r]);
    unpack4(q, raw.q[r]);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float exponent = row[c] + b[r][c];
      const float from_start = exp2_approx(exponent);
      row_k[c] = k[c] * from_start;
      row_q[c] = q[c] * from_start;
      col_k[c] = k[c] * exp2_approx(column[c] - exponent);
    }
    const uint2 rows_k = pack4(row_k[0], row_k[1], row_k[2], row_k[3]);
    const uint2 rows_q = pack4(row_q[0], row_q[1], row_q[2], row_q[3]);
    const uint2 cols_k = pack4(col_k[0], col_k[1], col_k[2], col_k[3]);
    store_shared(at + kRowK, rows_k.x, rows_k.y);
    store_shared(at + kRowQ, rows_q.x, rows_q.y);
    store_shared(at + kColumns, cols_k.x, cols_k.y);
    *reinterpret_cast<uint2*>(out_row + kTileStart) =
        uint2{multiply_bf16(rows_k.x, start[0]), multiply_bf16(rows_k.y, start[1])};
    *reinterpret_cast<uint2*>(out_row + kTileQ) =
        uint2{multiply_bf16(rows_q.x, start[0]), multiply_bf16(rows_q.y, start[1])};
    *reinterpret_cast<uint2*>(out_row + kTileK) =
        pack4(col_k[0] * end[0], col_k[1] * end[1], col_k[2] * end[2], col_k[3] * end[3]);
  }
}

/// True once both V halves' chains have copied what the slot of (chunk, head) held before.
LOCKSTEP_DEVICE bool slot_is_free(const Params& p, int chunk, int head) {
  const int needed = chunk + 1 - p.ring;
  // Relaxed: the readers were done before they counted, and nothing they wrote is read here.
  return needed <= 0 || (load_relaxed(p.consumed + 2 * head) >= needed &&
                         load_relaxed(p.consumed + 2 * head + 1) >= needed);
}

/// One warp beside the group: starts the raw rows of each item, moves its P and M to the record,
/// publishes the record once everything in it is visible, and holds the group back while the next
/// item's slot is in use.
LOCKSTEP_DEVICE void publish_items(
    const Params& p, int chunk, int chunks, int step, int head, uint32_t shared, int lane) {
  if (chunk >= chunks) return;
  load_raw(shared, p, load_chunk_info(p, chunk, 0), head, lane);
  for (; chunk < chunks; chunk += step) {
    if (lane == 0)
      while (!slot_is_free(p, chunk, head)) __nanosleep(32);
    __syncwarp();
    named_barrier(kGoBarrier, kPublishThreads);  // the group has read its rows
    if (chunk + step < chunks) load_raw(shared, p, load_chunk_info(p, chunk + step, 0), head, lane);
    named_barrier(kWrittenBarrier, kPublishThreads);
    if (lane == 0) {
      unsigned char* const out = record(p, chunk, head);
      bulk_store(out + kTileP, shared + kSolve, kSlab);
      bulk_store(out + kTileM, shared + kScores, kSlab);
      bulk_commit();
      bulk_wait_all();
      fence_async_global();
      store_release(p.ready + head * p.ring + chunk % p.ring, chunk + 1);
    }
    __syncwarp();
  }
  copy_wait<0>();
}

/// The group's share of one head: chunks `chunk`, `chunk + step`, ... A chunk waits only for a
/// chain that waits only for earlier chunks, so the launch cannot lock up while all blocks are
/// resident.
LOCKSTEP_DEVICE void prepare_items(
    const Params& p, int chunk, int chunks, int step, int head, unsigned char* base) {
  if (chunk >= chunks) return;
  const uint32_t shared = smem_address(base);
  float* const beta = reinterpret_cast<float*>(base + kBeta);
  ChunkInfo info = load_chunk_info(p, chunk, 0);
  uint32_t parity = 0;
  uint16_t logit;
  const auto load_logit = [&](int thread) {
    logit = thread < info.length
                ? __ldg(p.beta_logit + (info.first_token + thread) * p.row_heads + head)
                : uint16_t{0};
  };
  {
    const GroupThread me;
    load_logit(me.thread);
    float* const bias = reinterpret_cast<float*>(base + kBias);
    if (me.thread < kDim) bias[me.thread] = p.dt_bias[head * kDim + me.thread];
    if (me.thread == kDim) bias[kDim] = -expf(p.a_log[head]) * 1.4426950408889634f;
    if (me.warp < 6) store_shared_zero16(shared + kScores + upper_offset(me.warp, me.lane));
  }
  named_barrier(kGroupBarrier, kPrepareThreads);

  for (; chunk < chunks; chunk += step) {
    const bool more = chunk + step < chunks;
    {
      // Warps 4-7 come here while 0-3 still solve for the chunk before.
      const GroupThread me;
      const int length = info.length;
      if (more) info = load_chunk_info(p, chunk + step, me.lane * p.zero);
      unsigned char* const out = record(p, chunk, head);
      float b[8][4];
      RawRows raw;
      barrier_wait(shared + kRawBarrier, parity);
      parity ^= 1;
      accumulate_gate(b, p.decay_scale, length, base, me.warp, me.lane);
      normalize(raw, base, me.warp, me.lane);
      named_barrier(kGoBarrier, kPublishThreads);
      if (me.thread < kChunk)
        beta[me.thread] = me.thread < length
                              ? 1.0f / (1.0f + __expf(-__uint_as_float(uint32_t{logit} << 16)))
                              : 0.0f;
      if (more) load_logit(me.thread);
      find_anchors(base, out, me.thread);
      named_barrier(kGroupBarrier, kPrepareThreads);
      write_operands(raw, b, base, out, me.warp, me.lane);
    }
    named_barrier(kGroupBarrier, kPrepareThreads);

    // Gram products. Warps 0-3 take the diagonal pairs and invert their own block, warps 4-7 the
    // six pairs below. L, M and P wait in registers until every warp is done with the operands.
    {
      const GroupThread me;
      const int warp = me.warp, lane = me.lane;
      if (warp < 4) {
        float kk[1][2][4], qk[1][2][4], x[16];
        gram_pairs<1>(kk, qk, shared, warp, {warp}, lane);
        invert_diagonal(x, kk[0], base, beta, warp, lane);
        named_barrier(kGroupBarrier, kPrepareThreads);
        store_pair<true>(kk[0], qk[0], shared, beta, warp, warp, lane);
        store_diagonal_solve(x, base, beta, warp, lane);
      } else {
        // Two pairs of the same rows: 3 with 0, 1; 2 with 0, 1; 3 with 2; 1 with 0. The second of
        // warps 6 and 7 repeats the first and is not kept.
        float kk[2][2][4], qk[2][2][4];
        const int row_block = warp == 7 ? 1 : 3 - (warp & 1);
        const int col_block[2] = {warp == 6 ? 2 : 0, warp < 6 ? 1 : warp == 6 ? 2 : 0};
        gram_pairs<2>(kk, qk, shared, row_block, col_block, lane);
        named_barrier(kGroupBarrier, kPrepareThreads);
        store_pair<false>(kk[0], qk[0], shared, beta, row_block, col_block[0], lane);
        if (warp < 6) store_pair<false>(kk[1], qk[1], shared, beta, row_block, col_block[1], lane);
      }
      if (warp < 6) store_shared_zero16(shared + kSolve + upper_offset(warp, lane));
    }
    named_barrier(kGroupBarrier, kPrepareThreads);
    {
      const GroupThread me;
      if (me.warp < 4) solve_block_column(shared, beta, me.warp, me.lane);
      fence_async_shared();
      named_barrier_arrive(kWrittenBarrier, kPublishThreads);
    }
  }
}

}  // namespace lockstep::model::kda
