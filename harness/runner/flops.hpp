// How much arithmetic a forward or backward pass needs, for comparing times with the machine's
// rate.
#pragma once

#include <cstdint>
#include <vector>

#include "model/config/model_config.hpp"

namespace lockstep::harness {

/// Floating-point operations (a multiply-add is two) of matrix-like work; elementwise work is left
/// out, so a share of the matrix product rate computed from it is a lower bound.
struct Flops {
  double mixers = 0;   ///< projections, chunked recurrence, attention over selected keys
  double indexer = 0;  ///< frozen: no backward
  double mlps = 0;     ///< dense, router, the experts that a token uses
  double streams = 0;  ///< hyper-connections
  double head = 0;

  [[nodiscard]] double forward() const { return mixers + indexer + mlps + streams + head; }
  /// Two products for each of the forward ones, except the indexer's.
  [[nodiscard]] double forward_backward() const { return 3 * forward() - 2 * indexer; }
};

/// Tokens [begin, end) of a document, counted from its start.
struct TokenSpan {
  int64_t begin = 0, end = 0;
};

/// Of these parts of documents.
Flops count_flops(const model::ModelConfig& config, const std::vector<TokenSpan>& spans);
/// Of whole documents with these lengths.
Flops count_flops(const model::ModelConfig& config, const std::vector<int64_t>& documents);

}  // namespace lockstep::harness
