#pragma once

// What the kernels of the backward pass hand to each other through device memory, one window of
// chunks at a time. Every tile is stored as it will lie in shared memory, so bulk copies move it.

#include "model/ops/kda_forward_tiles.cuh"

namespace lockstep::model::kda {

constexpr int kStateHalf = 2 * kSlab;        // 64 V x 128 K bf16: K 0-63, then 64-127
constexpr int kStateBytes = 2 * kStateHalf;  // V 0-63, then 64-127
constexpr int kPartials = 1 + kDim;          // floats of a chunk and head: dA_log, then d dt_bias
constexpr float kScale = 0.08838834764831845f;  // s = 128^-1/2
constexpr float kInverseScale = 11.313708498984761f;

struct BackwardParams {
  Params base;           // `tiles` holds the window's records: `ring` chunks
  int first, last;       // chunks of this window; `last` may exceed the number of chunks
  const uint16_t* dout;  // [T, H, V]
  const float* dfinal;   // [N, H, K, V] or null
  float* dinitial;       // [N, H, K, V] or null
  uint16_t *dq, *dk, *dv, *df, *dbeta;
  // workspace, per (chunk of the window, head)
  unsigned char* state;       // S entering the chunk, transposed, kStateBytes
  unsigned char* state_grad;  // gradient of S leaving it over s, likewise
  unsigned char* n;           // N, tile
  unsigned char* dv_tiles;    // dv = s beta Y, tile
  // workspace
  float* carry;     // [heads, 2 V halves, 64, 128] gradient of S between windows, in chain order
  float* partials;  // [chunks, heads, kPartials]
};

LOCKSTEP_DEVICE int64_t pair_at(const BackwardParams& p, int chunk, int head) {
  return int64_t{chunk - p.first} * p.base.heads + head;
}
LOCKSTEP_DEVICE int window_end(const BackwardParams& p) {
  return min(p.last, p.base.chunk_begin[p.base.documents]);
}

}  // namespace lockstep::model::kda
