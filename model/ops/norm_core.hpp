// Row kernels of RMSNorm, plain and gated. S is the activation type in memory, R the type that
// everything is computed in. Weight gradients are left as one partial sum per block of kNormRows
// rows, so that their order of addition is the same for any number of threads.
#pragma once

#include <cstdint>

#include "model/ops/exact_rows.hpp"
#include "model/ops/kda_simd.hpp"

namespace lockstep::model {

inline constexpr int64_t kNormRows = 64;
inline int64_t norm_blocks(int64_t rows) { return (rows + kNormRows - 1) / kNormRows; }

/// What a call computes: y = round(w * round?(x r)) [* sigmoid(gate)], r = 1/sqrt(mean(x^2) + eps).
template <typename S, typename R>
struct NormCall {
  int64_t rows, dim;
  const S* x;     ///< [rows, dim]
  const S* gate;  ///< [rows, dim]; null: plain norm
  const R* w;     ///< [dim], as used
  R eps;
  bool round_xhat;  ///< first of the two roundings (bf16 only)
};

template <typename S, typename R>
void norm_forward(const NormCall<S, R>& call, S* y);

/// dgate is null for a plain norm. dw_partial [norm_blocks(rows), dim], or null with `exact`
/// (float only): every row's part of dw is added to it.
template <typename S, typename R>
void norm_backward(const NormCall<S, R>& call,
                   const S* dy,
                   S* dx,
                   S* dgate,
                   R* dw_partial,
                   ExactRow* exact = nullptr);

/// out[i] = partial[0][i] + partial[1][i] + ..., in float64, in that order.
template <typename R>
void merge_partials(int64_t blocks, int64_t dim, const R* partial, R* out);

}  // namespace lockstep::model
