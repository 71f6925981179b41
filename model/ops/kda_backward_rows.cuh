#pragma once

// The last part of a chunk's gradients, row by row (warp w owns rows 8w..8w+7, lane l channels
// 4l..4l+3): decay factors, the gate's running sums, l2norm, gate and beta, the stores; and the
// loop over chunks.

#include "model/ops/kda_backward_gradient.cuh"

namespace lockstep::model::kda {

LOCKSTEP_DEVICE void load4(float (&value)[4], const unsigned char* from) {
  const float4 v = *reinterpret_cast<const float4*>(from);
  value[0] = v.x;
  value[1] = v.y;
  value[2] = v.z;
  value[3] = v.w;
}
/// Constants of a head.
struct GateScale {
  float decay;     // lower bound * log2(e)
  float gradient;  // lower bound * exp(A_log)
};

/// From the results in shared memory to all gradients of the chunk. `next` is called once the tiles
/// and results in shared memory have been read by the whole group.
template <class Next>
LOCKSTEP_DEVICE void gradient_rows(const BackwardParams& p,
                                   const ChunkInfo& info,
                                   int chunk,
                                   int head,
                                   GateScale scale,
                                   unsigned char* base,
                                   Next&& next) {
  const GroupThread me;
  const int warp = me.warp, lane = me.lane, first_row = 8 * warp;
  const int64_t row_bytes = int64_t{p.base.row_heads} * (kDim * 2);
  const int64_t origin = chunk_origin(p.base, info, head) + first_row * row_bytes + lane * 8;
  const auto at = [&](const uint16_t* of, int r) {
    return reinterpret_cast<const char*>(of) + origin + r * row_bytes;
  };
  const auto put = [&](uint16_t* to, int r, uint2 value) {
    *reinterpret_cast<uint2*>(reinterpret_cast<char*>(to) + origin + r * row_bytes) = value;
  };
  float suffix[8][4], prefix[8][4];  // of db without tails; of k tail, exclusive
  float slope_f[8][4];               // dg/df
  float bias[4];
  load4(bias, base + kBias + lane * 16);
  const float slope = *reinterpret_cast<const float*>(base + kBias + kDim * 4);
  {
    float offset[4];
    decay_offsets(offset, base, warp, lane);
    const float* norms = reinterpret_cast<const float*>(base + kNorms) + warp * 16;
    const uint32_t tile_at = (lane >> 4) * kSlab + warp * 1024 + (lane & 15) * 8;
    float sum[4] = {}, tails[4] = {};
#pragma unroll
    for (int part = 0; part < 2; ++part) {  // four rows at a time
      uint2 raw_k[4], raw_q[4], raw_v[4];
      float dq[4][4], dk[4][4], dots[16];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = 4 * part + i;
        raw_k[i] = raw_q[i] = raw_v[i] = uint2{0, 0};
        if (first_row + r < info.length) {
          raw_k[i] = __ldg(reinterpret_cast<const uint2*>(at(p.base.k, r)));
          raw_q[i] = __ldg(reinterpret_cast<const uint2*>(at(p.base.q, r)));
          raw_v[i] = __ldg(reinterpret_cast<const uint2*>(at(p.base.v, r)));
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = 4 * part + i, row = first_row + r;
        const bool valid = row < info.length;
        const uint32_t result = result_offset(row, 4 * lane);
        float f[4], k[4], q[4], v[4], dv[4], from_q[4], from_row[4], from_col[4], from_tail[4];
        unpack4(f, *reinterpret_cast<const uint2*>(base + kGate + row * 256 + lane * 8));
        unpack4(k, scale4(raw_k[i], norms[r]));
        unpack4(q, scale4(raw_q[i], norms[8 + r]));
        const uint2 packed_dv =
            *reinterpret_cast<const uint2*>(base + kTileGrad + (tile_at ^ (r << 4)) + r * 128);
        unpack4(v, raw_v[i]);
        unpack4(dv, packed_dv);
        load4(from_q, base + kResultQ + result);
        load4(from_row, base + kResultRow + result);
        load4(from_col, base + kResultCol + result);
        load4(from_tail, base + kResultTail + result);
        const float diagonal = reinterpret_cast<const float*>(base + kDiagonalM)[row];
        const float decay = valid ? scale.decay : 0.0f, gradient = valid ? scale.gradient : 0.0f;
        float along_q = 0.0f, along_k = 0.0f, along_beta = 0.0f;
        float from_middle[4], to_middle[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const float e = exp2_approx(fminf(fmaf(f[c], slope, bias[c] * slope), 126.0f));
          const float sigma = reciprocal_approx(1.0f + e);
          sum[c] = fmaf(decay, sigma, sum[c]);
          slope_f[r][c] = gradient * sigma * (e * sigma);
          from_middle[c] = exp2_approx(offset[c] + sum[c]);
          to_middle[c] = exp2_approx(-(offset[c] + sum[c]));
        }
        // The very operands of the products: then what rows i and j of a
        // pair add to the gate's sums differs by the sign alone, and cancels where it has to.
        float row_q[4], row_k[4], col_k[4];
#pragma unroll
        for (int c = 0; c < 4; c += 2) {
          const uint32_t a = pack_bf16(q[c] * from_middle[c], q[c + 1] * from_middle[c + 1]);
          const uint32_t b = pack_bf16(k[c] * from_middle[c], k[c + 1] * from_middle[c + 1]);
          const uint32_t d = pack_bf16(k[c] * to_middle[c], k[c + 1] * to_middle[c + 1]);
          row_q[c] = low_bf16(a);
          row_q[c + 1] = high_bf16(a);
          row_k[c] = low_bf16(b);
          row_k[c + 1] = high_bf16(b);
          col_k[c] = low_bf16(d);
          col_k[c + 1] = high_bf16(d);
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const float tail = from_tail[c] * to_middle[c];
          suffix[r][c] =
              fmaf(row_q[c], from_q[c], fmaf(row_k[c], from_row[c], -col_k[c] * from_col[c]));
          prefix[r][c] = tails[c];
          tails[c] = fmaf(k[c], tail, tails[c]);
          dq[i][c] = fmaf(from_q[c], from_middle[c], diagonal * k[c]);
          const float of_row = from_row[c] * from_middle[c];
          dk[i][c] = of_row + fmaf(from_col[c], to_middle[c], fmaf(diagonal, q[c], tail));
          along_beta = fmaf(k[c], of_row, fmaf(dv[c], v[c], along_beta));
          along_q = fmaf(q[c], dq[i][c], along_q);
          along_k = fmaf(k[c], dk[i][c], along_k);
        }
        dots[i] = along_k;
        dots[4 + i] = along_q;
        dots[8 + i] = along_beta;
        dots[12 + i] = 0.0f;
        if (valid) put(p.dv, r, packed_dv);
      }
      const float dot = butterfly_sum16(dots, lane);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = 4 * part + i;
        const float norm_k = norms[r], norm_q = norms[8 + r];
        const float back_k = __shfl_sync(0xffffffffu, dot, 2 * i) * norm_k;
        const float back_q = __shfl_sync(0xffffffffu, dot, 8 + 2 * i) * norm_q;
        float k[4], q[4];
        unpack4(k, raw_k[i]);
        unpack4(q, raw_q[i]);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          k[c] = fmaf(-back_k, k[c], dk[i][c]) * norm_k;
          q[c] = fmaf(-back_q, q[c], dq[i][c]) * norm_q;
        }
        if (first_row + r < info.length) {
          put(p.dk, r, pack4(k[0], k[1], k[2], k[3]));
          put(p.dq, r, pack4(q[0], q[1], q[2], q[3]));
        }
      }
      // beta dbeta = dv.v + k.row: the bracket that beta multiplies is v - k S, S decayed to row i
      const int row = first_row + 4 * part + ((lane - 16) >> 1);
      if (lane >= 16 && lane < 24 && (lane & 1) == 0 && row < info.length) {
        const int64_t index = (info.first_token + row) * p.base.row_heads + head;
        const float logit = __uint_as_float(uint32_t{p.base.beta_logit[index]} << 16);
        const __nv_bfloat16_raw bits = __float2bfloat16_rn(dot / (1.0f + __expf(logit)));
        p.dbeta[index] = bits.x;
      }
    }
#pragma unroll
    for (int r = 6; r >= 0; --r)
#pragma unroll
      for (int c = 0; c < 4; ++c) suffix[r][c] += suffix[r + 1][c];
    float* const decay_sums = reinterpret_cast<float*>(base + kDecaySums) + warp * kDim;
    float* const tail_sums = reinterpret_cast<float*>(base + kTailSums) + warp * kDim;
    reinterpret_cast<float4*>(decay_sums)[lane] =
        make_float4(suffix[0][0], suffix[0][1], suffix[0][2], suffix[0][3]);
    reinterpret_cast<float4*>(tail_sums)[lane] =
        make_float4(tails[0], tails[1], tails[2], tails[3]);
  }
  fence_async_shared();
  named_barrier(kGroupBarrier, kPrepareThreads);
  next();

  float start[4], totals[4] = {};
  load4(start, base + kStateTerm + lane * 16);
