#include "harness/inference/batch.hpp"

#include <algorithm>
#include <set>

namespace lockstep::harness {
namespace {

Tensor int64s(const std::vector<int64_t>& values) { return at::tensor(values, at::kLong); }

}  // namespace

Batch::Batch(std::vector<BatchItem> items_in, int64_t kpool) : items(std::move(items_in)), cu{0} {
  std::vector<int64_t> tokens, slot_of, latent, source, pools, stash, stash_at;
  std::vector<uint8_t> old;
  std::set<const Sequence*> seen;
  pool_cu = {0};
  for (const BatchItem& item : items) {
    const Sequence& sequence = *item.sequence;
    const auto count = static_cast<int64_t>(item.ids.size());
    const int64_t position = sequence.length, length = position + count;
    LOCKSTEP_CHECK(!item.decode || (count == 1 && num_decode == static_cast<int64_t>(parts.size())),
                   kInput,
                   "batch: decoded requests come first, with one token each; item {} has {}",
                   parts.size(),
                   count);
    LOCKSTEP_CHECK(seen.insert(&sequence).second && sequence.slot != 0 &&
                       sequence.latent.capacity() >= length &&
                       sequence.index.capacity() >= length / kpool,
                   kInput,
                   "batch: item {} is named twice, or {} tokens were not reserved",
                   parts.size(),
                   length);
    num_decode += item.decode ? 1 : 0;
    parts.push_back({cu.back(), cu.back() + count, position});
    tokens.insert(tokens.end(), item.ids.begin(), item.ids.end());
    slot_of.push_back(sequence.slot);
    old.push_back(position > 0 ? 1 : 0);
    for (int64_t p = position; p < length; ++p) latent.push_back(sequence.latent.slot(p));

    const int64_t first_pool = position / kpool;
    for (int64_t p = first_pool * kpool; p < position; ++p)
      source.push_back(-1 - model::ring_slot(sequence.slot, p, kpool));
    for (int64_t i = 0; i < count; ++i) source.push_back(cu.back() + i);
    pool_cu.push_back(static_cast<int64_t>(source.size()));
    for (int64_t pool = first_pool; pool < length / kpool; ++pool) {
      if (!item.decode && pool * kpool < position)
        straddling.push_back(static_cast<int64_t>(pools.size()));
      pools.push_back(sequence.index.slot(pool));
    }
    for (int64_t p = std::max(position, length - kpool); p < length; ++p) {
      stash.push_back(cu.back() + p - position);
      stash_at.push_back(model::ring_slot(sequence.slot, p, kpool));
    }
    cu.push_back(cu.back() + count);
  }
  ids = int64s(tokens);
  slots = int64s(slot_of);
  continues = at::tensor(old, at::kByte).to(at::kBool);
  latent_slots = int64s(latent);
  pool_source = int64s(source);
  pool_slots = int64s(pools);
  ring_rows = int64s(stash);
  ring_slots = int64s(stash_at);
}

}  // namespace lockstep::harness
