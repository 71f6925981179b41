// A parameter as an operator sees it.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "model/base/exact_sum.hpp"

namespace lockstep {

/// Bounds {0, ..., rows} of runs of rows. Sums over the rows of a run have a fixed order, sums over
/// runs are exact.
using RowBlocks = std::shared_ptr<const std::vector<int64_t>>;

/// A tensor that all rows of a call share, and where its gradient, a sum over those rows, goes.
///
/// `sum` undefined: the gradient is what the operator returns. Defined: backward adds each block's
/// partial gradient (in float32) to it and returns none; the autograd graph still passes through
/// `value`. `blocks` are the caller's canonical runs of rows; given without `sum`, gradients with
/// respect to rows must not depend on which blocks are computed together.
struct Weight {
  Tensor value;
  ExactSum sum;
  RowBlocks blocks;

  Weight() = default;
  Weight(const Tensor& v) : value(v) {}  // NOLINT(google-explicit-constructor): most have no sum
  Weight(Tensor v, ExactSum s, RowBlocks b)
      : value(std::move(v)), sum(std::move(s)), blocks(std::move(b)) {}

  /// The same sum and blocks for a value made from this one's element by element.
  [[nodiscard]] Weight with(const Tensor& v) const { return {v, sum, blocks}; }
  /// Rows [first, first + count) of dim 0.
  [[nodiscard]] Weight rows(int64_t first, int64_t count) const {
    return {value.narrow(0, first, count), sum.defined() ? sum.rows(first, count) : sum, blocks};
  }
};

}  // namespace lockstep