#pragma unroll
  for (int w = 0; w < 8; ++w) {
    float value[4];
    load4(value, base + (w < warp ? kTailSums : kDecaySums) + (w * kDim + 4 * lane) * 4);
#pragma unroll
    for (int c = 0; c < 4; ++c) start[c] += w == warp ? 0.0f : value[c];
  }
  float rate = 0.0f;
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    float f[4], df[4];
    unpack4(f, *reinterpret_cast<const uint2*>(base + kGate + (first_row + r) * 256 + lane * 8));
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      df[c] = (start[c] + (suffix[r][c] + prefix[r][c])) * slope_f[r][c];
      totals[c] += df[c];
      rate = fmaf(df[c], f[c] + bias[c], rate);
    }
    if (first_row + r < info.length) put(p.df, r, pack4(df[0], df[1], df[2], df[3]));
  }
#pragma unroll
  for (int step = 16; step >= 1; step /= 2) rate += __shfl_xor_sync(0xffffffffu, rate, step);
  *reinterpret_cast<float4*>(base + kTotals + (warp * kDim + 4 * lane) * 4) =
      make_float4(totals[0], totals[1], totals[2], totals[3]);
  if (lane == 0) reinterpret_cast<float*>(base + kRateSums)[warp] = rate;
  named_barrier(kGroupBarrier, kPrepareThreads);
  if (me.thread <= kDim) {
    const float* from = me.thread == 0
                            ? reinterpret_cast<const float*>(base + kRateSums)
                            : reinterpret_cast<const float*>(base + kTotals) + (me.thread - 1);
    const int stride = me.thread == 0 ? 1 : kDim;
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < 8; ++w) total += from[w * stride];
    p.partials[(int64_t{chunk} * p.base.row_heads + head) * kPartials + me.thread] = total;
  }
}

