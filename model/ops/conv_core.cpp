#include "model/ops/conv_core.hpp"

#include <algorithm>

#include "model/base/parallel.hpp"

namespace lockstep::model {
namespace {

using simd::load;
using simd::store;
using simd::Vec;

/// Channels that one pass holds in scratch: (kConvRows + width) x 256 floats stay in the L2 cache.
constexpr int64_t kConvChannels = 256;

int64_t padded(int64_t n, int64_t pad) { return (n + pad - 1) / pad * pad; }

/// Input row at `row` of the block's segment, channel c: the segment itself, its halo, or null for
/// zeros.
template <typename S, typename R>
const S* input_row(const ConvCall<S, R>& call, const ConvBlock& block, int64_t row, int64_t c) {
  if (row >= block.segment_begin) return call.x + row * call.x_stride + c;
  const int64_t halo_rows = call.width - 1;
  const int64_t h = row - block.segment_begin + halo_rows;
  if (!call.halo || h < 0) return nullptr;
  return call.halo + (block.segment * halo_rows + h) * call.channels + c;
}

/// Widens rows [first, last) of the segment, n channels from c, into in[row - first].
template <typename S, typename R>
void load_rows(const ConvCall<S, R>& call,
               const ConvBlock& block,
               int64_t first,
               int64_t last,
               int64_t c,
               int64_t n,
               int64_t ld,
               R* in) {
  for (int64_t row = first; row < last; ++row) {
    R* dst = in + (row - first) * ld;
    if (const S* src = input_row(call, block, row, c)) {
      simd::load_row(src, n, dst, ld);
    } else {
      std::fill(dst, dst + ld, R(0));
    }
  }
}

/// Weights of n channels from c, [width, ld].
template <typename S, typename R>
void load_weight(const ConvCall<S, R>& call, int64_t c, int64_t n, int64_t ld, R* w) {
  for (int64_t j = 0; j < call.width; ++j) {
    simd::load_row(call.weight + j * call.channels + c, n, w + j * ld, ld);
  }
}

/// sum_j w_j in[row + j], from 0, j ascending, product and sum rounded one after the other as in
/// the plain form.
template <typename R>
Vec<R> taps(const R* w, const R* in, int64_t width, int64_t ld) {
  Vec<R> acc{};
  for (int64_t j = 0; j < width; ++j) acc = acc + load(w + j * ld) * load(in + j * ld);
  return acc;
}

/// Tasks below which a second thread costs more than it saves.
int64_t grain(int64_t channels) {
  return std::max<int64_t>(1, 32768 / (kConvRows * std::min(channels, kConvChannels)));
}

}  // namespace

std::vector<ConvBlock> conv_blocks(const std::vector<int64_t>& cu) {
  std::vector<ConvBlock> blocks;
  for (size_t s = 0; s + 1 < cu.size(); ++s) {
    for (int64_t b = cu[s]; b < cu[s + 1]; b += kConvRows) {
      blocks.push_back(
          {static_cast<int64_t>(s), b, std::min(b + kConvRows, cu[s + 1]), cu[s], cu[s + 1]});
    }
  }
  return blocks;
}

template <typename S, typename R>
void conv_forward(const ConvCall<S, R>& call, const std::vector<ConvBlock>& blocks, S* y) {
  const int64_t width = call.width, slices = (call.channels + kConvChannels - 1) / kConvChannels;
  const auto tasks = static_cast<int64_t>(blocks.size()) * slices;
  parallel_for(0, tasks, grain(call.channels), [&](int64_t begin, int64_t end) {
    const simd::FlushDenormals flush;
    std::vector<R> scratch(static_cast<size_t>((kConvRows + 2 * width) * kConvChannels));
    R* in = scratch.data();
    R* w = in + (kConvRows + width) * kConvChannels;
    for (int64_t task = begin; task < end; ++task) {
      const ConvBlock& block = blocks[static_cast<size_t>(task / slices)];
      const int64_t c = task % slices * kConvChannels;
      const int64_t n = std::min(kConvChannels, call.channels - c);
      const int64_t ld = padded(n, simd::kLanes<R>);
      load_weight(call, c, n, ld, w);
      load_rows(call, block, block.begin - width + 1, block.end, c, n, ld, in);
      for (int64_t row = block.begin; row < block.end; ++row) {
        R* window = in + (row - block.begin) * ld;  // overwritten by the result
        for (int64_t i = 0; i < ld; i += simd::kLanes<R>) {
          const Vec<R> p = taps(w + i, window + i, width, ld);
          const Vec<R> v = call.product_form ? p * simd::sigmoid(p) : p / (1 + simd::exp(-p));
          store(window + i, v);
        }
        simd::store_row(window, n, y + row * call.channels + c);
      }
    }
  });
}

// dpre = dy silu'(pre) with silu' = s (1 + pre (1 - s)); dx[t] = sum_j w_j dpre[t + W-1-j], stopped
// at the segment's end, so a block needs dpre of the W-1 rows after it too and recomputes them.
template <typename S, typename R>
void conv_backward(const ConvCall<S, R>& call,
                   const std::vector<ConvBlock>& blocks,
                   const S* dy,
                   S* dx,
                   S* dhalo,
                   R* dw_partial) {
  constexpr int64_t kStep = simd::kLanes<R>;
  const int64_t width = call.width, halo_rows = width - 1;
  const int64_t slices = (call.channels + kConvChannels - 1) / kConvChannels;
  const auto tasks = static_cast<int64_t>(blocks.size()) * slices;
  parallel_for(0, tasks, grain(call.channels), [&](int64_t begin, int64_t end) {
    const simd::FlushDenormals flush;
    const int64_t rows = kConvRows + 2 * width;
    std::vector<R> scratch(static_cast<size_t>((2 * rows + 2 * width + 1) * kConvChannels));
    R* in = scratch.data();
    R* dpre = in + rows * kConvChannels;
    R* w = dpre + rows * kConvChannels;
    R* dw = w + width * kConvChannels;
    R* out = dw + width * kConvChannels;
    for (int64_t task = begin; task < end; ++task) {
      const ConvBlock& block = blocks[static_cast<size_t>(task / slices)];
      const int64_t c = task % slices * kConvChannels;
      const int64_t n = std::min(kConvChannels, call.channels - c);
      const int64_t ld = padded(n, kStep);
      const int64_t after = std::min(block.end + halo_rows, block.segment_end);
      load_weight(call, c, n, ld, w);
      load_rows(call, block, block.begin - halo_rows, after, c, n, ld, in);
      std::fill(dw, dw + width * ld, R(0));
      for (int64_t row = block.begin; row < after; ++row) {
        const R* window = in + (row - block.begin) * ld;
        R* d = dpre + (row - block.begin) * ld;
        simd::load_row(dy + row * call.channels + c, n, d, ld);
        for (int64_t i = 0; i < ld; i += kStep) {
          const Vec<R> p = taps(w + i, window + i, width, ld);
          const Vec<R> v = load(d + i) * simd::sigmoid(p) * (1 + p * simd::sigmoid(-p));
          store(d + i, v);
          if (row >= block.end) continue;
          for (int64_t j = 0; j < width; ++j) {
            store(dw + j * ld + i, simd::fma(v, load(window + j * ld + i), load(dw + j * ld + i)));
          }
        }
      }
      const auto input_gradient = [&](int64_t row, S* dst) {
        std::fill(out, out + ld, R(0));
        for (int64_t j = 0; j < width; ++j) {
          const int64_t later = row + halo_rows - j;
          if (later < block.begin || later >= after) continue;
          const R* d = dpre + (later - block.begin) * ld;
          for (int64_t i = 0; i < ld; i += kStep) {
            store(out + i, simd::fma(load(w + j * ld + i), load(d + i), load(out + i)));
          }
        }
        simd::store_row(out, n, dst);
      };
      for (int64_t row = block.begin; row < block.end; ++row) {
        input_gradient(row, dx + row * call.channels + c);
      }
      // Halo rows touch only the segment's first W-1 rows, all of them inside its first block
      // or, for very wide windows, in the rows recomputed after it.
      if (dhalo && block.begin == block.segment_begin) {
        for (int64_t h = 0; h < halo_rows; ++h) {
          input_gradient(block.segment_begin - halo_rows + h,
                         dhalo + (block.segment * halo_rows + h) * call.channels + c);
        }
      }
      R* partial = dw_partial + task / slices * width * call.channels + c;
      for (int64_t j = 0; j < width; ++j) {
        std::copy(dw + j * ld, dw + j * ld + n, partial + j * call.channels);
      }
    }
  });
}

#define LOCKSTEP_CONV(S, R)                                                             \
  template void conv_forward(const ConvCall<S, R>&, const std::vector<ConvBlock>&, S*); \
  template void conv_backward(                                                          \
      const ConvCall<S, R>&, const std::vector<ConvBlock>&, const S*, S*, S*, R*);
LOCKSTEP_CONV(double, double)
LOCKSTEP_CONV(float, float)
LOCKSTEP_CONV(simd::Bf16, float)
#undef LOCKSTEP_CONV

}  // namespace lockstep::model
