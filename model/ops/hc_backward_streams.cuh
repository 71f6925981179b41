#pragma once

// Second kernel of the boundary backward: gradients of the streams, and everything that is a sum
// over channels or tokens. 32 blocks form a team, each has 128 channels of the four streams for
// good; teams take tiles of 16 tokens in turn. No block waits for another.
//
// Two warps copy tiles into shared memory, three ahead; eight warps turn them into gradients, 16
// channels each; two warps add up dpost and dcomb from what the eight left there.
//
// Channels are the rows of the matrix products and tokens their columns, so that a lane gets dz for
// two neighbouring channels of two tokens, all four streams, and the bf16 pairs of X' it computes
// are, as they are, the operand of dfn += X'^T dm. fn as tf32 stays in shared memory, dfn in
// registers (48 a lane), both for the whole launch.
//
// Limits (8192 tokens): 57% of the issue slots used, 131 instructions a channel and token,
// two math warps a scheduler. Sixteen math warps (half of a tile's tokens each) need 104
// registers, spill 50 bytes and take 0.41 instead of 0.31 ms: beside the stages, the first-level
// cache cannot hold the spills. Bulk copies of the rows take 60 clocks each (0.75 ms). The streams
// are read twice, here and for the sums, 48 of 168 KB a token; visiting the tiles that were read
// last first wins nothing.

#include "model/ops/hc_backward_layout.cuh"

