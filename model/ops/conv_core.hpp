// Kernels of the causal depthwise convolution with silu. S is the activation type in memory, R the
// type everything is computed in. Work is cut into blocks of kConvRows rows; weight gradients are
// one partial sum per block, so that their order is the same for any number of threads.
#pragma once

#include <cstdint>
#include <vector>

#include "model/ops/kda_simd.hpp"

namespace lockstep::model {

inline constexpr int64_t kConvRows = 128;

/// A run of at most kConvRows rows of one segment.
struct ConvBlock {
  int64_t segment, begin, end;
  int64_t segment_begin, segment_end;
};

template <typename S, typename R>
struct ConvCall {
  int64_t channels, width;
  const S* x;  ///< [T, channels], rows x_stride apart
  int64_t x_stride;
  const S* halo;      ///< [segments, width-1, channels] or null
  const R* weight;    ///< [width, channels], as used: transposed, tap by tap
  bool product_form;  ///< silu as y * sigmoid(y), else y / (1 + exp(-y)) (D16)
};

std::vector<ConvBlock> conv_blocks(const std::vector<int64_t>& cu);

template <typename S, typename R>
void conv_forward(const ConvCall<S, R>& call, const std::vector<ConvBlock>& blocks, S* y);

/// dy, dx [T, channels] contiguous; dhalo [segments, width-1, channels] zero-filled by the caller
/// or null; dw_partial [blocks, width, channels].
template <typename S, typename R>
void conv_backward(const ConvCall<S, R>& call,
                   const std::vector<ConvBlock>& blocks,
                   const S* dy,
                   S* dx,
                   S* dhalo,
                   R* dw_partial);

}  // namespace lockstep::model
