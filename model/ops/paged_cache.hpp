// Addresses in caches that are handed out in pages, and rows to and from them. An entry is a token
// (latent cache) or a pool of tokens (index cache); a page is a number of entries. Every table
// keeps to one unit: positions are turned into entries before they come here.
#pragma once

#include <vector>

#include "model/ops/fp8.hpp"

namespace lockstep::model {

/// Where one request's entries lie: entry i is entry i % page_size of page pages[i / page_size].
struct PageTable {
  std::vector<int64_t> pages;
  int64_t page_size = 1;

  /// Index of an entry in the whole cache. Throws kInternal for an entry beyond the table.
  [[nodiscard]] int64_t slot(int64_t entry) const;
  /// The same for entries [begin, end): int64 [end - begin].
  [[nodiscard]] Tensor slots(int64_t begin, int64_t end) const;
  [[nodiscard]] int64_t capacity() const { return static_cast<int64_t>(pages.size()) * page_size; }
};

/// Slot of a position in a request's own ring, however long the request is.
inline int64_t ring_slot(int64_t block, int64_t position, int64_t ring) {
  return block * ring + position % ring;
}

/// Entries of a request as slots of the cache: entries int32 of any shape, -1 stays -1. Throws
/// kInternal for an entry beyond the table, kShape for more than 2^31 slots.
Tensor to_slots(const Tensor& entries, const PageTable& table);

// FP8 index pages: a page of n entries of dim values is n * dim bytes of e4m3 values, entry by
// entry, then n float32 scales; (dim + 4) bytes an entry.

/// uint8 [pages, page_size * (dim + 4)], zeros.
Tensor empty_fp8_pages(int64_t pages, int64_t page_size, int64_t dim);
/// rows.bytes [n, dim] and rows.scale [n] into slots int64 [n].
void write_fp8(const Tensor& cache, int64_t page_size, const Tensor& slots, const Fp8Rows& rows);
/// The rows at slots.
Fp8Rows read_fp8(const Tensor& cache, int64_t page_size, int64_t dim, const Tensor& slots);

}  // namespace lockstep::model
