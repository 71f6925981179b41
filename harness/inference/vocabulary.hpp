// The two ends of the model whose rows are entries of the vocabulary, shared by the ranks of a tp
// group: each holds some rows of the embedding and of the head.
#pragma once

#include <cstdint>
#include <vector>

#include "model/config/model_config.hpp"
#include "model/ops/head.hpp"
#include "model/seams/tensor_split.hpp"

namespace lockstep::harness {

/// Entries [cuts[r], cuts[r + 1]) are those of rank r.
struct Vocabulary {
  std::vector<int64_t> cuts;
  int64_t rank = 0;

  /// Near-even; in the invariant policies whole panels of the head's sums, so that these have the
  /// bytes of one rank, and a rank may have nothing.
  static Vocabulary of(const model::ModelConfig& config,
                       const model::Numerics& num,
                       int64_t tp,
                       int64_t rank);

  [[nodiscard]] bool whole() const { return cuts.size() == 2; }
  [[nodiscard]] int64_t size() const { return cuts.back(); }
  [[nodiscard]] int64_t begin() const { return cuts[static_cast<size_t>(rank)]; }
  [[nodiscard]] int64_t end() const { return cuts[static_cast<size_t>(rank) + 1]; }
  /// Rank that holds each id; 0 for -1.
  [[nodiscard]] Tensor owners(const Tensor& ids) const;
};

// All three are collective over the ranks of `tensor` unless one holds everything, and give the
// same on all of them; weight [entries of this rank, D].

/// Rows [T, D] of ids [T], each from the rank that holds it. Throws kInput for an id outside of the
/// vocabulary.
Tensor embed_tokens(const Tensor& ids,
                    const Tensor& weight,
                    const Vocabulary& vocabulary,
                    const model::Numerics& num,
                    model::TensorSplit& tensor);

/// Logits [T, V] acc, gathered.
Tensor engine_logits(const Tensor& h,
                     const Tensor& weight,
                     const Vocabulary& vocabulary,
                     const model::Numerics& num,
                     model::TensorSplit& tensor);

/// Log-probabilities [T] acc of labels. Maxima and sums of all ranks are merged in the order of the
/// vocabulary; no rank holds the logits of another.
Tensor engine_logprobs(const Tensor& h,
                       const Tensor& weight,
                       const Vocabulary& vocabulary,
                       const Tensor& labels,
                       const model::HeadOptions& options,
                       const model::Numerics& num,
                       model::TensorSplit& tensor);

}  // namespace lockstep::harness
