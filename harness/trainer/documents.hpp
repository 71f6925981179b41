// Token documents as users hand them over.
#pragma once

#include <filesystem>
#include <vector>

#include "model/base/packing.hpp"
#include "model/base/torch.hpp"

namespace lockstep::harness {

/// Documents concatenated into one row.
struct Documents {
  Tensor ids;       ///< [T] int64
  Packing packing;  ///< the whole row

  /// Labels of the whole row, [T] int64: the next token of the same document, -1 at each document's
  /// last token.
  [[nodiscard]] Tensor labels() const;
};

Documents make_documents(const std::vector<std::vector<int64_t>>& documents);

/// Reads {"documents": [[ids], [ids]]}. Throws kInput naming file, document and position of what is
/// wrong.
Documents read_documents(const std::filesystem::path& file);

/// Documents of these lengths with reproducible ids in [0, vocab), avoiding `pad` (if >= 0).
Documents random_documents(const std::vector<int64_t>& lengths,
                           int64_t vocab,
                           int64_t pad,
                           uint64_t seed);

}  // namespace lockstep::harness