namespace lockstep::model::hc {

constexpr int kMathWarps = kBackWidth / 16;
constexpr int kGramWarps = 2;
constexpr int kCopyWarps = 2;
constexpr int kStreamsThreads = 32 * (kMathWarps + kCopyWarps + kGramWarps);
constexpr int kStages = 3;

/// A stage: 16 tokens of X and of dX' (dx_next at first), y, dx_normed, records. Rows of 256 bytes;
/// the pitches put the rows that a warp touches at once (every second token, or the eight rows of
/// two tokens) into different banks.
constexpr int kRowPitch = kBackWidth * 2 + 32, kTokenPitch = kStreams * kRowPitch + 16;
constexpr int kVectorPitch = kBackWidth * 2 + 16;
constexpr int kXAt = 0, kDAt = kBackTile * kTokenPitch, kYAt = 2 * kDAt,
              kGAt = kYAt + kBackTile * kVectorPitch,
              kStreamBytes = kGAt + kBackTile * kVectorPitch;

struct alignas(128) Stage {
  unsigned char streams[kStreamBytes];
  Record records[kBackTile];
};
struct StreamsShared {
  Stage stages[kStages];
  uint4 fn[kMathWarps * kStreams * 3][32];
  uint64_t full[kStages];
};
static_assert(sizeof(StreamsShared) <= 227 * 1024 - 1024, "shared memory of one block");

/// Hand-over of a stage: copies to math by a barrier in memory that the copies arrive on; math to
/// the Gram warps and these (or math) back to the copies by named barriers. The copies are ahead,
/// so that Gram warps find them waiting.
constexpr int kMathThreads = 32 * kMathWarps, kCopyThreads = 32 * kCopyWarps,
              kGramThreads = 32 * kGramWarps;
LOCKSTEP_DEVICE void mixed_arrive(int stage) {
  hopper::named_barrier_arrive(1 + stage, kMathThreads + kGramThreads);
}
LOCKSTEP_DEVICE void mixed_wait(int stage) {
  hopper::named_barrier(1 + stage, kMathThreads + kGramThreads);
}
template <bool kMixes>
constexpr int kEmptyThreads = kCopyThreads + (kMixes ? kGramThreads : kMathThreads);
template <bool kMixes>
LOCKSTEP_DEVICE void empty_arrive(int stage) {
  hopper::named_barrier_arrive(1 + kStages + stage, kEmptyThreads<kMixes>);
}
template <bool kMixes>
LOCKSTEP_DEVICE void empty_wait(int stage) {
  hopper::named_barrier(1 + kStages + stage, kEmptyThreads<kMixes>);
}

/// The tiles of a team in this pass: every kBackTeams-th.
struct Tiles {
  int team, count;
  LOCKSTEP_DEVICE explicit Tiles(const BackwardParams& p, int of_team) : team(of_team) {
    const int all = static_cast<int>((p.end - p.begin + kBackTile - 1) / kBackTile);
    count = (all - team + kBackTeams - 1) / kBackTeams;
  }
  /// First token of the k-th tile, counted from p.begin.
  LOCKSTEP_DEVICE int token(int k) const { return (team + k * kBackTeams) * kBackTile; }
};

/// Copies one tile after another, 16 bytes a thread and instruction (bulk copies of rows this short
/// take 60 clocks each). Rows beyond the last token are zero.
template <bool kMixes, bool kProjects>
LOCKSTEP_DEVICE void run_copies(
    const BackwardParams& p, const Tiles& tiles, int slice, int thread, StreamsShared& shared) {
  const int count = static_cast<int>(p.end - p.begin);
  const int chunk = thread % 16, part = thread / 16;  // 16 bytes of a row, one of four rows
  static_assert(kCopyWarps == 2 && kBackWidth * 2 == 16 * 16);
  const int64_t column = p.begin * kWidth + slice * kBackWidth + chunk * 8;
  for (int k = 0; k < tiles.count; ++k) {
    const int s = k % kStages, first = tiles.token(k);
    Stage& stage = shared.stages[s];
    if (k >= kStages) empty_wait<kMixes>(s);
    const uint32_t streams = hopper::smem_address(stage.streams) + part * kRowPitch + chunk * 16;
    const uint32_t vectors =
        hopper::smem_address(stage.streams) + kYAt + part * kVectorPitch + chunk * 16;
    const uint32_t records = hopper::smem_address(stage.records);
    const char* const from = reinterpret_cast<const char*>(p.records + first);
    for (int c = thread * 16; c < kBackTile * static_cast<int>(sizeof(Record)); c += 1024)
      hopper::copy16(records + c, from + c, true);
    const uint16_t* const x =
        p.x + p.begin * (kRow - kWidth) + column + (first * 4 + part) * int64_t{kWidth};
    const uint16_t* const d = p.dx_next + (x - p.x);
#pragma unroll 8
    for (int t = 0; t < kBackTile; ++t) {
      const bool valid = first + t < count;
      hopper::copy16(streams + kXAt + t * kTokenPitch, x + t * kRow, valid);
      hopper::copy16(streams + kDAt + t * kTokenPitch, d + t * kRow, valid);
    }
#pragma unroll
    for (int step = 0; step < kBackTile / 4; ++step) {
      const int token = first + step * 4 + part;
      const int64_t at = column + token * int64_t{kWidth};
      const uint32_t to = vectors + step * 4 * kVectorPitch;
      if (kMixes) hopper::copy16(to, p.y + at, token < count);
      if (kProjects) hopper::copy16(to + kGAt - kYAt, p.dx_normed + at, token < count);
    }
    hopper::copy_arrive(hopper::smem_address(&shared.full[s]));
  }
}

/// dpost and dcomb of a tile: per token the products of dX' (four rows) with X and y, as parts of
/// 16x8 products of the rows of four tokens with those of two. Each warp has eight tokens.
LOCKSTEP_DEVICE void run_gram(
    const BackwardParams& p, const Tiles& tiles, int slice, int half, StreamsShared& shared) {
  const int lane = threadIdx.x & 31, row = lane >> 2, quad = lane & 3;
  for (int k = 0; k < tiles.count; ++k) {
    const int s = k % kStages;
    const Stage& stage = shared.stages[s];
    // Satisfied already, since math waited for it; for tools that follow one barrier at a time.
    hopper::barrier_wait(hopper::smem_address(&shared.full[s]), (k / kStages) & 1);
    mixed_wait(s);
    float with_x[2][2][4], with_y[2][4];  // [four tokens][two of them]
#pragma unroll
    for (int e = 0; e < 4; ++e)
#pragma unroll
      for (int a = 0; a < 2; ++a) with_x[a][0][e] = with_x[a][1][e] = with_y[a][e] = 0.0f;
    // Lane addresses: rows 0-7 and 8-15 of a pair of 8x8 blocks, then the next 8 channels.
    const uint32_t streams = hopper::smem_address(stage.streams) + half * 8 * kTokenPitch;
    const auto row_at = [](int r) { return (r >> 2) * kTokenPitch + (r & 3) * kRowPitch; };
    const uint32_t d_at = streams + kDAt + row_at(lane & 15) + (lane >> 4) * 16;
    const uint32_t x_at =
        streams + kXAt + row_at((lane & 7) + (lane >> 4) * 8) + ((lane >> 3) & 1) * 16;
    const uint32_t y_at = hopper::smem_address(stage.streams) + kYAt +
                          (half * 8 + (lane & 7)) * kVectorPitch + ((lane >> 3) & 1) * 16;
#pragma unroll 2
    for (int step = 0; step < kBackWidth / 16; ++step) {
      uint32_t y[2];
      hopper::load_matrix2(y, y_at + step * 32);
#pragma unroll
      for (int a = 0; a < 2; ++a) {
        uint32_t d[4], x[4];
        hopper::load_matrix4(d, d_at + a * 4 * kTokenPitch + step * 32);
        hopper::load_matrix4(x, x_at + a * 4 * kTokenPitch + step * 32);
        hopper::mma_bf16(with_x[a][0], d, x[0], x[1]);
        hopper::mma_bf16(with_x[a][1], d, x[2], x[3]);
        hopper::mma_bf16(with_y[a], d, y[0], y[1]);
      }
    }
    __syncwarp();
    // Not just an arrival: racecheck does not order matrix loads before one.
    if (k + kStages < tiles.count) empty_wait<true>(s);
    // Product rows: token row / 4 (+ 2), target stream row % 4. Columns: token, source stream.
    const int own = row >> 2, target = row & 3;
#pragma unroll
    for (int a = 0; a < 2; ++a) {
      const int64_t token = tiles.token(k) + half * 8 + a * 4 + own;
      float* const to = p.mix_sums + (token * kBackSlices + slice) * kMixSums;
      if (own == (quad >> 1)) {
        const int source = (quad & 1) * 2;
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          float* const comb = to + b * 2 * (kBackSlices * kMixSums) + 4 + source * 4 + target;
          comb[0] = with_x[a][b][2 * b];
          comb[4] = with_x[a][b][2 * b + 1];
        }
      }
      if (quad == 2 * a) to[target] = own ? with_y[a][1] : with_y[a][0];
      if (quad == 2 * a + 1)
        to[2 * (kBackSlices * kMixSums) + target] = own ? with_y[a][3] : with_y[a][2];
    }
  }
}

