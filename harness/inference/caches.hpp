// What the engine keeps between steps: latent pages, index pages, and per request one slot with the
// tail ring, the convolution's last rows and the recurrent state.
#pragma once

#include <vector>

#include "harness/inference/id_pool.hpp"
#include "model/config/model_config.hpp"
#include "model/config/numerics.hpp"
#include "model/ops/paged_cache.hpp"

namespace lockstep::harness {

struct CacheSizes {
  int64_t page_size = 64;   ///< tokens of a latent page
  int64_t index_page = 16;  ///< pools of an index page
  int64_t pages = 0, index_pages = 0, slots = 0;
  uint64_t shuffle = 0;  ///< seed of the order in which they are handed out; 0: ascending
};

/// Index pages whose pools span no fewer tokens than a latent page, at least one pool.
int64_t index_page_of(int64_t page_size, int64_t kpool);
/// Just enough for requests of these lengths at the same time.
CacheSizes cache_sizes(int64_t page_size, int64_t kpool, const std::vector<int64_t>& lengths);

/// One request's place in the caches.
struct Sequence {
  int64_t slot = 0;                ///< 0: none
  model::PageTable latent, index;  ///< entries: tokens; pools
  int64_t length = 0;              ///< tokens whose rows are in the caches
  int64_t chunk_origin = 0;        ///< position from which KDA chunks are counted
};

struct KdaCache {
  Tensor conv;      ///< [slots, width - 1, 3 w] act: last raw rows of q, k, v
  Tensor state;     ///< [slots, H, V, K], after Sequence::length tokens; D27
  Tensor boundary;  ///< [slots, H, V, K] acc: after the last whole chunk; only where replayed
  Tensor open;      ///< [slots, chunk, 4 w + H] act: rows q, k, v, f, beta since then
};

struct DsaCache {
  Tensor latent;  ///< [slots of pages, R] act, or FP8 rows (latent_cache.hpp)
  Tensor index;   ///< [slots of index pages, d] act, or FP8 pages; undefined: shared indexer
  Tensor ring;    ///< [slots * kpool, 2 (key, gate), d] act; place p mod kpool of position p
};

class Caches {
 public:
  /// kda_heads, by layer: those of this rank. `chunk`: rows of a KDA chunk where open chunks are
  /// replayed, else 0.
  Caches(const model::ModelConfig& config,
         const model::Numerics& num,
         int64_t kda_heads,
         int64_t chunk,
         const CacheSizes& sizes);

  [[nodiscard]] const CacheSizes& sizes() const { return sizes_; }
  [[nodiscard]] bool fp8_index() const { return fp8_index_; }
  [[nodiscard]] const KdaCache& kda(int64_t layer) const {
    return kda_[static_cast<size_t>(layer)];
  }
  [[nodiscard]] const DsaCache& dsa(int64_t layer) const {
    return dsa_[static_cast<size_t>(layer)];
  }

  /// Pages and a slot so that the sequence can hold `tokens` tokens. False, with nothing taken,
  /// when there are not enough.
  bool reserve(Sequence& sequence, int64_t tokens);
  /// Gives everything back; the sequence is empty again.
  void release(Sequence& sequence);

  /// Everything that slot `from` holds, in every layer, also in slot `to`.
  void copy_slot(int64_t from, int64_t to) const;

  IdPool& pages() { return pages_; }
  IdPool& index_pages() { return index_pages_; }
  IdPool& slots() { return slots_; }
  [[nodiscard]] const IdPool& pages() const { return pages_; }
  [[nodiscard]] const IdPool& index_pages() const { return index_pages_; }
  [[nodiscard]] const IdPool& slots() const { return slots_; }

  /// Bytes of all tensors.
  [[nodiscard]] int64_t bytes() const;

 private:
  CacheSizes sizes_;
  int64_t kpool_;
  bool fp8_index_;
  IdPool pages_, index_pages_, slots_;
  std::vector<KdaCache> kda_;
  std::vector<DsaCache> dsa_;
};

}  // namespace lockstep::harness
