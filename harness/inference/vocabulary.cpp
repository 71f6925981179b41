#include "harness/inference/vocabulary.hpp"

#include <algorithm>

#include "model/ops/head_kernels.hpp"
#include "model/ops/linear.hpp"
#include "parallel/mesh/layout.hpp"

namespace lockstep::harness {

Vocabulary Vocabulary::of(const model::ModelConfig& config,
                          const model::Numerics& num,
                          int64_t tp,
                          int64_t rank) {
  const int64_t unit = num.invariant() ? model::kHeadPanel : 1;
  Vocabulary vocabulary{parallel::even_cuts((config.vocab_size + unit - 1) / unit, tp), rank};
  for (int64_t& cut : vocabulary.cuts) cut = std::min(cut * unit, config.vocab_size);
  return vocabulary;
}

Tensor Vocabulary::owners(const Tensor& ids) const {
  const Tensor ends = at::tensor(std::vector<int64_t>(cuts.begin() + 1, cuts.end()), at::kLong);
  return at::searchsorted(ends, ids, /*out_int32=*/false, /*right=*/true);
}

Tensor embed_tokens(const Tensor& ids,
                    const Tensor& weight,
                    const Vocabulary& vocabulary,
                    const model::Numerics& num,
                    model::TensorSplit& tensor) {
  if (vocabulary.whole()) return model::embedding(ids, weight, -1, num);
  const auto bad = ids.lt(0).logical_or(ids.ge(vocabulary.size())).nonzero();
  LOCKSTEP_CHECK(bad.size(0) == 0,
                 kInput,
                 "embedding: token {} has id {}, outside the vocabulary of {}; check the "
                 "tokenizer or vocab_size",
                 bad[0].item<int64_t>(),
                 ids[bad[0].item<int64_t>()].item<int64_t>(),
                 vocabulary.size());
  const Tensor owners = vocabulary.owners(ids);
  const Tensor own = owners.eq(vocabulary.rank).nonzero().flatten();
  const Tensor rows =
      model::embedding(ids.index_select(0, own) - vocabulary.begin(), weight, -1, num);
  // Rows of rank 0 first, each rank's in the order of the batch.
  const Tensor sorted = at::argsort(owners, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  const Tensor place = at::empty_like(sorted).index_copy_(
      0, sorted, at::arange(sorted.size(0), at::TensorOptions(at::kLong)));
  return tensor.gather_rows(rows, "embedding").index_select(0, place);
}

Tensor engine_logits(const Tensor& h,
                     const Tensor& weight,
                     const Vocabulary& vocabulary,
                     const model::Numerics& num,
                     model::TensorSplit& tensor) {
  const at::NoGradGuard no_grad;
  const Tensor part = weight.size(0) > 0 ? model::head_logits(h, weight, num)
                                         : at::empty({h.size(0), 0}, at::TensorOptions(num.acc()));
  return vocabulary.whole() ? part : tensor.gather_columns(part, true, "logits");
}

Tensor engine_logprobs(const Tensor& h,
                       const Tensor& weight,
                       const Vocabulary& vocabulary,
                       const Tensor& labels,
                       const model::HeadOptions& options,
                       const model::Numerics& num,
                       model::TensorSplit& tensor) {
  const at::NoGradGuard no_grad;
  if (vocabulary.whole()) return model::head_logprobs(h, weight, labels, options, num).logprobs;
  const int64_t tokens = h.size(0);
  const model::HeadPart part =
      model::head_part(h, weight, vocabulary.begin(), vocabulary.size(), labels, options, num);
  const Tensor panels =
      tensor.gather_rows(part.panels.view({part.panels.size(0), tokens * 3}), "head panels");
  const Tensor logits = tensor.gather_rows(part.label_logits.unsqueeze(0), "logits of labels");
  return model::merge_head_parts(panels.view({panels.size(0), tokens, 3}),
                                 logits.gather(0, vocabulary.owners(labels).unsqueeze(0))[0],
                                 labels);
}

}  // namespace lockstep::harness