/// fn's rows for this slice, in the order in which lanes want them: matrix row r is channel 2 r of
/// the warp's 16, row r + 8 channel 2 r + 1. Threads of the math warps.
LOCKSTEP_DEVICE void load_fn(const BackwardParams& p, int slice, StreamsShared& shared) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = lane >> 2, quad = lane & 3;
#pragma unroll
  for (int i = 0; i < kStreams; ++i)
#pragma unroll
    for (int step = 0; step < 3; ++step) {
      const float* from =
          p.fn + (step * 8 + quad) * kRow + i * kWidth + slice * kBackWidth + warp * 16 + row * 2;
      const auto term = [&](float v) { return hopper::to_tf32(rounded_if(p.bf16_fn, v)); };
      const float2 a = __ldg(reinterpret_cast<const float2*>(from));
      const float2 b = __ldg(reinterpret_cast<const float2*>(from + 4 * kRow));
      shared.fn[(warp * kStreams + i) * 3 + step][lane] =
          make_uint4(term(a.x), term(a.y), term(b.x), term(b.y));
    }
}

struct FnSums {
  float value[kStreams][3][4];
};

/// Gradients of one tile, 16 channels (two a lane) of 16 tokens (2 quad, 2 quad + 1, and 8 on).
template <BackwardMix kMix, bool kProjects, bool kUsualNorm>
LOCKSTEP_DEVICE void math_tile(const BackwardParams& p,
                               int first_token,
                               int channel,
                               Stage& stage,
                               const StreamsShared& shared,
                               const float (&weight)[2],
                               float (&norm_sums)[2],
                               FnSums& fn_sums) {
  constexpr bool kMixes = kMix != BackwardMix::kNone;
  constexpr bool kThree = kMix == BackwardMix::kThreeRoundings;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = lane >> 2, quad = lane & 3;
  unsigned char* const column = stage.streams + (warp * 16 + row * 2) * 2;
  const auto word_at = [&](int at) -> uint32_t& {
    return *reinterpret_cast<uint32_t*>(column + at);
  };
  uint32_t operand[kStreams][4];  // X' by pairs of tokens
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float d[kStreams][4];  // dX': channel 0 of tokens 0 and 1, channel 1 of both
#pragma unroll
    for (int e = 0; e < 2; ++e)
#pragma unroll
      for (int i = 0; i < kStreams; ++i) {
        const int token = half * 8 + quad * 2 + e;
        const uint32_t word = word_at(kDAt + token * kTokenPitch + i * kRowPitch);
        d[i][e] = hopper::low_bf16(word), d[i][2 + e] = hopper::high_bf16(word);
      }
    if constexpr (kProjects) {
      const float* const dm = stage.records[half * 8 + row].dm;
#pragma unroll
      for (int step = 0; step < 3; ++step) {
        const uint32_t b0 = hopper::to_tf32(dm[step * 8 + quad]);
        const uint32_t b1 = hopper::to_tf32(dm[step * 8 + quad + 4]);
#pragma unroll
        for (int i = 0; i < kStreams; ++i)
          hopper::mma_tf32(d[i], shared.fn[(warp * kStreams + i) * 3 + step][lane], b0, b1);
      }
    }
    uint32_t first_words[kStreams];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int token = half * 8 + quad * 2 + e;
      const Record& record = stage.records[token];
      const int streams = token * kTokenPitch;
      float post[4], comb[4][4];  // [target][source]
      if constexpr (kMixes) {
        const float4* const from = reinterpret_cast<const float4*>(record.post);
        const float4 v = from[0];
        post[0] = v.x, post[1] = v.y, post[2] = v.z, post[3] = v.w;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float4 c = from[1 + i];
          comb[0][i] = c.x, comb[1][i] = c.y, comb[2][i] = c.z, comb[3][i] = c.w;
        }
      }
      if constexpr (kProjects) {
        uint32_t z[kStreams];
#pragma unroll
        for (int i = 0; i < 4; ++i) z[i] = word_at(streams + kXAt + i * kRowPitch);
        if constexpr (kMixes) {
          float low[4], high[4];
#pragma unroll
          for (int i = 0; i < 4; ++i)
            low[i] = hopper::low_bf16(z[i]), high[i] = hopper::high_bf16(z[i]);
          const uint32_t y = word_at(kYAt + token * kVectorPitch);
#pragma unroll
          for (int j = 0; j < 4; ++j)
            z[j] = hopper::pack_bf16(mixed<kThree>(post[j], hopper::low_bf16(y), comb[j], low),
                                     mixed<kThree>(post[j], hopper::high_bf16(y), comb[j], high));
        }
        if (e == 0) {
#pragma unroll
          for (int i = 0; i < 4; ++i) first_words[i] = z[i];
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            operand[i][2 * half] = __byte_perm(first_words[i], z[i], 0x5410);
            operand[i][2 * half + 1] = __byte_perm(first_words[i], z[i], 0x7632);
          }
        }
        const float4 pre = *reinterpret_cast<const float4*>(record.pre);
        const float4 norm = *reinterpret_cast<const float4*>(&record.inverse);
        const float pre_of[4] = {pre.x, pre.y, pre.z, pre.w};
        float u_low = pre.x * hopper::low_bf16(z[0]), u_high = pre.x * hopper::high_bf16(z[0]);
