// Hot loops of the hyper-connection operators, on raw pointers. W is one of the width types of
// model/base/scalar.hpp; every array is contiguous.
#pragma once

#include <cstdint>

#include "model/base/scalar.hpp"
#include "model/ops/exact_rows.hpp"
#include "model/ops/linear_tiles.hpp"

namespace lockstep::model {

struct HcShape {
  int64_t tokens, streams, width;

  [[nodiscard]] int64_t row() const { return streams * width; }                 ///< n * D
  [[nodiscard]] int64_t num_logits() const { return (2 + streams) * streams; }  ///< P
};

enum class HcOperands : uint8_t { kPlain, kTf32, kBf16x3 };

struct HcProjection {
  bool normalise_first;  ///< D04
  HcOperands operands;   ///< D05
  int64_t width;         ///< n * D
  int64_t slice_width;   ///< D06: values per partial sum
  RowTiles rows;         ///< D63
};

struct HcMix {
  bool round_coefficients;  ///< D08
  bool three_roundings;     ///< D09
  bool post_first;          ///< D10
};

template <typename W>
struct HcPreInputs {
  using Act = typename W::Act;
  using Acc = typename W::Acc;
  HcShape shape;
  HcProjection how;
  int64_t sinkhorn_iters;
  Acc norm_eps, eps;
  bool unrounded_statistic;  ///< D12
  bool two_roundings;        ///< D11
  const Act* x;              ///< [T, n, D]
  const Acc* unrounded;      ///< [T, n, D] or null
  const Acc* fn;             ///< [P, n D]; rounded already for kTf32
  const Acc* fn_terms;       ///< kBf16x3: [3, P, n D], smallest first; otherwise fn
  const Acc *base, *scale, *norm_weight;
};

template <typename W>
struct HcPreOutputs {
  typename W::Act* x_normed;     ///< [T, D]
  typename W::Acc *post, *comb;  ///< [T, n], [T, n, n]
  typename W::Acc *m, *r;        ///< [T, P], [T]: kept for the backward pass
};

template <typename W>
void hc_pre_forward(const HcPreInputs<W>& in, const HcPreOutputs<W>& out);

/// Where sums over tokens go exactly: fn [P, n D], one chain per block of tokens, and rest [P base,
/// 3 scale, D norm_weight], token by token.
struct HcExactSums {
  std::span<const int64_t> bounds;
  ExactRow *fn, *rest;
};

template <typename W>
struct HcPreGradients {
  using Acc = typename W::Acc;
  const Acc *m, *r;  ///< from the forward pass
  const typename W::Act* dx_normed;
  const Acc *dpost, *dcomb;
  typename W::Act* dx;
  Acc *dfn, *dbase, *dscale, *dnorm_weight;  ///< written whole; dfn may be null
  const HcExactSums* exact = nullptr;        ///< instead of those four, which are then null
};

template <typename W>
void hc_pre_backward(const HcPreInputs<W>& in, const HcPreGradients<W>& grads);

template <typename W>
struct HcPostInputs {
  HcShape shape;
  HcMix mix;
  const typename W::Act *y, *x;
  const typename W::Acc *post, *comb;
};

/// Out is Act, or Acc for streams before their store rounding.
template <typename W, typename Out>
void hc_post_forward(const HcPostInputs<W>& in, Out* out);

template <typename W>
void hc_post_backward(const HcPostInputs<W>& in,
                      const typename W::Act* dout,
                      typename W::Act* dy,
                      typename W::Act* dx,
                      typename W::Acc* dpost,
                      typename W::Acc* dcomb);

}  // namespace lockstep::model
