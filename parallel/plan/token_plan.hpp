// Which tokens of a batch each rank holds.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "model/base/packing.hpp"
#include "model/config/topology.hpp"
#include "parallel/mesh/layout.hpp"

namespace lockstep::parallel {

/// Documents, whole and in order, go to the dp x fsdp ranks near-evenly by tokens; each such row of
/// documents is cut over its cp ranks. So the ranks of the tokens circle, in order, hold the batch
/// in order, and ranks of one tp circle hold the same tokens.
struct TokenPlan {
  Packing packing = Packing::whole({0});  ///< this rank's row, and the part of it held here
  std::vector<int64_t> cuts;   ///< of this row over cp: rank r holds rows [cuts[r], cuts[r + 1])
  int64_t row_begin = 0;       ///< first token of this row in the batch
  int64_t begin = 0, end = 0;  ///< tokens held here, counted in the batch
  std::vector<int64_t> rows;   ///< tokens of each rank of the tokens circle
};

/// Why a batch cannot be cut over context-parallel ranks as asked; nothing when it can. Documents
/// of any number and length can be cut anywhere, and ranks may get no token; heads play no part,
/// since cp does not split them. What remains are `cuts` that do not fit (empty: near-even).
std::optional<std::string> cp_blocker(const model::Topology& topology,
                                      const Packing& batch,
                                      const std::vector<int64_t>& cuts);

/// A row of documents and where cp cuts it.
struct TokenRow {
  Packing packing = Packing::whole({0});
  std::vector<int64_t> cuts;  ///< rank r of cp holds rows [cuts[r], cuts[r + 1])
  int64_t begin = 0;          ///< its first token in the batch

  /// The documents with the part of rank `cp` of cp.
  [[nodiscard]] Packing held(int64_t cp) const;
  /// All of what that rank holds, without `rows`.
  [[nodiscard]] TokenPlan part(int64_t cp) const;
};

/// Row `row` of the dp x fsdp ones; arguments and errors are plan_tokens'.
TokenRow plan_row(const model::Topology& topology,
                  int64_t row,
                  const Packing& batch,
                  const std::vector<int64_t>& cuts,
                  bool canonical = false);

/// `batch`: the whole batch. cuts empty: near-even; else the cuts of the one row (dp x fsdp must be
/// 1). canonical: rows are cut at starts of tiles only (kTileTokens, counted from each document's
/// start), the ones nearest to even, so that a rank may get no tokens. Throws kMesh with what
/// cp_blocker says, or naming a forced cut inside a tile.
TokenPlan plan_tokens(const model::Topology& topology,
                      const Coordinates& place,
                      const Packing& batch,
                      const std::vector<int64_t>& cuts,
                      bool canonical = false);

}  // namespace lockstep::parallel
