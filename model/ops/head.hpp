// Final projection and log-probabilities, in chunks: logits are never stored for all tokens unless
// asked for.
#pragma once

#include "model/base/weight.hpp"
#include "model/config/numerics.hpp"

namespace lockstep::model {

struct HeadOutput {
  Tensor logprobs;  ///< [T] acc, differentiable; 0 where the label is -1
  Tensor entropy;   ///< [T] acc, no gradient, every token; only if asked for
};

struct HeadOptions {
  double temperature = 1.0;  ///< > 0
  bool entropy = false;
  int64_t token_chunk = 1024;  ///< only backward's memory and the order of dW's sum depend on it
};

/// log softmax(h W^T / temperature)[label]. h [T, D] act; weight [V, D] act or acc; labels [T]
/// int64 with -1 for none. numerics: D59 (logits rounded to bf16 or left in acc), D60 (times
/// 1/temperature, divided, or untouched); softmax in acc, maximum and sums per panel of 4096
/// vocabulary entries merged in order; D63. Backward computes the chunk's logits again; the
/// gradient of rounded logits is rounded; dW is summed in acc over all tokens and rounded once.
/// Tokens without gradient cost nothing in backward where 128 neighbours have none. Peak memory in
/// backward: token_chunk * V acc, plus W in acc if it is narrower. Throws kShape, kConfig, kInput
/// (label outside [-1, V)). With weight.sum, dW is one chain per block of weight.blocks, added
/// exactly.
HeadOutput head_logprobs(const Tensor& h,
                         const Weight& weight,
                         const Tensor& labels,
                         const HeadOptions& options,
                         const Numerics& num);
HeadOutput head_logprobs_reference(const Tensor& h,
                                   const Tensor& weight,
                                   const Tensor& labels,
                                   const HeadOptions& options,
                                   const Numerics& num);

/// What the entries of the vocabulary that one rank holds contribute to head_logprobs.
struct HeadPart {
  Tensor panels;        ///< [P, T, 3] acc: of each panel of 4096 entries
  Tensor label_logits;  ///< [T] acc: of the labels in this part, else 0
};
/// weight [V_part, D], any V_part >= 0: entries `first` and following of a vocabulary of `vocab`;
/// labels [T] of the whole. No gradient; options.entropy is not taken.
HeadPart head_part(const Tensor& h,
                   const Tensor& weight,
                   int64_t first,
                   int64_t vocab,
                   const Tensor& labels,
                   const HeadOptions& options,
                   const Numerics& num);
/// Log-probabilities [T] acc from the panels of all parts, one part after another. Where every part
/// but the last is whole panels these are the bytes of head_logprobs.
Tensor merge_head_parts(const Tensor& panels, const Tensor& label_logits, const Tensor& labels);

/// All logits [T, V] in acc (the policy's widest dtype), rounded to act first where D59 says so. No
/// gradient.
Tensor head_logits(const Tensor& h, const Tensor& weight, const Numerics& num);

}  // namespace lockstep::model
