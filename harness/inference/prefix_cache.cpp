#include "harness/inference/prefix_cache.hpp"

#include <algorithm>
#include <numeric>

namespace lockstep::harness {

PrefixCache::PrefixCache(Caches& caches, int64_t kpool, int64_t block, int64_t entries)
    : caches_(caches), kpool_(kpool), capacity_(entries) {
  const int64_t page = std::lcm(caches.sizes().page_size, caches.sizes().index_page * kpool);
  block_ = (std::max<int64_t>(block, 1) + page - 1) / page * page;
}

// NOLINTNEXTLINE(bugprone-exception-escape): what is held can be given back; else a count is broken
PrefixCache::~PrefixCache() { clear(); }

std::list<PrefixCache::Entry>::iterator PrefixCache::find(const std::vector<int64_t>& tokens,
                                                          int64_t count,
                                                          int64_t version) {
  return std::find_if(entries_.begin(), entries_.end(), [&](const Entry& entry) {
    return entry.version == version && static_cast<int64_t>(entry.tokens.size()) == count &&
           std::equal(entry.tokens.begin(), entry.tokens.end(), tokens.begin());
  });
}

int64_t PrefixCache::start(Sequence& sequence,
                           const std::vector<int64_t>& tokens,
                           int64_t version) {
  const auto known = static_cast<int64_t>(tokens.size());
  for (int64_t count = (known - 1) / block_ * block_; count > 0; count -= block_) {
    const auto entry = find(tokens, count, version);
    if (entry == entries_.end()) continue;
    const std::optional<int64_t> slot = caches_.slots().take();
    if (!slot) return 0;
    sequence = entry->sequence;
    sequence.slot = *slot;
    caches_.copy_slot(entry->sequence.slot, *slot);
    for (const int64_t page : sequence.latent.pages) caches_.pages().hold(page);
    for (const int64_t page : sequence.index.pages) caches_.index_pages().hold(page);
    entries_.splice(entries_.end(), entries_, entry);
    return count;
  }
  return 0;
}

void PrefixCache::store(const Sequence& sequence,
                        const std::vector<int64_t>& tokens,
                        int64_t version) {
  const int64_t count = sequence.length;
  if (capacity_ == 0 || count == 0 || count % block_ != 0) return;
  const auto known = find(tokens, count, version);
  if (known != entries_.end()) {
    entries_.splice(entries_.end(), entries_, known);
    return;
  }
  if (size() >= capacity_) evict();
  const std::optional<int64_t> slot = caches_.slots().take();
  if (!slot) return;
  Entry entry{version, {tokens.begin(), tokens.begin() + count}, sequence};
  entry.sequence.slot = *slot;
  caches_.copy_slot(sequence.slot, *slot);
  entry.sequence.latent.pages.resize(static_cast<size_t>(count / caches_.sizes().page_size));
  entry.sequence.index.pages.resize(
      static_cast<size_t>(count / (caches_.sizes().index_page * kpool_)));
  for (const int64_t page : entry.sequence.latent.pages) caches_.pages().hold(page);
  for (const int64_t page : entry.sequence.index.pages) caches_.index_pages().hold(page);
  entries_.push_back(std::move(entry));
}

void PrefixCache::drop(std::list<Entry>::iterator entry) {
  caches_.release(entry->sequence);
  entries_.erase(entry);
}

bool PrefixCache::evict() {
  if (entries_.empty()) return false;
  drop(entries_.begin());
  return true;
}

void PrefixCache::clear() {
  while (evict()) {
  }
}

}  // namespace lockstep::harness
