#pragma once

// From fp32 sums in registers to bf16 results in device memory, with SwiGLU and its gradient.

#include "model/ops/moe_gemm_schedule.cuh"

namespace lockstep::model::moe {

LOCKSTEP_DEVICE float clamp_above(float x, float limit) {  // NaN stays
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(limit));
  return y;
}
LOCKSTEP_DEVICE float clamp_below(float x, float limit) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(limit));
  return y;
}
LOCKSTEP_DEVICE void unpack(uint32_t packed, float (&x)[2]) {
  x[0] = low_bf16(packed);
  x[1] = high_bf16(packed);
}

/// SwiGLU of a pair of packed bf16 values with the roundings of D53.
template <int kRoundings>
struct Swiglu {
  float gate[2], up[2];              // clamped
  float sigmoid[2], first[2];        // first: as it multiplies gate
  float unrounded[2], activated[2];  // gate * first

  LOCKSTEP_DEVICE Swiglu(float limit, uint32_t packed_gate, uint32_t packed_up) {
    unpack(packed_gate, gate);
    unpack(packed_up, up);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      gate[i] = clamp_above(gate[i], limit);
      up[i] = clamp_below(clamp_above(up[i], limit), -limit);
      sigmoid[i] = reciprocal_approx(1.0f + exp2_approx(gate[i] * -1.44269504f));
      first[i] = sigmoid[i];
    }
    if constexpr (kRoundings == 3) unpack(pack_bf16(sigmoid[0], sigmoid[1]), first);
#pragma unroll
    for (int i = 0; i < 2; ++i) activated[i] = unrounded[i] = gate[i] * first[i];
    if constexpr (kRoundings >= 2) unpack(pack_bf16(unrounded[0], unrounded[1]), activated);
  }
  LOCKSTEP_DEVICE uint32_t h() const {
    return pack_bf16(activated[0] * up[0], activated[1] * up[1]);
  }
  /// Of activated with respect to gate; roundings count as the identity.
  LOCKSTEP_DEVICE float slope(int i) const {
    const float product = kRoundings == 3 ? gate[i] * sigmoid[i] : unrounded[i];
    return fmaf(product, 1.0f - sigmoid[i], first[i]);
  }
};

template <Product kProduct>
LOCKSTEP_DEVICE void finish_plain(
    const ProductParams& p, const Group& g, const float (&d)[128], int expert, const Tile& t) {
  constexpr bool kSums = kProduct == Product::kWeights;
  const CUtensorMap* map = kSums ? &p.weights : p.out + expert;
#pragma unroll
  for (int c = 0; c < kSlabsB; ++c)
    g.store(c & 1,
            map,
            t.column * kTileColumns + 64 * c,
            t.row + 64 * g.index,
            kSums ? expert : 0,
            [&](int q, uint32_t(&w)[4]) {
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                const int at = 32 * c + 8 * q + 2 * i;
                w[i] = pack_bf16(d[at], d[at + 1]);
              }
            });
}

/// Columns 0 .. 127 are of gate, the others of up.
template <int kRoundings>
LOCKSTEP_DEVICE void finish_gate_up(
    const ProductParams& p, const Group& g, const float (&d)[128], int expert, const Tile& t) {
  const int row = t.row + 64 * g.index;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int column = t.column * 128 + 64 * c;
    const auto product = [&](int first) {
      return [&, first](int q, uint32_t(&w)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = first + 32 * c + 8 * q + 2 * i;
          w[i] = pack_bf16(d[at], d[at + 1]);
        }
      };
    };
    if (p.keep) {
      g.store(c, p.kept + expert, column, row, 0, product(0));
      g.store(c ^ 1, p.kept + expert, p.inner + column, row, 0, product(64));
    }
    g.store(c, p.hidden + expert, column, row, 0, [&](int q, uint32_t(&w)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 32 * c + 8 * q + 2 * i;
        const uint32_t gate = pack_bf16(d[at], d[at + 1]);
        const uint32_t up = pack_bf16(d[64 + at], d[64 + at + 1]);
        w[i] = Swiglu<kRoundings>(p.limit, gate, up).h();
      }
    });
  }
}

/// Gate and up come through the ring, 64 columns at a time: slabs 0 and 1 gate, 2 and 3 up, of 64
/// rows each. Their gradients take their places, h slabs 4 and 5, and the stage is released when
/// the stores have read it.
template <int kRoundings>
LOCKSTEP_DEVICE void finish_hidden(const ProductParams& p,
                                   const Group& g,
                                   Ring& ring,
                                   const float (&d)[128],
                                   int expert,
                                   const Tile& t,
                                   int steps) {
  const int row = t.row + 64 * g.index;
  int before = -1;
#pragma unroll
  for (int c = 0; c < kSlabsB; ++c) {
    if (c < steps) {
      barrier_wait(g.full(ring.stage), ring.parity);
      const uint32_t stage = g.shared + ring.stage * kStageBytes;
      const uint32_t gate_at = stage + g.index * kSlabBytes, up_at = gate_at + 2 * kSlabBytes,
                     h_at = gate_at + 4 * kSlabBytes;
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        uint32_t gate[4], up[4], h[4];
        load_matrix4(gate, g.at(gate_at, q));
        load_matrix4(up, g.at(up_at, q));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = 32 * c + 8 * q + 2 * i;
          float raw_gate[2], raw_up[2], dh[2], dgate[2], dup[2];
          unpack(gate[i], raw_gate);
          unpack(up[i], raw_up);
          unpack(pack_bf16(d[at], d[at + 1]), dh);
          const Swiglu<kRoundings> s(p.limit, gate[i], up[i]);
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            dgate[k] = raw_gate[k] > p.limit ? 0.0f : dh[k] * s.up[k] * s.slope(k);
            dup[k] = fabsf(raw_up[k]) > p.limit ? 0.0f : dh[k] * s.activated[k];
          }
          h[i] = s.h();
          gate[i] = pack_bf16(dgate[0], dgate[1]);
          up[i] = pack_bf16(dup[0], dup[1]);
        }
        store_matrix4(g.at(gate_at, q), gate[0], gate[1], gate[2], gate[3]);
        store_matrix4(g.at(up_at, q), up[0], up[1], up[2], up[3]);
        store_matrix4(g.at(h_at, q), h[0], h[1], h[2], h[3]);
      }
      fence_async_shared();
      g.sync();
      if (g.thread == 0) {
        const int column = t.column * kTileColumns + 64 * c;
        if (column < p.inner) {
          tensor_store(p.out + expert, column, row, 0, gate_at);
          tensor_store(p.out + expert, p.inner + column, row, 0, up_at);
          tensor_store(p.hidden + expert, column, row, 0, h_at);
        }
        bulk_commit();
        bulk_wait_read_but<1>();
        if (before >= 0) g.release_for_all(before);
      }
      __syncwarp();
      before = ring.stage;
      ring.next();
    }
  }
  if (g.thread == 0 && before >= 0) {
    bulk_wait_read();
    g.release_for_all(before);
  }
  __syncwarp();
}

}  // namespace lockstep::model::moe
