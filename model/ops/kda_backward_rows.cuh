#pragma once

// The last part of a chunk's gradients, row by row: decay factors, the gate's running sums, l2norm,
// gate and beta, the stores; and the loop over chunks.

#include "model/ops/kda_backward_products.cuh"

namespace lockstep::model::kda {

/// From the results in shared memory to all gradients of the chunk. `next` is called once the tiles
/// and results in shared memory have been read by the whole block.
template <class Next>
LOCKSTEP_DEVICE void gradient_rows(const BackwardParams& p,
                                   const ChunkInfo& info,
                                   int chunk,
                                   int head,
                                   GateScale scale,
                                   unsigned char* base,
                                   Next&& next) {
  const GradientThread me;
  const int warp = me.warp, lane = me.lane, first_row = kRows * warp;
  const int64_t row_bytes = int64_t{p.base.row_heads} * (kDim * 2);
  const int64_t origin = chunk_origin(p.base, info, head) + first_row * row_bytes + lane * 8;
  const auto get = [&](const uint16_t* of, int r) {
    return __ldg(
        reinterpret_cast<const uint2*>(reinterpret_cast<const char*>(of) + origin + r * row_bytes));
  };
  const auto put = [&](uint16_t* to, int r, uint2 value) {
    *reinterpret_cast<uint2*>(reinterpret_cast<char*>(to) + origin + r * row_bytes) = value;
  };
  float suffix[kRows][4], prefix[kRows][4];  // of db without tails; of k tail, exclusive
  float slope_f[kRows][4];                   // dg/df
  float bias[4];
  load4(bias, base + kHeadBias + lane * 16);
  {
    float offset[4];
    decay_offsets(offset, base, warp, lane);
    const float* norms = reinterpret_cast<const float*>(base + kRowNorms) + warp * 8;
    float sum[4] = {}, tails[4] = {};
#pragma unroll
    for (int part = 0; part < kRows; part += 2) {  // two rows at a time
      uint2 raw_k[2], raw_q[2], raw_v[2];
      float dq[2][4], dk[2][4], dots[8] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        raw_k[i] = raw_q[i] = raw_v[i] = uint2{0, 0};
        if (first_row + part + i < info.length) {
          raw_k[i] = get(p.base.k, part + i);
          raw_q[i] = get(p.base.q, part + i);
          raw_v[i] = get(p.base.v, part + i);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int r = part + i, row = first_row + r;
        const bool valid = row < info.length;
        const uint32_t result = result_offset(row, 4 * lane);
        float f[4], k[4], q[4], v[4], dv[4], from_q[4], from_row[4], from_col[4], from_tail[4];
        unpack4(f, *reinterpret_cast<const uint2*>(base + kTileGate + row * 256 + lane * 8));
        unpack4(k, scale4(raw_k[i], norms[r]));
        unpack4(q, scale4(raw_q[i], norms[kRows + r]));
        const uint2 packed_dv =
            *reinterpret_cast<const uint2*>(base + kTileGrad + (lane >> 4) * kSlab +
                                            slab_offset(row, (lane & 15) >> 1) + (lane & 1) * 8);
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
          const float e = gate_exponential(f[c], scale.slope, bias[c]);
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
        dots[2 + i] = along_q;
        dots[4 + i] = along_beta;
        if (valid) put(p.dv, r, packed_dv);
      }
      const float dot = butterfly_sum8(dots, lane);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int r = part + i;
        const float norm_k = norms[r], norm_q = norms[kRows + r];
        const float back_k = __shfl_sync(0xffffffffu, dot, 2 * i) * norm_k;
        const float back_q = __shfl_sync(0xffffffffu, dot, 4 + 2 * i) * norm_q;
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
      const int row = first_row + part + ((lane - 8) >> 1);
      if ((lane == 8 || lane == 10) && row < info.length) {
        const int64_t index = (info.first_token + row) * p.base.row_heads + head;
        const float logit = __uint_as_float(uint32_t{p.base.beta_logit[index]} << 16);
        const __nv_bfloat16_raw bits = __float2bfloat16_rn(dot / (1.0f + __expf(logit)));
        p.dbeta[index] = bits.x;
      }
    }
#pragma unroll
    for (int r = kRows - 2; r >= 0; --r)
#pragma unroll
      for (int c = 0; c < 4; ++c) suffix[r][c] += suffix[r + 1][c];
    store4(base + kDecaySums + (warp * kDim + 4 * lane) * 4, suffix[0]);
    store4(base + kTailSums + (warp * kDim + 4 * lane) * 4, tails);
  }
  fence_async_shared();
  gradient_barrier();
  next();
  // What a warp's rows get from the other warps' rows: db of later ones, k tail of earlier ones.
  if (me.thread < kDim) {
    float* const later = reinterpret_cast<float*>(base + kDecaySums) + me.thread;
    const float* const earlier = reinterpret_cast<const float*>(base + kTailSums) + me.thread;
    float sum = reinterpret_cast<const float*>(base + kStateTerm)[me.thread];
#pragma unroll 4
    for (int w = kGradientWarps - 1; w >= 0; --w) {
      const float own = later[w * kDim];
      later[w * kDim] = sum;
      sum += own;
    }
    sum = 0.0f;
#pragma unroll 4
    for (int w = 0; w < kGradientWarps; ++w) {
      later[w * kDim] += sum;
      sum += earlier[w * kDim];
    }
  }
  gradient_barrier();
  float start[4], totals[4] = {};
  load4(start, base + kDecaySums + (warp * kDim + 4 * lane) * 4);
  float rate = 0.0f;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float f[4], df[4];
    unpack4(f,
            *reinterpret_cast<const uint2*>(base + kTileGate + (first_row + r) * 256 + lane * 8));
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
  store4(base + kRowTotals + (warp * kDim + 4 * lane) * 4, totals);
  if (lane == 0) reinterpret_cast<float*>(base + kRateSums)[warp] = rate;
  gradient_barrier();
  if (me.thread <= kDim) {
    const float* from = me.thread == 0
                            ? reinterpret_cast<const float*>(base + kRateSums)
                            : reinterpret_cast<const float*>(base + kRowTotals) + (me.thread - 1);
    const int stride = me.thread == 0 ? 1 : kDim;
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kGradientWarps; ++w) total += from[w * stride];
    p.partials[(int64_t{chunk} * p.base.row_heads + head) * kPartials + me.thread] = total;
  }
}

