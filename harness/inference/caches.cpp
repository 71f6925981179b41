#include "harness/inference/caches.hpp"

#include <algorithm>

#include "model/ops/latent_cache.hpp"

namespace lockstep::harness {
namespace {

using model::Switch;

int64_t pages_for(int64_t entries, int64_t page) { return (entries + page - 1) / page; }

}  // namespace

int64_t index_page_of(int64_t page_size, int64_t kpool) {
  return std::max<int64_t>(1, pages_for(page_size, kpool));
}

CacheSizes cache_sizes(int64_t page_size, int64_t kpool, const std::vector<int64_t>& lengths) {
  CacheSizes sizes{.page_size = page_size, .index_page = index_page_of(page_size, kpool)};
  for (const int64_t length : lengths) {
    sizes.pages += pages_for(length, sizes.page_size);
    sizes.index_pages += pages_for(length / kpool, sizes.index_page);
    ++sizes.slots;
  }
  return sizes;
}

Caches::Caches(const model::ModelConfig& config,
               const model::Numerics& num,
               int64_t kda_heads,
               int64_t chunk,
               const CacheSizes& sizes)
    : sizes_(sizes),
      kpool_(config.index_kpool),
      fp8_index_(num.rounds<Switch::kIndexerScoring>("fp8")),
      pages_("latent pages", sizes.pages, sizes.shuffle),
      index_pages_("index pages", sizes.index_pages, sizes.shuffle),
      slots_("slots", sizes.slots, sizes.shuffle) {
  LOCKSTEP_CHECK(sizes.page_size >= 1 && sizes.index_page >= 1,
                 kConfig,
                 "inference: a page of {} tokens and {} pools; both must be at least 1",
                 sizes.page_size,
                 sizes.index_page);
  const auto zeros = [](at::IntArrayRef shape, at::ScalarType dtype) {
    return at::zeros(shape, dtype);
  };
  const int64_t slots = sizes.slots + 1, dim = config.linear_head_dim, width = kda_heads * dim;
  const at::ScalarType state = num.rounds<Switch::kStateCache>("bf16") ? at::kBFloat16 : num.acc();
  for (size_t layer = 0; layer < config.mixers.size(); ++layer) {
    KdaCache kda;
    DsaCache dsa;
    if (config.mixers[layer] == model::MixerKind::kKda) {
      kda.conv = zeros({slots, config.linear_conv_kernel_dim - 1, 3 * width}, num.act());
      kda.state = zeros({slots, kda_heads, dim, dim}, state);
      if (chunk > 0) {
        kda.boundary = zeros({slots, kda_heads, dim, dim}, num.acc());
        kda.open = zeros({slots, chunk, 4 * width + kda_heads}, num.act());
      }
    } else {
      const int64_t d = config.index_head_dim;
      const int64_t rank = config.kv_lora_rank, rows = (sizes.pages + 1) * sizes.page_size;
      dsa.latent = num.rounds<Switch::kLatentCache>("fp8")
                       ? zeros({rows, model::fp8_latent_bytes(rank)}, at::kByte)
                       : zeros({rows, rank}, num.act());
      if (!config.indexer_shared[layer]) {
        dsa.index = fp8_index_ ? model::empty_fp8_pages(sizes.index_pages + 1, sizes.index_page, d)
                               : zeros({(sizes.index_pages + 1) * sizes.index_page, d}, num.act());
        dsa.ring = zeros({slots * kpool_, 2, d}, num.act());
      }
    }
    kda_.push_back(std::move(kda));
    dsa_.push_back(std::move(dsa));
  }
}

bool Caches::reserve(Sequence& sequence, int64_t tokens) {
  sequence.latent.page_size = sizes_.page_size;
  sequence.index.page_size = sizes_.index_page;
  const auto lacking = [](const model::PageTable& table, int64_t entries) {
    return std::max<int64_t>(
        0, pages_for(entries, table.page_size) - static_cast<int64_t>(table.pages.size()));
  };
  const int64_t latent = lacking(sequence.latent, tokens),
                index = lacking(sequence.index, tokens / kpool_);
  if (latent > pages_.free() || index > index_pages_.free()) return false;
  if (sequence.slot == 0) {
    const std::optional<int64_t> slot = slots_.take();
    if (!slot) return false;
    sequence.slot = *slot;
  }
  for (int64_t i = 0; i < latent; ++i) sequence.latent.pages.push_back(*pages_.take());
  for (int64_t i = 0; i < index; ++i) sequence.index.pages.push_back(*index_pages_.take());
  return true;
}

void Caches::release(Sequence& sequence) {
  for (const int64_t page : sequence.latent.pages) pages_.give(page);
  for (const int64_t page : sequence.index.pages) index_pages_.give(page);
  if (sequence.slot != 0) slots_.give(sequence.slot);
  sequence = {};
}

void Caches::copy_slot(int64_t from, int64_t to) const {
  const auto copy = [&](const Tensor& t, int64_t rows) {
    if (t.defined()) t.narrow(0, to * rows, rows).copy_(t.narrow(0, from * rows, rows));
  };
  for (const KdaCache& c : kda_)
    for (const Tensor* t : {&c.conv, &c.state, &c.boundary, &c.open}) copy(*t, 1);
  for (const DsaCache& c : dsa_) copy(c.ring, kpool_);
}

int64_t Caches::bytes() const {
  int64_t sum = 0;
  const auto add = [&](const Tensor& t) {
    sum += t.defined() ? static_cast<int64_t>(t.nbytes()) : 0;
  };
  for (const KdaCache& c : kda_)
    for (const Tensor* t : {&c.conv, &c.state, &c.boundary, &c.open}) add(*t);
  for (const DsaCache& c : dsa_)
    for (const Tensor* t : {&c.latent, &c.index, &c.ring}) add(*t);
  return sum;
}

}  // namespace lockstep::harness