#pragma unroll
        for (int i = 1; i < 4; ++i) {
          u_low = __fmaf_rn(pre_of[i], hopper::low_bf16(z[i]), u_low);
          u_high = __fmaf_rn(pre_of[i], hopper::high_bf16(z[i]), u_high);
        }
        const uint32_t rounded = hopper::pack_bf16(u_low, u_high);
        const uint32_t g = word_at(kGAt + token * kVectorPitch);
        const auto du = [&](float u, float stored, float grad, int which) {
          const float xhat = stored * norm.x;
          norm_sums[which] = __fmaf_rn(
              grad, !kUsualNorm && p.two_norm_roundings ? to_bf16(xhat) : xhat, norm_sums[which]);
          const float measured = !kUsualNorm && p.unrounded_statistic ? u : stored;
          return __fmaf_rn(norm.x, grad * weight[which], -norm.y * measured);
        };
        const float du_low = du(u_low, hopper::low_bf16(rounded), hopper::low_bf16(g), 0);
        const float du_high = du(u_high, hopper::high_bf16(rounded), hopper::high_bf16(g), 1);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          d[i][e] =
              __fmaf_rn(-norm.z, hopper::low_bf16(z[i]), __fmaf_rn(pre_of[i], du_low, d[i][e]));
          d[i][2 + e] = __fmaf_rn(
              -norm.z, hopper::high_bf16(z[i]), __fmaf_rn(pre_of[i], du_high, d[i][2 + e]));
        }
      }
      if constexpr (kMixes && kProjects) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          word_at(streams + kDAt + i * kRowPitch) = hopper::pack_bf16(d[i][e], d[i][2 + e]);
      }
      const int64_t at = p.begin + first_token + token;
      if (at < p.end) {
        uint32_t* const dx = reinterpret_cast<uint32_t*>(p.dx + at * kRow + channel);
        if constexpr (kMixes) {
          float low = 0.0f, high = 0.0f;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            low = __fmaf_rn(post[j], d[j][e], low);
            high = __fmaf_rn(post[j], d[j][2 + e], high);
          }
          *reinterpret_cast<uint32_t*>(p.dy + at * kWidth + channel) = hopper::pack_bf16(low, high);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            low = comb[0][i] * d[0][e], high = comb[0][i] * d[0][2 + e];
#pragma unroll
            for (int j = 1; j < 4; ++j) {
              low = __fmaf_rn(comb[j][i], d[j][e], low);
              high = __fmaf_rn(comb[j][i], d[j][2 + e], high);
            }
            dx[i * (kWidth / 2)] = hopper::pack_bf16(low, high);
          }
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            dx[i * (kWidth / 2)] = hopper::pack_bf16(d[i][e], d[i][2 + e]);
        }
      }
    }
  }
  if constexpr (kProjects) {
    // dm in two terms; lane's column is product `row` of each eight, contraction over tokens.
#pragma unroll
    for (int n = 0; n < 3; ++n) {
      uint32_t high[2], low[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float a = stage.records[half * 8 + quad * 2].dm[n * 8 + row];
        const float b = stage.records[half * 8 + quad * 2 + 1].dm[n * 8 + row];
        high[half] = hopper::pack_bf16(a, b);
        low[half] =
            hopper::pack_bf16(a - hopper::low_bf16(high[half]), b - hopper::high_bf16(high[half]));
      }
#pragma unroll
      for (int i = 0; i < kStreams; ++i) {
        hopper::mma_bf16(fn_sums.value[i][n], operand[i], low[0], low[1]);
        hopper::mma_bf16(fn_sums.value[i][n], operand[i], high[0], high[1]);
      }
    }
  }
}

