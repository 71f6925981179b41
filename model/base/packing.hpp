// Documents packed into one row, and the part of that row a process holds.
#pragma once

#include <cstdint>
#include <vector>

namespace lockstep {

/// Tokens of a canonical tile, counted from the start of each document.
inline constexpr int64_t kTileTokens = 64;

/// A run of consecutive local rows that belong to one document.
struct Segment {
  int64_t document;  ///< index of the document in the global row
  int64_t begin;     ///< first local row
  int64_t end;       ///< one past the last local row; begin == end for an empty document
  int64_t position;  ///< position inside its document of row `begin`

  [[nodiscard]] int64_t length() const { return end - begin; }
};

/// The global row's document boundaries and the contiguous range [begin, end) of it held here.
/// Immutable; every layer keeps its own copy, so that recomputing a layer sees the boundaries its
/// first forward saw.
class Packing {
 public:
  /// Every row is local. cu_seqlens = {0, ..., T}, not decreasing; empty documents are legal
  /// anywhere. Rows past the last boundary do not exist: callers strip padding first. Throws kInput
  /// otherwise.
  static Packing whole(std::vector<int64_t> cu_seqlens);

  /// Boundaries from document lengths.
  static Packing of_lengths(const std::vector<int64_t>& lengths);

  /// The same global row, of which this process holds [begin, end). Throws kMesh if the range is
  /// not inside the row.
  [[nodiscard]] Packing shard(int64_t begin, int64_t end) const;

  [[nodiscard]] const std::vector<int64_t>& cu_seqlens() const { return cu_seqlens_; }
  [[nodiscard]] int64_t num_documents() const {
    return static_cast<int64_t>(cu_seqlens_.size()) - 1;
  }
  [[nodiscard]] int64_t global_tokens() const { return cu_seqlens_.back(); }
  [[nodiscard]] int64_t begin() const { return begin_; }
  [[nodiscard]] int64_t end() const { return end_; }
  [[nodiscard]] int64_t local_tokens() const { return end_ - begin_; }
  [[nodiscard]] bool is_whole() const { return begin_ == 0 && end_ == global_tokens(); }

  /// Local pieces in row order. A whole row lists every document, empty ones included; a shard
  /// lists the non-empty pieces.
  [[nodiscard]] const std::vector<Segment>& segments() const { return segments_; }
  /// Local boundaries of segments(): {0, ..., local_tokens}, one more entry than segments.
  [[nodiscard]] const std::vector<int64_t>& local_cu_seqlens() const { return local_cu_; }

  /// Local bounds {0, ..., local_tokens} of the tiles of kTileTokens rows of every piece; the last
  /// tile of a document may be shorter. Throws kMesh if this shard starts inside a tile.
  [[nodiscard]] std::vector<int64_t> tile_bounds() const;

  /// The first local piece continues a document that started before this shard.
  [[nodiscard]] bool continues_from_left() const;
  /// The last local piece's document goes on after this shard.
  [[nodiscard]] bool continues_to_right() const;

 private:
  Packing(std::vector<int64_t> cu_seqlens, int64_t begin, int64_t end);

  std::vector<int64_t> cu_seqlens_, local_cu_;
  int64_t begin_ = 0, end_ = 0;
  std::vector<Segment> segments_;
};

}  // namespace lockstep
