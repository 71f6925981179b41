#include "model/base/packing.hpp"

#include <algorithm>
#include <utility>

#include "model/base/error.hpp"

namespace lockstep {

Packing::Packing(std::vector<int64_t> cu_seqlens, int64_t begin, int64_t end)
    : cu_seqlens_(std::move(cu_seqlens)), begin_(begin), end_(end) {
  const bool whole = is_whole();
  local_cu_.push_back(0);
  for (int64_t d = 0; d + 1 < static_cast<int64_t>(cu_seqlens_.size()); ++d) {
    const int64_t first = cu_seqlens_[static_cast<size_t>(d)],
                  last = cu_seqlens_[static_cast<size_t>(d) + 1];
    const int64_t lo = std::clamp(first, begin_, end_), hi = std::clamp(last, begin_, end_);
    if (lo == hi && !whole) continue;
    segments_.push_back({d, lo - begin_, hi - begin_, lo - first});
    local_cu_.push_back(hi - begin_);
  }
}

Packing Packing::whole(std::vector<int64_t> cu_seqlens) {
  LOCKSTEP_CHECK(!cu_seqlens.empty() && cu_seqlens.front() == 0,
                 kInput,
                 "packing: cu_seqlens must start with 0 (got {} entries)",
                 cu_seqlens.size());
  for (size_t i = 1; i < cu_seqlens.size(); ++i) {
    LOCKSTEP_CHECK(cu_seqlens[i] >= cu_seqlens[i - 1],
                   kInput,
                   "packing: cu_seqlens[{}] = {} is below cu_seqlens[{}] = {}",
                   i,
                   cu_seqlens[i],
                   i - 1,
                   cu_seqlens[i - 1]);
  }
  const int64_t tokens = cu_seqlens.back();
  return Packing(std::move(cu_seqlens), 0, tokens);
}

Packing Packing::of_lengths(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> cu{0};
  constexpr int64_t kMost = int64_t{1} << 40;  // products with widths stay inside 64 bits
  for (int64_t length : lengths) {
    LOCKSTEP_CHECK(length <= kMost && cu.back() + length <= kMost,
                   kInput,
                   "packing: document {} of {} tokens makes the row longer than {} tokens; use "
                   "fewer or shorter documents",
                   cu.size() - 1,
                   length,
                   kMost);
    cu.push_back(cu.back() + length);
  }
  return whole(std::move(cu));
}

Packing Packing::shard(int64_t begin, int64_t end) const {
  LOCKSTEP_CHECK(0 <= begin && begin <= end && end <= global_tokens(),
                 kMesh,
                 "packing: shard [{}, {}) is not inside the row of {} tokens",
                 begin,
                 end,
                 global_tokens());
  return Packing(cu_seqlens_, begin, end);
}

std::vector<int64_t> Packing::tile_bounds() const {
  std::vector<int64_t> bounds{0};
  for (const Segment& s : segments_) {
    LOCKSTEP_CHECK(
        s.position % kTileTokens == 0,
        kMesh,
        "packing: document {} is cut at its token {}; cut at multiples of {} tokens from "
        "a document's start",
        s.document,
        s.position,
        kTileTokens);
    for (int64_t row = s.begin; row < s.end; row += kTileTokens)
      bounds.push_back(std::min(row + kTileTokens, s.end));
  }
  return bounds;
}

bool Packing::continues_from_left() const {
  return !segments_.empty() && segments_.front().length() > 0 && segments_.front().position > 0;
}

bool Packing::continues_to_right() const {
  if (segments_.empty() || segments_.back().length() == 0) return false;
  const Segment& last = segments_.back();
  return begin_ + last.end < cu_seqlens_[static_cast<size_t>(last.document) + 1];
}

}  // namespace lockstep
