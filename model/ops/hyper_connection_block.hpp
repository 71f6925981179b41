// What forward and backward of hc_pre share: blocks of tokens, the operand of the projection, and
// moving coefficients between token-major and pack layout.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "model/ops/hyper_connection_kernels.hpp"
#include "model/ops/hyper_connection_sinkhorn.hpp"

namespace lockstep::model::hc {

/// Tokens per block: a block's streams stay in the second-level cache. 8, 16, 32 or 64.
inline int64_t block_tokens(int64_t row) {
  int64_t tokens = 64;
  while (tokens > 8 && tokens * row > (1 << 17)) tokens /= 2;
  return tokens;
}

/// The operand of the projection for `count` tokens: z * r or z, with tf32 rounding where asked.
/// Written to `to` [count, row].
template <typename A>
void projection_operand(
    const A* z, const A* r, int64_t count, int64_t row, const HcProjection& how, A* to) {
  for (int64_t t = 0; t < count; ++t) {
    const A factor = how.normalise_first ? r[t] : A(1);
    const A* from = z + t * row;
    A* target = to + t * row;
    if (how.normalise_first) {
      for (int64_t i = 0; i < row; ++i) target[i] = from[i] * factor;
    } else if (target != from) {
      std::copy_n(from, row, target);
    }
    if constexpr (std::is_same_v<A, float>) {
      if (how.operands == HcOperands::kTf32) {
        for (int64_t i = 0; i < row; ++i) target[i] = round_tf32(target[i]);
      }
    }
  }
}

/// Tokens [begin, begin + count) of m [T, P] as a pack [P][16]; missing tokens are zero.
template <typename A>
void to_pack(const A* m, int64_t columns, int64_t count, A* pack) {
  constexpr int64_t kPack = HcMixer<A>::kPack;
  for (int64_t p = 0; p < columns; ++p) {
    for (int64_t b = 0; b < kPack; ++b) {
      pack[p * kPack + b] = b < count ? m[b * columns + p] : A(0);
    }
  }
}

template <typename A>
void from_pack(const A* pack, int64_t columns, int64_t count, A* m) {
  constexpr int64_t kPack = HcMixer<A>::kPack;
  for (int64_t b = 0; b < count; ++b) {
    for (int64_t p = 0; p < columns; ++p) m[b * columns + p] = pack[p * kPack + b];
  }
}

/// u = sum_i pre_i X_i in stream order; x [n, D].
template <typename A>
void collapse(const A* x, const A* pre, int64_t streams, int64_t width, A* u) {
  for (int64_t d = 0; d < width; ++d) u[d] = pre[0] * x[d];
  for (int64_t i = 1; i < streams; ++i) {
    const A* xi = x + i * width;
    for (int64_t d = 0; d < width; ++d) u[d] += pre[i] * xi[d];
  }
}

/// Rounds u in place to what is stored, and returns 1 / sqrt(mean square + eps) of the operand D12
/// names. `mean_square_of` is u before (unrounded) or after rounding.
template <typename W, typename A>
A round_and_measure(A* u, int64_t width, bool unrounded, A eps) {
  A square = unrounded ? dot(u, u, width) : A(0);
  if constexpr (std::is_same_v<W, WidthBf16>) {
    for (int64_t d = 0; d < width; ++d) u[d] = W::round(u[d]);
  }
  if (!unrounded) square = dot(u, u, width);
  return A(1) / std::sqrt(square / static_cast<A>(width) + eps);
}

}  // namespace lockstep::model::hc
