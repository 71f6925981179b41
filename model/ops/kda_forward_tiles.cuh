#pragma once

// What preparation and chain agree on: the tile record of one (chunk, head), its layout in global
// and shared memory (they are the same bytes, so one bulk copy moves a tile), the chunk table, and
// the device-side argument block.

#include <cstdint>

#include "model/ops/hopper.cuh"

namespace lockstep::model::kda {

constexpr int kChunk = 64;        // tokens per chunk
constexpr int kSub = 16;          // rows per anchored sub-chunk
constexpr int kDim = 128;         // K = V
constexpr int kSlab = 8192;       // bytes of 64 rows x 64 bf16, rows of 128 bytes, 128-byte swizzle
constexpr int kTile = 2 * kSlab;  // 64 x 128: channels 0-63, then 64-127

// Record of one (chunk, head), in the order in which the chain needs the tiles.
constexpr int kTileStart = 0;               // K~ = k exp(b)         [64 tokens, 128 K]
constexpr int kTileP = kTileStart + kTile;  // P = (I+L)^-1 diag(beta) [64, 64 tokens]
constexpr int kTileQ = kTileP + kSlab;      // Q~ = q exp(b)         [64 tokens, 128 K]
constexpr int kTileK = kTileQ + kTile;      // K- = k exp(b_C - b)   [64 tokens, 128 K]
constexpr int kTileM = kTileK + kTile;      // M                     [64 tokens, 64 tokens]
constexpr int kTileDecay = kTileM + kSlab;  // exp(b_C)              [128] fp32
constexpr int kTileBytes = kTileDecay + 512;
static_assert(kTileBytes % 128 == 0, "records keep cache lines whole");

/// Byte of 16-byte piece `piece` (0-7) of row `row` in a slab of 128-byte rows.
LOCKSTEP_DEVICE uint32_t slab_offset(uint32_t row, uint32_t piece) {
  return row * 128 + ((piece ^ (row & 7)) << 4);
}

/// One chunk of the packed batch: never crosses a document.
struct ChunkInfo {
  int64_t first_token;
  int32_t length;  // 1..64
  int32_t document;
};

struct Params {
  int64_t documents;
  int heads;          // of this launch
  int row_heads;      // of a token's row in q, k, v, f, o, beta_logit and of a document's states
  int ring;           // slots per head of the tile ring
  int zero;           // 0, which the compiler does not know
  float decay_scale;  // lower bound * log2(e)
  const uint16_t* q;
  const uint16_t* k;
  const uint16_t* v;
  const uint16_t* f;
  const uint16_t* beta_logit;
  const float* a_log;
  const float* dt_bias;
  const int64_t* cu_seqlens;
  const float* initial_state;
  float* final_state;
  float* checkpoints;   // [windows, row_heads, K, V] states at chunks that are multiples, or null
  int checkpoint_mask;  // of this plus one (a power of two)
  uint16_t* o;
  // workspace
  unsigned char* tiles;
  ChunkInfo* chunks;
  int* chunk_begin;  // [documents + 1], first chunk of each document
  int* ready;        // [heads, ring]: 1 + chunk whose record the slot holds
  int* consumed;     // [heads, 2]: chunks whose record the chain of a V half has copied
};

LOCKSTEP_DEVICE unsigned char* record(const Params& p, int chunk, int head) {
  return p.tiles + (chunk % p.ring * p.heads + head) * int64_t{kTileBytes};
}

}  // namespace lockstep::model::kda
