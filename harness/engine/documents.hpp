// Token documents, packed into one row.
#pragma once

#include <vector>

#include "model/base/packing.hpp"
#include "model/base/torch.hpp"

namespace lockstep::harness {

struct Documents {
  Tensor ids;       ///< [T] int64
  Packing packing;  ///< the whole row

  /// Labels of the whole row, [T] int64: the next token of the same document, -1 at each document's
  /// last token.
  [[nodiscard]] Tensor labels() const;
};

/// Concatenates. Empty documents are legal; so is no document at all.
Documents make_documents(const std::vector<std::vector<int64_t>>& documents);

/// A row as a packer hands it over: ids [T] with documents at cu_seqlens {0, ..., L}, L <= T. Rows
/// from L on are padding; they are dropped here, before anything can depend on them.
Documents from_row(const Tensor& ids, std::vector<int64_t> cu_seqlens);

/// Documents of these lengths with reproducible ids in [0, vocab), avoiding `pad` (if >= 0).
Documents random_documents(const std::vector<int64_t>& lengths,
                           int64_t vocab,
                           int64_t pad,
                           uint64_t seed);

}  // namespace lockstep::harness