template <BackwardMix kMix, bool kProjects, bool kUsualNorm>
LOCKSTEP_DEVICE void run_math(
    const BackwardParams& p, const Tiles& tiles, int team, int slice, StreamsShared& shared) {
  constexpr bool kMixes = kMix != BackwardMix::kNone;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = lane >> 2, quad = lane & 3;
  const int channel = slice * kBackWidth + warp * 16 + row * 2;
  FnSums sums;
  float weight[2] = {0, 0}, norm_sums[2] = {0, 0};
  // Where this lane's sums over tokens are: products 2 quad and 2 quad + 1 of each eight.
  const auto fn_at = [&](int i, int n, int e) {
    return reinterpret_cast<float2*>(
        p.fn_sums + (int64_t{team} * kLogits + n * 8 + quad * 2 + e) * kRow + i * kWidth + channel);
  };
  if constexpr (kProjects) {
    weight[0] = rounded_if(p.bf16_norm_weight, __ldg(p.norm_weight + channel));
    weight[1] = rounded_if(p.bf16_norm_weight, __ldg(p.norm_weight + channel + 1));
#pragma unroll
    for (int i = 0; i < kStreams; ++i)
#pragma unroll
      for (int n = 0; n < 3; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float2 v = p.first_pass ? make_float2(0.0f, 0.0f) : *fn_at(i, n, e);
          sums.value[i][n][e] = v.x, sums.value[i][n][2 + e] = v.y;
        }
  }
  for (int k = 0; k < tiles.count; ++k) {
    const int s = k % kStages;
    hopper::barrier_wait(hopper::smem_address(&shared.full[s]), (k / kStages) & 1);
    math_tile<kMix, kProjects, kUsualNorm>(
        p, tiles.token(k), channel, shared.stages[s], shared, weight, norm_sums, sums);
    __syncwarp();  // an arrival counts a whole warp, whichever of its threads execute it
    if constexpr (kMixes) {
      mixed_arrive(s);
    } else if (k + kStages < tiles.count) {
      empty_arrive<false>(s);
    }
  }
  if constexpr (kProjects) {
#pragma unroll
    for (int i = 0; i < kStreams; ++i)
#pragma unroll
      for (int n = 0; n < 3; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          *fn_at(i, n, e) = make_float2(sums.value[i][n][e], sums.value[i][n][2 + e]);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      norm_sums[e] += __shfl_xor_sync(kAllLanes, norm_sums[e], 1);
      norm_sums[e] += __shfl_xor_sync(kAllLanes, norm_sums[e], 2);
    }
    if (quad == 0) {
      float2* const to = reinterpret_cast<float2*>(p.norm_sums + team * kWidth + channel);
      const float2 before = p.first_pass ? make_float2(0.0f, 0.0f) : *to;
      *to = make_float2(before.x + norm_sums[0], before.y + norm_sums[1]);
    }
  }
}

