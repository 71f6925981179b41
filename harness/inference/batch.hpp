// The rows of one step: tokens of several requests, decoded ones first, and where each reads and
// writes the caches. The same for every layer, so it is worked out once.
#pragma once

#include <vector>

#include "harness/inference/caches.hpp"

namespace lockstep::harness {

/// Tokens of one request. They go to positions sequence->length on; forward() advances it.
struct BatchItem {
  Sequence* sequence = nullptr;
  std::vector<int64_t> ids;
  bool decode = false;  ///< through decode steps (one token), not prefill
};

struct Batch {
  /// Throws kInput unless decode items come first, with one token each, and every sequence has room
  /// for its tokens and is named once.
  Batch(std::vector<BatchItem> items, int64_t kpool);

  struct Part {
    int64_t begin, end;  ///< rows of the batch
    int64_t position;    ///< of row `begin` in its request
    [[nodiscard]] int64_t count() const { return end - begin; }
    [[nodiscard]] int64_t length() const { return position + count(); }
  };

  std::vector<BatchItem> items;
  std::vector<Part> parts;  ///< of items
  std::vector<int64_t> cu;  ///< row boundaries of the items
  int64_t num_decode = 0;   ///< leading items, and rows
  Tensor ids;               ///< [T] int64
  Tensor slots;             ///< [items] int64
  Tensor continues;         ///< [items] bool: the caches hold earlier rows of the request
  Tensor latent_slots;      ///< [T] int64

  // Pooling works on rows "ring rows of the open pool, then new rows" of all items.
  std::vector<int64_t> pool_cu;  ///< boundaries of those rows; each starts where a pool does
  Tensor pool_source;  ///< int64: row of [ring rows of all slots; new rows] each of them is
  Tensor pool_slots;   ///< int64: index slot of each pool that is complete now
  std::vector<int64_t> straddling;  ///< entries of pool_slots whose pool began in an earlier
                                    ///< prefill chunk
  Tensor ring_rows, ring_slots;     ///< int64: new rows to stash, and where

  [[nodiscard]] int64_t rows() const { return cu.back(); }
};

}  // namespace lockstep::harness