/// The block's share of one head: chunks `chunk`, `chunk + step`, ... below `chunks`.
LOCKSTEP_DEVICE void gradient_items(
    const BackwardParams& p, int chunk, int chunks, int step, int head, unsigned char* base) {
  if (chunk >= chunks) return;
  const uint32_t shared = smem_address(base);
  const uint32_t bar = shared + kGradientBarrier;
  GateScale scale;
  {
    const GradientThread me;
    if (me.thread < kDim)
      reinterpret_cast<float*>(base + kHeadBias)[me.thread] =
          p.base.dt_bias[head * kDim + me.thread];
    const float rate = expf(p.base.a_log[head]);
    scale.decay = p.base.decay_scale;
    scale.gradient = p.base.decay_scale * 0.6931471805599453f * rate;
    scale.slope = -rate * 1.4426950408889634f;
    if (me.thread == 0) load_chain_tiles(p, chunk, head, shared);
  }
  uint32_t parity = 0;
  for (; chunk < chunks; chunk += step) {
    const ChunkInfo info = load_chunk_info(p.base, chunk, 0);
    {
      const GradientThread me;
      GradientRows rows;
      load_gradient_rows(shared, p, info, head, me.thread);
      rows.load(p, info, head, me.warp, me.lane);
      copy_wait<1>();
      gradient_barrier();
      float b[kRows][4];
      sum_gate(b, scale, info.length, base, me.warp, me.lane);
      rows.normalize(base, me.warp, me.lane);
      gradient_barrier();
      find_middles(base, me.thread);
      gradient_barrier();
      write_gradient_operands(rows, b, base, me.warp, me.lane);
      copy_wait<0>();
      fence_async_shared();
      gradient_barrier();
      if (chunk + step < chunks) {
        const ChunkInfo after = load_chunk_info(p.base, chunk + step, 0);
        prefetch_chunk(p, chunk + step, after, head, me.thread);
      }
    }
    barrier_wait(bar, parity);
    parity ^= 1;
    gradient_products(base);
    gradient_rows(p, info, chunk, head, scale, base, [&] {
      const GradientThread me;
      if (me.thread == 0 && chunk + step < chunks) load_chain_tiles(p, chunk + step, head, shared);
    });
  }
}

}  // namespace lockstep::model::kda