/// Starts q, k, f and do of a chunk on their way to L2: two lines of 128 bytes a thread.
LOCKSTEP_DEVICE void prefetch_rows(const BackwardParams& p,
                                   const ChunkInfo& info,
                                   int head,
                                   int thread) {
  const int row = (thread >> 1) & 63;
  if (row >= info.length) return;
  const int64_t at = chunk_origin(p.base, info, head) +
                     row * (int64_t{p.base.row_heads} * (kDim * 2)) + (thread & 1) * 128;
  const bool second = thread >= 128;
  const auto prefetch = [at](const uint16_t* from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(reinterpret_cast<const char*>(from) + at));
  };
  prefetch(second ? p.base.q : p.base.k);
  prefetch(second ? p.base.f : p.dout);
}

/// The group's share of one head: chunks `chunk`, `chunk + step`, ... below `chunks`.
LOCKSTEP_DEVICE void gradient_items(
    const BackwardParams& p, int chunk, int chunks, int step, int head, unsigned char* base) {
  if (chunk >= chunks) return;
  const uint32_t shared = smem_address(base);
  const uint32_t bar = shared + kGradientBarrier;
  GateScale scale;
  {
    const GroupThread me;
    float* const bias = reinterpret_cast<float*>(base + kBias);
    if (me.thread < kDim) bias[me.thread] = p.base.dt_bias[head * kDim + me.thread];
    const float rate = expf(p.base.a_log[head]);
    if (me.thread == kDim) bias[kDim] = -rate * 1.4426950408889634f;
    scale.decay = p.base.decay_scale;
    scale.gradient = p.base.decay_scale * 0.6931471805599453f * rate;
    if (me.thread == 0) load_chain_tiles(p, chunk, head, shared);
  }
  uint32_t parity = 0;
  for (; chunk < chunks; chunk += step) {
    const ChunkInfo info = load_chunk_info(p.base, chunk, 0);
    {
      const GroupThread me;
      RawRows raw;
      load_gate(shared, p.base, info, head, me.warp, me.lane);
      load_rows(raw, p.base, info, head, me.thread);
      load_out_gradient(shared, p, info, head, me.thread);
      copy_wait<1>();
      named_barrier(kGroupBarrier, kPrepareThreads);
      float b[8][4];
      accumulate_gate(b, scale.decay, info.length, base, me.warp, me.lane);
      normalize(raw, base, me.warp, me.lane);
      named_barrier(kGroupBarrier, kPrepareThreads);
      find_middles(base, me.thread);
      named_barrier(kGroupBarrier, kPrepareThreads);
      write_gradient_operands(raw, b, base, me.warp, me.lane);
      copy_wait<0>();
      fence_async_shared();
      named_barrier(kGroupBarrier, kPrepareThreads);
    }
    if (chunk + step < chunks) {
      const GroupThread me;
      prefetch_rows(p, load_chunk_info(p.base, chunk + step, 0), head, me.thread);
    }
    barrier_wait(bar, parity);
    parity ^= 1;
    gradient_products(base);
    gradient_rows(p, info, chunk, head, scale, base, [&] {
      const GroupThread me;
      if (me.thread == 0 && chunk + step < chunks) load_chain_tiles(p, chunk + step, head, shared);
    });
  }
}

}  // namespace lockstep::model::kda
