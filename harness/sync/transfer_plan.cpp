#include "harness/sync/transfer_plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "harness/inference/weights.hpp"
#include "model/layers/parameter_policy.hpp"
#include "parallel/comm/ledger.hpp"
#include "parallel/mesh/layout.hpp"

namespace lockstep::harness {
namespace {

using parallel::Run;

int64_t index_of(const std::vector<int64_t>& ranks, int64_t rank) {
  const auto found = std::find(ranks.begin(), ranks.end(), rank);
  return found == ranks.end() ? -1 : found - ranks.begin();
}

/// Elements that both have, in [begin, end) of the whole.
std::vector<Copy> common(const std::vector<Run>& from,
                         const std::vector<Run>& to,
                         int64_t begin,
                         int64_t end) {
  std::vector<Copy> copies;
  const auto first = [&](const std::vector<Run>& runs, int64_t at) {
    return std::partition_point(
        runs.begin(), runs.end(), [&](const Run& run) { return run.whole + run.count <= at; });
  };
  if (from.empty() || to.empty()) return copies;
  begin = std::max({begin, from.front().whole, to.front().whole});
  auto f = first(from, begin), t = first(to, begin);
  while (f != from.end() && t != to.end()) {
    const int64_t at = std::max({begin, f->whole, t->whole}),
                  stop = std::min({end, f->whole + f->count, t->whole + t->count});
    if (at >= end) break;
    if (at < stop)
      copies.push_back({at, f->part + at - f->whole, t->part + at - t->whole, stop - at});
    (f->whole + f->count < t->whole + t->count) ? ++f : ++t;
  }
  return copies;
}

/// runs() of rows [begin, end) of a part, but for rows outside of a piece.
std::vector<Run> runs_in(const parallel::Placement& placed,
                         int64_t begin,
                         int64_t end,
                         const Piece& piece) {
  if (placed.slice.dim == 0) return runs(placed, begin, end);
  const int64_t whole_row = placed.parameter.numel() / placed.parameter.shape[0];
  const int64_t from = std::max(begin, piece.begin / whole_row - placed.first),
                to = std::min(end, (piece.end + whole_row - 1) / whole_row - placed.first);
  if (from >= to) return {};
  std::vector<Run> result = runs(placed, from, to);
  int64_t row = from - begin;
  const std::vector<int64_t> shape = placed.shape();
  for (size_t d = 1; d < shape.size(); ++d) row *= shape[d];
  for (Run& run : result) run.part += row;
  return result;
}

}  // namespace

std::vector<int64_t> consecutive_ranks(int64_t first, int64_t count) {
  std::vector<int64_t> ranks(static_cast<size_t>(count));
  std::iota(ranks.begin(), ranks.end(), first);
  return ranks;
}

at::ScalarType wire_dtype(const model::Parameter& parameter, const model::Numerics& engine) {
  using model::Switch;
  if (!engine.is_bf16() || engine.invariant())
    return model::parameter_dtype(parameter.name, engine);
  const auto pick = [](bool fp32) { return fp32 ? at::kFloat : at::kBFloat16; };
  if (parameter.conv) return pick(engine.is<Switch::kConvWeightSync>("fp32"));
  if (parameter.island || parameter.buffer) return pick(engine.is<Switch::kWireDtype>("fp32"));
  return at::kBFloat16;
}

TransferPlan::TransferPlan(SyncSides sides, int64_t bucket_bytes) : sides_(std::move(sides)) {
  LOCKSTEP_CHECK(bucket_bytes >= 64,
                 kConfig,
                 "weight sync: a bucket of {} bytes; give at least 64",
                 bucket_bytes);
  const auto check =
      [](std::string_view who, const model::Topology& topology, const std::vector<int64_t>& ranks) {
        LOCKSTEP_CHECK(static_cast<int64_t>(ranks.size()) == topology.num_ranks(),
                       kMesh,
                       "weight sync: the {} has {} ranks, {} needs {}",
                       who,
                       ranks.size(),
                       model::to_string(topology),
                       topology.num_ranks());
      };
  check("trainer", sides_.trainer_topology, sides_.trainer_ranks);
  check("engine", sides_.engine_topology, sides_.engine_ranks);
  LOCKSTEP_CHECK(sides_.engine_topology.num_ranks() == sides_.engine_topology.tp,
                 kMesh,
                 "weight sync: the engine runs the tp axis only, got {}",
                 model::to_string(sides_.engine_topology));
  for (model::Parameter& parameter : model::expected_parameters(sides_.config)) {
    if (sides_.config.tie_word_embeddings && parameter.name == "lm_head.weight") continue;
    wire_.push_back(wire_dtype(parameter, sides_.engine));
    parameters_.push_back(std::move(parameter));
  }
  // Parameters that differ in nothing but their layer are laid out alike, and have the same ones
  // where they take the same replica.
  std::map<std::tuple<std::string, bool, int64_t>, std::pair<size_t, size_t>> alike;
  for (size_t p = 0; p < parameters_.size(); ++p) {
    const auto [known, added] =
        alike.emplace(kind_of(p), std::pair(transfers_.size(), transfers_.size()));
    if (!added) {
      for (size_t t = known->second.first; t < known->second.second; ++t) {
        transfers_.push_back(transfers_[t]);
        transfers_.back().parameter = p;
      }
      continue;
    }
    std::vector<std::vector<Run>> have;
    std::vector<Source> sources;
    for (size_t i = 0; i < sides_.trainer_ranks.size(); ++i) {
      sources.push_back(source(p, static_cast<int64_t>(i)));
      have.push_back(runs(sources.back().placed, sources.back().begin, sources.back().end));
    }
    for (size_t j = 0; j < sides_.engine_ranks.size(); ++j) {
      const int64_t to = sides_.engine_ranks[j];
      const parallel::Placement placed = target(p, static_cast<int64_t>(j));
      const std::vector<Run> wanted = runs(placed, 0, placed.shape()[0]);
      for (size_t i = 0; i < sources.size(); ++i) {
        const int64_t from = sides_.trainer_ranks[i];
        if (!holds(p, from, to)) continue;
        Transfer transfer{p, from, to, sources[i].begin, sources[i].end, 0, 0};
        for (const Copy& copy : common(have[i], wanted, 0, parameters_[p].numel()))
          transfer.elements += copy.count;
        transfer.bytes = transfer.elements * wire_bytes(p);
        if (transfer.elements > 0) transfers_.push_back(transfer);
      }
    }
    known->second.second = transfers_.size();
  }
  plan_buckets(bucket_bytes);
}

std::tuple<std::string, bool, int64_t> TransferPlan::kind_of(size_t parameter) const {
  const model::Parameter& p = parameters_[parameter];
  const int64_t replica = static_cast<int64_t>(parameter) % sides_.trainer_topology.dp;
  if (p.layer < 0) return {p.name, false, replica};
  return {p.name.substr(fmt::format("layers.{}", p.layer).size()),
          sides_.config.mixers[static_cast<size_t>(p.layer)] == model::MixerKind::kKda,
          replica};
}

int64_t TransferPlan::trainer_rank(int64_t rank) const {
  return index_of(sides_.trainer_ranks, rank);
}
int64_t TransferPlan::engine_rank(int64_t rank) const {
  return index_of(sides_.engine_ranks, rank);
}

TransferPlan::Source TransferPlan::source(size_t parameter, int64_t trainer_rank) const {
  const parallel::Coordinates place = parallel::coordinates(sides_.trainer_topology, trainer_rank);
  Source source{
      parallel::place_parameter(
          sides_.config, sides_.trainer, sides_.trainer_topology, place, parameters_[parameter]),
      0,
      0};
  const std::vector<int64_t> sharers = parallel::members(
      sides_.trainer_topology,
      parameters_[parameter].expert ? parallel::Circle::kExpertShard : parallel::Circle::kShard,
      trainer_rank);
  const std::vector<int64_t> cuts =
      parallel::even_cuts(source.placed.shape()[0], static_cast<int64_t>(sharers.size()));
  const auto own = static_cast<size_t>(index_of(sharers, trainer_rank));
  source.begin = cuts[own];
  source.end = cuts[own + 1];
  return source;
}

parallel::Placement TransferPlan::target(size_t parameter, int64_t engine_rank) const {
  return engine_placement(sides_.config,
                          sides_.engine,
                          sides_.engine_topology,
                          parallel::coordinates(sides_.engine_topology, engine_rank),
                          parameters_[parameter]);
}

/// Whether `from` is the one of the ranks with the same rows that sends them to `to`.
bool TransferPlan::holds(size_t parameter, int64_t from, int64_t to) const {
  const model::Topology& topology = sides_.trainer_topology;
  const parallel::Coordinates place = parallel::coordinates(topology, trainer_rank(from));
  const int64_t own = trainer_rank(to);
  const parallel::Coordinates near =
      own >= 0 ? parallel::coordinates(topology, own) : parallel::Coordinates{};
  const int64_t replica = own >= 0 ? near.dp : static_cast<int64_t>(parameter) % topology.dp;
  if (place.dp != replica) return false;
  const bool split = source(parameter, trainer_rank(from)).placed.slice.dim >= 0;
  return split || place.tp == near.tp;
}

void TransferPlan::plan_buckets(int64_t bucket_bytes) {
  int64_t left = 0;
  for (size_t p = 0; p < parameters_.size(); ++p) {
    // A rank may send every element to all that want it.
    const bool split = target(p, 0).slice.dim >= 0;
    const int64_t cost =
        wire_bytes(p) * (split ? 1 : static_cast<int64_t>(sides_.engine_ranks.size()));
    for (int64_t at = 0; at < parameters_[p].numel();) {
      if (left < cost || buckets_.empty()) {
        buckets_.emplace_back();
        left = std::max(bucket_bytes, cost);
      }
      const int64_t count = std::min(parameters_[p].numel() - at, left / cost);
      buckets_.back().push_back({p, at, at + count});
      left -= count * cost;
      at += count;
    }
  }
}

std::vector<Copy> TransferPlan::copies(const Piece& piece, int64_t from, int64_t to) const {
  if (!trains(from) || !serves(to) || !holds(piece.parameter, from, to)) return {};
  const Source have = source(piece.parameter, trainer_rank(from));
  const parallel::Placement wanted = target(piece.parameter, engine_rank(to));
  return common(runs_in(have.placed, have.begin, have.end, piece),
                runs_in(wanted, 0, wanted.shape()[0], piece),
                piece.begin,
                piece.end);
}

std::vector<int64_t> TransferPlan::shard_shape(size_t parameter, int64_t rank) const {
  const Source own = source(parameter, trainer_rank(rank));
  std::vector<int64_t> shape = own.placed.shape();
  shape[0] = own.end - own.begin;
  return shape;
}

int64_t TransferPlan::part_bytes(int64_t rank) const {
  int64_t bytes = 0;
  if (!serves(rank)) return 0;
  for (size_t p = 0; p < parameters_.size(); ++p) {
    int64_t count = wire_bytes(p);
    for (const int64_t size : target(p, engine_rank(rank)).shape()) count *= size;
    bytes += count;
  }
  return bytes;
}

int64_t TransferPlan::bytes_sent(int64_t rank) const {
  int64_t bytes = 0;
  for (const Transfer& t : transfers_) bytes += t.from == rank && t.to != rank ? t.bytes : 0;
  return bytes;
}

int64_t TransferPlan::bytes_received(int64_t rank) const {
  int64_t bytes = 0;
  for (const Transfer& t : transfers_) bytes += t.to == rank && t.from != rank ? t.bytes : 0;
  return bytes;
}

uint64_t TransferPlan::fingerprint() const {
  uint64_t hash = parallel::kHashStart;
  for (size_t p = 0; p < parameters_.size(); ++p) {
    const model::Parameter& parameter = parameters_[p];
    hash = parallel::hash_bytes(hash, parameter.name.data(), parameter.name.size());
    for (const int64_t size : parameter.shape) hash = parallel::hash_value(hash, size);
    hash = parallel::hash_value(hash, wire_[p]);
  }
  for (const Transfer& t : transfers_) {
    for (const int64_t value : {static_cast<int64_t>(t.parameter), t.from, t.to, t.elements})
      hash = parallel::hash_value(hash, value);
  }
  for (const std::vector<Piece>& bucket : buckets_)
    hash = parallel::hash_value(hash, bucket.size());
  return hash;
}

}  // namespace lockstep::harness
