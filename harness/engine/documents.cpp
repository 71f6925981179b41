#include "harness/engine/documents.hpp"

#include "model/base/seeded.hpp"

namespace lockstep::harness {

Tensor Documents::labels() const {
  Tensor labels = at::full({packing.global_tokens()}, -1, at::kLong);
  for (const Segment& document : packing.segments()) {
    const int64_t targets = document.length() - 1;
    if (targets > 0)
      labels.narrow(0, document.begin, targets).copy_(ids.narrow(0, document.begin + 1, targets));
  }
  return labels;
}

Documents make_documents(const std::vector<std::vector<int64_t>>& documents) {
  std::vector<int64_t> lengths, flat;
  for (const std::vector<int64_t>& document : documents) {
    lengths.push_back(static_cast<int64_t>(document.size()));
    flat.insert(flat.end(), document.begin(), document.end());
  }
  return {at::tensor(flat, at::kLong), Packing::of_lengths(lengths)};
}

Documents from_row(const Tensor& ids, std::vector<int64_t> cu_seqlens) {
  check_shape(ids, {-1}, "documents: ids");
  check_dtype(ids, at::kLong, "documents: ids");
  Packing packing = Packing::whole(std::move(cu_seqlens));
  LOCKSTEP_CHECK(packing.global_tokens() <= ids.size(0),
                 kInput,
                 "documents: cu_seqlens ends at {} but the row has {} tokens",
                 packing.global_tokens(),
                 ids.size(0));
  return {ids.narrow(0, 0, packing.global_tokens()).clone(), std::move(packing)};
}

Documents random_documents(const std::vector<int64_t>& lengths,
                           int64_t vocab,
                           int64_t pad,
                           uint64_t seed) {
  LOCKSTEP_CHECK(vocab > (pad >= 0 ? 1 : 0),
                 kInput,
                 "documents: a vocabulary of {} leaves no token to draw",
                 vocab);
  Packing packing = Packing::of_lengths(lengths);
  Tensor ids = at::empty({packing.global_tokens()}, at::kLong);
  auto* data = ids.mutable_data_ptr<int64_t>();
  const uint64_t key = seeded_key(seed, "documents");
  const bool skip = pad >= 0 && pad < vocab;
  for (int64_t i = 0; i < ids.numel(); ++i) {
    const double unit = 0.5 * (static_cast<double>(seeded_value(key, i)) + 1.0);  // [0, 1)
    auto id = static_cast<int64_t>(unit * static_cast<double>(vocab - (skip ? 1 : 0)));
    if (skip && id >= pad) ++id;
    data[i] = id;
  }
  return {std::move(ids), std::move(packing)};
}

}  // namespace lockstep::harness
