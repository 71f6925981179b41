// Final projection and log-probabilities, in chunks: logits are never stored for all tokens unless
// asked for.
#pragma once

#include "model/config/numerics.hpp"

namespace lockstep::model {

struct HeadOutput {
  Tensor logprobs;  ///< [T] acc, differentiable; 0 where the label is -1
  Tensor entropy;   ///< [T] acc, no gradient; only if asked for
};

struct HeadOptions {
  double temperature = 1.0;
  bool entropy = false;
  int64_t token_chunk = 1024;
};

/// log softmax(h W^T / temperature)[label]. h [T, D] act, weight [V, D], labels [T] int64 with -1
/// for none. numerics: D59, D60; softmax in acc. Backward recomputes the chunk's logits; the
/// gradient of rounded logits is rounded. Peak memory O(token_chunk * V).
HeadOutput head_logprobs(const Tensor& h,
                         const Tensor& weight,
                         const Tensor& labels,
                         const HeadOptions& options,
                         const Numerics& num);
HeadOutput head_logprobs_reference(const Tensor& h,
                                   const Tensor& weight,
                                   const Tensor& labels,
                                   const HeadOptions& options,
                                   const Numerics& num);

/// All logits [T, V] in acc (the policy's widest dtype), rounded to act first where D59 says so. No
/// gradient.
Tensor head_logits(const Tensor& h, const Tensor& weight, const Numerics& num);

}  // namespace lockstep::model
