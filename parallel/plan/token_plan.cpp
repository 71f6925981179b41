#include "parallel/plan/token_plan.hpp"

#include <algorithm>

#include "model/base/error.hpp"

namespace lockstep::parallel {
namespace {

/// First document of data rank d, or the number of documents: a document goes where its middle
/// falls.
int64_t first_document(const Packing& batch, int64_t data_ranks, int64_t d) {
  const std::vector<int64_t>& cu = batch.cu_seqlens();
  const int64_t tokens = batch.global_tokens();
  const auto owner = [&](int64_t doc) {
    const auto i = static_cast<size_t>(doc);
    return tokens == 0 ? int64_t{0}
                       : std::min((cu[i] + cu[i + 1]) * data_ranks / (2 * tokens), data_ranks - 1);
  };
  int64_t first = 0, last = batch.num_documents();
  while (first < last) {
    const int64_t middle = (first + last) / 2;
    if (owner(middle) < d) {
      first = middle + 1;
    } else {
      last = middle;
    }
  }
  return first;
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

Packing TokenRow::held(int64_t cp) const {
  const auto r = static_cast<size_t>(cp);
  return cuts.size() > 2 ? packing.shard(cuts[r], cuts[r + 1]) : packing;
}

TokenPlan TokenRow::part(int64_t cp) const {
  const auto r = static_cast<size_t>(cp);
  TokenPlan plan;
  plan.packing = held(cp);
  plan.cuts = cuts;
  plan.row_begin = begin;
  plan.begin = begin + cuts[r];
  plan.end = begin + cuts[r + 1];
  return plan;
}

TokenRow plan_row(const model::Topology& topology,
                  int64_t row,
                  const Packing& batch,
                  const std::vector<int64_t>& cuts,
                  bool canonical) {
  const int64_t data_ranks = topology.dp * topology.fsdp;
  const std::vector<int64_t>& cu = batch.cu_seqlens();
  if (const auto reason = cp_blocker(topology, batch, cuts))
    fail(ErrorKind::kMesh, "tokens: {}", *reason);
  const auto first = static_cast<size_t>(first_document(batch, data_ranks, row)),
             last = static_cast<size_t>(first_document(batch, data_ranks, row + 1));
  std::vector<int64_t> row_cu;
  for (size_t i = first; i <= last; ++i) row_cu.push_back(cu[i] - cu[first]);
  TokenRow result{Packing::whole(std::move(row_cu)), cuts, cu[first]};
  if (canonical) {
    const std::vector<int64_t> bounds = result.packing.tile_bounds();
    if (cuts.empty()) result.cuts = canonical_cuts(bounds, topology.cp);
    check_canonical(bounds, result.cuts);
  } else if (cuts.empty()) {
    result.cuts = even_cuts(result.packing.global_tokens(), topology.cp);
  }
  return result;
}

TokenPlan plan_tokens(const model::Topology& topology,
                      const Coordinates& place,
                      const Packing& batch,
                      const std::vector<int64_t>& cuts,
                      bool canonical) {
  const int64_t mine = place.dp * topology.fsdp + place.fsdp;
  TokenPlan plan;
  std::vector<int64_t> rows;
  for (int64_t d = 0; d < topology.dp * topology.fsdp; ++d) {
    const TokenRow row = plan_row(topology, d, batch, cuts, canonical);
    for (size_t r = 0; r + 1 < row.cuts.size(); ++r) rows.push_back(row.cuts[r + 1] - row.cuts[r]);
    if (d == mine) plan = row.part(place.cp);
  }
  plan.rows = std::move(rows);
  return plan;
}

}  // namespace lockstep::parallel
