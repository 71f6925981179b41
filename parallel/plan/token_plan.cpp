#include "parallel/plan/token_plan.hpp"

#include <algorithm>

#include "model/base/error.hpp"

namespace lockstep::parallel {
namespace {

/// Documents [result[d], result[d + 1]) go to data rank d: where a document's middle falls.
std::vector<int64_t> document_cuts(const Packing& batch, int64_t data_ranks) {
  const std::vector<int64_t>& cu = batch.cu_seqlens();
  const int64_t tokens = batch.global_tokens();
  std::vector<int64_t> cuts(static_cast<size_t>(data_ranks) + 1, batch.num_documents());
  cuts[0] = 0;
  for (int64_t doc = batch.num_documents() - 1; doc >= 0; --doc) {
    const auto i = static_cast<size_t>(doc);
    const int64_t owner =
        tokens == 0 ? 0 : std::min((cu[i] + cu[i + 1]) * data_ranks / (2 * tokens), data_ranks - 1);
    for (int64_t d = owner + 1; d <= data_ranks; ++d)
      cuts[static_cast<size_t>(d)] = std::max(cuts[static_cast<size_t>(d)], doc + 1);
    for (int64_t d = 1; d <= owner; ++d)
      cuts[static_cast<size_t>(d)] = std::min(cuts[static_cast<size_t>(d)], doc);
  }
  return cuts;
}

/// bounds: those of the tiles of a row of documents.
std::vector<int64_t> canonical_cuts(const std::vector<int64_t>& bounds, int64_t ranks) {
  const int64_t tokens = bounds.back();
  std::vector<int64_t> cuts = even_cuts(tokens, ranks);
  for (int64_t& cut : cuts) {
    const auto above = std::lower_bound(bounds.begin(), bounds.end(), cut);
    // The nearest; of two the lower.
    cut = above != bounds.begin() && cut - *(above - 1) <= *above - cut ? *(above - 1) : *above;
  }
  cuts.front() = 0;
  cuts.back() = tokens;
  return cuts;
}

void check_canonical(const std::vector<int64_t>& bounds, const std::vector<int64_t>& cuts) {
  for (const int64_t cut : cuts) {
    LOCKSTEP_CHECK(std::binary_search(bounds.begin(), bounds.end(), cut),
                   kMesh,
                   "tokens: a cut at row {} is inside a tile of {} tokens; invariant policies cut "
                   "at multiples of {} from a document's start (or leave the cuts out)",
                   cut,
                   kTileTokens,
                   kTileTokens);
  }
}

}  // namespace

std::optional<std::string> cp_blocker(const model::Topology& topology,
                                      const Packing& batch,
                                      const std::vector<int64_t>& cuts) {
  if (cuts.empty()) return std::nullopt;
  const int64_t data_ranks = topology.dp * topology.fsdp, tokens = batch.global_tokens();
  if (data_ranks != 1) {
    return fmt::format("cuts were given for one row, but {} has {} rows; leave them out",
                       model::to_string(topology),
                       data_ranks);
  }
  if (static_cast<int64_t>(cuts.size()) == topology.cp + 1 && cuts.front() == 0 &&
      cuts.back() == tokens && std::is_sorted(cuts.begin(), cuts.end()))
    return std::nullopt;
  return fmt::format(
      "{} cuts from {} to {} do not fit cp = {} and {} tokens; give cp + 1 rows from 0 to the "
      "number of tokens",
      cuts.size(),
      cuts.front(),
      cuts.back(),
      topology.cp,
      tokens);
}

TokenPlan plan_tokens(const model::Topology& topology,
                      const Coordinates& place,
                      const Packing& batch,
                      const std::vector<int64_t>& cuts,
                      bool canonical) {
  const int64_t data_ranks = topology.dp * topology.fsdp;
  const std::vector<int64_t>& cu = batch.cu_seqlens();
  if (const auto reason = cp_blocker(topology, batch, cuts))
    fail(ErrorKind::kMesh, "tokens: {}", *reason);
  const std::vector<int64_t> documents = document_cuts(batch, data_ranks);
  const int64_t mine = place.dp * topology.fsdp + place.fsdp;
  TokenPlan plan;
  for (int64_t d = 0; d < data_ranks; ++d) {
    const auto first = static_cast<size_t>(documents[static_cast<size_t>(d)]),
               last = static_cast<size_t>(documents[static_cast<size_t>(d) + 1]);
    const int64_t tokens = cu[last] - cu[first];
    std::vector<int64_t> row_cu;
    for (size_t i = first; i <= last; ++i) row_cu.push_back(cu[i] - cu[first]);
    const Packing row = Packing::whole(std::move(row_cu));
    std::vector<int64_t> row_cuts = cuts;
    if (canonical) {
      const std::vector<int64_t> bounds = row.tile_bounds();
      if (cuts.empty()) row_cuts = canonical_cuts(bounds, topology.cp);
      check_canonical(bounds, row_cuts);
    } else if (cuts.empty()) {
      row_cuts = even_cuts(tokens, topology.cp);
    }
    for (size_t r = 0; r + 1 < row_cuts.size(); ++r)
      plan.rows.push_back(row_cuts[r + 1] - row_cuts[r]);
    if (d != mine) continue;
    const auto cp = static_cast<size_t>(place.cp);
    plan.packing = topology.cp > 1 ? row.shard(row_cuts[cp], row_cuts[cp + 1]) : row;
    plan.cuts = row_cuts;
    plan.row_begin = cu[first];
    plan.begin = cu[first] + row_cuts[cp];
    plan.end = cu[first] + row_cuts[cp + 1];
  }
  return plan;
}

}  // namespace lockstep::parallel