extern __shared__ __align__(128) unsigned char streams_dynamic[];

template <BackwardMix kMix, bool kProjects, bool kUsualNorm>
__global__ void __launch_bounds__(kStreamsThreads, 1)
    backward_streams_kernel(const __grid_constant__ BackwardParams p) {
  constexpr bool kMixes = kMix != BackwardMix::kNone;
  StreamsShared& shared = *reinterpret_cast<StreamsShared*>(streams_dynamic);
  const int slice = blockIdx.x % kBackSlices, team = blockIdx.x / kBackSlices;
  const int warp = threadIdx.x >> 5;
  const Tiles tiles(p, team);
  if (threadIdx.x == 0)
    for (int s = 0; s < kStages; ++s)
      hopper::barrier_init(hopper::smem_address(&shared.full[s]), kCopyThreads);
  hopper::launch_dependents();
  if (kProjects && warp < kMathWarps) load_fn(p, slice, shared);
  hopper::wait_for_previous_kernel();
  __syncthreads();
  if (warp < kMathWarps) {
    run_math<kMix, kProjects, kUsualNorm>(p, tiles, team, slice, shared);
  } else if (warp < kMathWarps + kCopyWarps) {
    run_copies<kMixes, kProjects>(p, tiles, slice, threadIdx.x - 32 * kMathWarps, shared);
  } else if (kMixes) {
    run_gram(p, tiles, slice, warp - kMathWarps - kCopyWarps, shared);
  }
}

}  // namespace lockstep::model::hc
