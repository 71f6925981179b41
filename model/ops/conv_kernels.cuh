#pragma once

// Depthwise convolution of width 4 with silu: threads own neighbouring channels and walk down a
// block of rows with the last three rows in registers, so that every row is read once (and three
// rows twice where blocks meet). Loads of the next rows are in flight while one group of rows is
// computed. Document starts are found once per block and then met on the way.

#include <cstdint>

#include "model/ops/hopper.cuh"

namespace lockstep::model::conv {

constexpr int kTaps = 4;
constexpr int kBlockRows = 128;
constexpr int kThreads = 128;
constexpr int kForwardChannels = 8, kBackwardChannels = 4;  // per thread

struct Params {
  int64_t tokens, channels, documents;
  const int64_t* cu;
  const uint16_t* x;
  int64_t x_stride;
  const float* weight;
  const uint16_t* halo;
  bool bf16_weight;
  uint16_t* y;
  const uint16_t* dy;
  uint16_t *dx, *dhalo;
  float* weight_sums;  // [blocks of rows][C][4]
  float* dweight;
  int64_t column_blocks;
};

/// A run of rows of one document inside a block of rows.
struct Run {
  int64_t document, begin, end;  // of the document
  int64_t first, stop;           // rows of the run
};

/// The last document that starts at or before `row`: not empty, and it has the row.
LOCKSTEP_DEVICE int64_t document_of(const Params& p, int64_t row) {
  int64_t low = 0, high = p.documents;  // cu[low] <= row < cu[high]
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (__ldg(p.cu + middle) <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

template <class Work>
LOCKSTEP_DEVICE void for_runs(const Params& p, int64_t first, int64_t stop, const Work& work) {
  int64_t document = document_of(p, first);
  while (first < stop) {
    Run run{document, __ldg(p.cu + document), __ldg(p.cu + document + 1), first, 0};
    run.stop = min(run.end, stop);
    if (run.stop > first) work(run);
    first = max(first, run.stop);
    ++document;
  }
}

/// kWords neighbouring pairs of channels of one row.
template <int kWords>
struct Words {
  uint32_t word[kWords];
};
template <int kWords>
LOCKSTEP_DEVICE Words<kWords> load(const uint16_t* from) {
  Words<kWords> to;
  if constexpr (kWords == 4) {
    const uint4 v = __ldcs(reinterpret_cast<const uint4*>(from));
    to.word[0] = v.x, to.word[1] = v.y, to.word[2] = v.z, to.word[3] = v.w;
  } else {
    static_assert(kWords == 2);
    const uint2 v = __ldcs(reinterpret_cast<const uint2*>(from));
    to.word[0] = v.x, to.word[1] = v.y;
  }
  return to;
}
template <int kWords>
LOCKSTEP_DEVICE void store(uint16_t* to, const Words<kWords>& v) {
  if constexpr (kWords == 4) {
    __stcs(reinterpret_cast<uint4*>(to), make_uint4(v.word[0], v.word[1], v.word[2], v.word[3]));
  } else {
    __stcs(reinterpret_cast<uint2*>(to), make_uint2(v.word[0], v.word[1]));
  }
}

/// Row `row` as the document sees it: itself, its halo, or zeros.
template <int kWords>
LOCKSTEP_DEVICE Words<kWords> input_row(const Params& p,
                                        const Run& run,
                                        int64_t row,
                                        int64_t channel) {
  if (row >= run.begin) return load<kWords>(p.x + row * p.x_stride + channel);
  const int64_t h = row - run.begin + kTaps - 1;
  if (p.halo == nullptr || h < 0) return {};
  return load<kWords>(p.halo + (run.document * (kTaps - 1) + h) * p.channels + channel);
}

template <int kChannels>
LOCKSTEP_DEVICE void load_weight(const Params& p, int64_t channel, float (&w)[kTaps][kChannels]) {
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    const float4 v = __ldg(reinterpret_cast<const float4*>(p.weight) + channel + c);
    const float taps[kTaps] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < kTaps; ++j)
      w[j][c] = p.bf16_weight ? __bfloat162float(__float2bfloat16_rn(taps[j])) : taps[j];
  }
}

template <int kWords>
LOCKSTEP_DEVICE float value(const Words<kWords>& v, int c) {
  return c % 2 == 0 ? hopper::low_bf16(v.word[c / 2]) : hopper::high_bf16(v.word[c / 2]);
}

/// 1 / (1 + e^-v); v far below zero gives 0.
LOCKSTEP_DEVICE float sigmoid(float v) {
  return hopper::reciprocal_approx(1.0f + hopper::exp2_approx(-1.44269504f * v));
}

__global__ void __launch_bounds__(kThreads) forward_kernel(const __grid_constant__ Params p) {
  constexpr int kC = kForwardChannels, kW = kC / 2, kAhead = 4;
  const int64_t channel = (blockIdx.x % p.column_blocks * kThreads + threadIdx.x) * int64_t{kC};
  if (channel >= p.channels) return;
  const int64_t first = blockIdx.x / p.column_blocks * int64_t{kBlockRows};
  float w[kTaps][kC];
  load_weight(p, channel, w);
  for_runs(p, first, min(first + kBlockRows, p.tokens), [&](const Run& run) {
    Words<kW> window[kTaps - 1 + kAhead], next[kAhead];
    const auto fetch = [&](int64_t row) {
#pragma unroll
      for (int k = 0; k < kAhead; ++k)
        if (row + k < run.stop) next[k] = load<kW>(p.x + (row + k) * p.x_stride + channel);
    };
    fetch(run.first);
#pragma unroll
    for (int k = 0; k < kTaps - 1; ++k)
      window[k] = input_row<kW>(p, run, run.first - kTaps + 1 + k, channel);
#pragma unroll 1
    for (int64_t row = run.first; row < run.stop; row += kAhead) {
#pragma unroll
      for (int k = 0; k < kAhead; ++k) window[kTaps - 1 + k] = next[k];
      fetch(row + kAhead);
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        Words<kW> out;
#pragma unroll
        for (int c = 0; c < kC; c += 2) {
          float sum[2] = {0.0f, 0.0f};
#pragma unroll
          for (int e = 0; e < 2; ++e) {
#pragma unroll
            for (int j = 0; j < kTaps; ++j)
              sum[e] = __fmaf_rn(w[j][c + e], value(window[k + j], c + e), sum[e]);
            sum[e] *= sigmoid(sum[e]);
          }
          out.word[c / 2] = hopper::pack_bf16(sum[0], sum[1]);
        }
        if (row + k < run.stop) store(p.y + (row + k) * p.channels + channel, out);
      }
#pragma unroll
      for (int k = 0; k < kTaps - 1; ++k) window[k] = window[kAhead + k];
    }
  });
}

