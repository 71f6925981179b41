// Comparisons that know what the numbers mean: distributions over a vocabulary, log-probabilities,
// and errors along the positions of a document.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "model/base/torch.hpp"

namespace lockstep::golden {

struct LogitComparison {
  int64_t num_tokens = 0;
  double mean_kl = 0.0, max_kl = 0.0;  ///< KL(softmax want || softmax got), nats
  int64_t max_kl_token = -1;
  double top1_agreement = 1.0;  ///< share of tokens with the same largest logit (lowest id on ties)
};

/// got, want [T, V] floating. A row with a NaN on either side has infinite KL and does not agree.
/// Throws kShape otherwise. In float64.
LogitComparison compare_logits(const Tensor& got, const Tensor& want, std::string_view name);

/// exp(l) - l - 1 of a log ratio l, without the cancellation near 0; never negative.
double mismatch_kl_term(double log_ratio);

struct MismatchKl {
  double mean = 0.0, max = 0.0;
  int64_t num_tokens = 0, max_token = -1;
  Tensor terms;  ///< float64 [T], NaN where masked out
};

/// mismatch_kl of a trainer's and an engine's log-probabilities [T] of the same tokens: the mean of
/// exp(l) - l - 1 with l = train - infer, over tokens where `mask` (bool [T]; undefined: all) holds
/// and not both sides are NaN. A NaN on one side gives an infinite term. No tokens: 0.
MismatchKl mismatch_kl(const Tensor& train, const Tensor& infer, const Tensor& mask = {});

/// Error over one range of positions inside their documents.
struct PositionBin {
  int64_t first = 0, last = 0;  ///< positions, inclusive: 0, 1, 2-3, 4-7, ...
  int64_t num_tokens = 0;
  double rel_l2 = 0.0, max_abs = 0.0;
};

/// got, want [T, ...] floating, rows of documents with boundaries `cu` (0, ..., T). Bins double in
/// size and end with the longest document. NaN in the same place counts as equal.
std::vector<PositionBin> error_by_position(const Tensor& got,
                                           const Tensor& want,
                                           const std::vector<int64_t>& cu,
                                           std::string_view name);

}  // namespace lockstep::golden
