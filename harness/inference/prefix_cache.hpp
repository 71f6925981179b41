// Prefixes of earlier requests that later ones start from: their pages, shared, and a copy of the
// recurrent state, convolution rows and ring after exactly so many tokens.
#pragma once

#include <list>
#include <map>
#include <vector>

#include "harness/inference/caches.hpp"

namespace lockstep::harness {

/// Entries end at multiples of block() tokens, which are ends of latent and of index pages, so a
/// shared page is never written again. A key holds the version of the weights, and entries compare
/// their tokens: a prefix computed with other weights or other tokens is never found.
class PrefixCache {
 public:
  /// At most `entries` entries, which take that many slots of `caches`; 0 stores nothing. `block`
  /// tokens, rounded up to whole pages.
  PrefixCache(Caches& caches, int64_t kpool, int64_t block, int64_t entries);
  ~PrefixCache();
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

  [[nodiscard]] int64_t block() const { return block_; }
  [[nodiscard]] bool enabled() const { return capacity_ > 0; }

  /// Starts an empty sequence from the longest stored prefix of `tokens` that leaves at least one
  /// token to compute. Returns the tokens reused: 0 where there is none, or no free slot.
  int64_t start(Sequence& sequence, const std::vector<int64_t>& tokens, int64_t version);
  /// Stores the first sequence.length tokens if that is a boundary and not stored yet, in the place
  /// of the entry that was not used for longest if there is no other room.
  void store(const Sequence& sequence, const std::vector<int64_t>& tokens, int64_t version);
  /// Drops the entry not used for longest. False when there is none.
  bool evict();
  void clear();
  [[nodiscard]] int64_t size() const { return static_cast<int64_t>(entries_.size()); }

  struct Entry {
    int64_t version;
    std::vector<int64_t> tokens;
    Sequence sequence;  ///< holds pages and a slot
  };
  /// Least recently used first.
  [[nodiscard]] const std::list<Entry>& entries() const { return entries_; }

 private:
  std::list<Entry>::iterator find(const std::vector<int64_t>& tokens,
                                  int64_t count,
                                  int64_t version);
  void drop(std::list<Entry>::iterator entry);

  Caches& caches_;
  int64_t kpool_, block_, capacity_;
  std::list<Entry> entries_;
};

}  // namespace lockstep::harness