/// dpre = dy silu'(pre); dx[t] = sum_j w_j dpre[t + 3 - j] within the document, so that dx of row
/// t - 3 is complete at row t; three rows beyond the run are needed too. Rows before a document's
/// start are its halo.
__global__ void __launch_bounds__(kThreads, 5) backward_kernel(const __grid_constant__ Params p) {
  constexpr int kC = kBackwardChannels, kW = kC / 2, kAhead = 4, kBefore = kTaps - 1;
  const int64_t channel = (blockIdx.x % p.column_blocks * kThreads + threadIdx.x) * int64_t{kC};
  if (channel >= p.channels) return;
  const int64_t block = blockIdx.x / p.column_blocks, first = block * kBlockRows;
  float w[kTaps][kC], dw[kTaps][kC];
  load_weight(p, channel, w);
#pragma unroll
  for (int j = 0; j < kTaps; ++j)
#pragma unroll
    for (int c = 0; c < kC; ++c) dw[j][c] = 0.0f;
  for_runs(p, first, min(first + kBlockRows, p.tokens), [&](const Run& run) {
    Words<kW> window[kBefore + kAhead], next[kAhead], next_dy[kAhead];
    float dpre[kBefore + kAhead][kC];  // of rows row - 3, ...
    const int64_t last = min(run.end, run.stop + kBefore);
    const auto fetch = [&](int64_t row) {
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        if (row + k < last) {
          next[k] = load<kW>(p.x + (row + k) * p.x_stride + channel);
          next_dy[k] = load<kW>(p.dy + (row + k) * p.channels + channel);
        } else {
          next[k] = next_dy[k] = {};
        }
      }
    };
    fetch(run.first);
#pragma unroll
    for (int k = 0; k < kBefore; ++k) {
      window[k] = input_row<kW>(p, run, run.first - kBefore + k, channel);
#pragma unroll
      for (int c = 0; c < kC; ++c) dpre[k][c] = 0.0f;
    }
#pragma unroll 1
    for (int64_t row = run.first; row < run.stop + kBefore; row += kAhead) {
      Words<kW> dy[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; ++k) window[kBefore + k] = next[k], dy[k] = next_dy[k];
      fetch(row + kAhead);
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        const bool counts = row + k < run.stop, exists = row + k < last;
#pragma unroll
        for (int c = 0; c < kC; ++c) {
          float pre = 0.0f;
#pragma unroll
          for (int j = 0; j < kTaps; ++j) pre = __fmaf_rn(w[j][c], value(window[k + j], c), pre);
          const float s = sigmoid(pre);
          const float slope = s * __fmaf_rn(pre, sigmoid(-pre), 1.0f);
          const float d = exists ? value(dy[k], c) * slope : 0.0f;
          dpre[kBefore + k][c] = d;
          if (counts)
#pragma unroll
            for (int j = 0; j < kTaps; ++j)
              dw[j][c] = __fmaf_rn(d, value(window[k + j], c), dw[j][c]);
        }
        // Row row + k - 3.
        Words<kW> out;
#pragma unroll
        for (int c = 0; c < kC; c += 2) {
          float sum[2] = {0.0f, 0.0f};
#pragma unroll
          for (int e = 0; e < 2; ++e)
#pragma unroll
            for (int j = 0; j < kTaps; ++j)
              sum[e] = __fmaf_rn(w[j][c + e], dpre[k + kTaps - 1 - j][c + e], sum[e]);
          out.word[c / 2] = hopper::pack_bf16(sum[0], sum[1]);
        }
        const int64_t to = row + k - kBefore;
        if (to < run.stop) {
          if (to >= run.first) {
            store(p.dx + to * p.channels + channel, out);
          } else if (run.first == run.begin && p.dhalo != nullptr) {
            store(p.dhalo + (run.document * kBefore + to - run.begin + kBefore) * p.channels +
                      channel,
                  out);
          }
        }
      }
#pragma unroll
      for (int k = 0; k < kBefore; ++k) {
        window[k] = window[kAhead + k];
#pragma unroll
        for (int c = 0; c < kC; ++c) dpre[k][c] = dpre[kAhead + k][c];
      }
    }
  });
  float4* const to = reinterpret_cast<float4*>(p.weight_sums) + block * p.channels + channel;
#pragma unroll
  for (int c = 0; c < kC; ++c) to[c] = make_float4(dw[0][c], dw[1][c], dw[2][c], dw[3][c]);
}

/// Over the blocks of rows, in order.
__global__ void __launch_bounds__(kThreads) reduce_kernel(const __grid_constant__ Params p) {
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i >= p.channels * kTaps) return;
  const int64_t blocks = (p.tokens + kBlockRows - 1) / kBlockRows;
  float sum = 0.0f;
#pragma unroll 16
  for (int64_t b = 0; b < blocks; ++b) sum += __ldcs(p.weight_sums + b * p.channels * kTaps + i);
  p.dweight[i] = sum;
}

}  // namespace lockstep::model::conv
