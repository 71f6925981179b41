#include "parallel/mesh/layout.hpp"

#include "model/base/error.hpp"

namespace lockstep::parallel {

std::string_view circle_name(Circle circle) {
  switch (circle) {
    case Circle::kAll:
      return "all";
    case Circle::kTokens:
      return "tokens";
    case Circle::kDp:
      return "dp";
    case Circle::kShard:
      return "fsdp x cp";
    case Circle::kCp:
      return "cp";
    case Circle::kTp:
      return "tp";
    case Circle::kEp:
      return "ep";
    case Circle::kExpertShard:
      return "expert fsdp";
  }
  return "?";
}

Coordinates coordinates(const model::Topology& topology, int64_t rank) {
  LOCKSTEP_CHECK(rank >= 0 && rank < topology.num_ranks(),
                 kMesh,
                 "mesh: rank {} of {} in topology {}",
                 rank,
                 topology.num_ranks(),
                 model::to_string(topology));
  Coordinates c;
  c.tp = rank % topology.tp;
  rank /= topology.tp;
  c.cp = rank % topology.cp;
  rank /= topology.cp;
  c.fsdp = rank % topology.fsdp;
  c.dp = rank / topology.fsdp;
  c.folded = c.fsdp * topology.cp + c.cp;
  c.ep = c.folded % topology.ep;
  c.expert_shard = c.folded / topology.ep;
  return c;
}

CircleRanks circle_ranks(const model::Topology& topology, Circle circle, int64_t rank) {
  const Coordinates c = coordinates(topology, rank);
  const int64_t tp = topology.tp, folded = topology.fsdp * topology.cp,
                replica = c.dp * folded * tp + c.tp;  // first rank of this replica and tp slice
  switch (circle) {
    case Circle::kAll:
      return {0, 1, topology.num_ranks(), rank};
    case Circle::kTokens:
      return {c.tp, tp, topology.dp * folded, c.dp * folded + c.folded};
    case Circle::kDp:
      return {c.folded * tp + c.tp, folded * tp, topology.dp, c.dp};
    case Circle::kShard:
      return {replica, tp, folded, c.folded};
    case Circle::kCp:
      return {replica + c.fsdp * topology.cp * tp, tp, topology.cp, c.cp};
    case Circle::kTp:
      return {rank - c.tp, 1, tp, c.tp};
    case Circle::kEp:
      return {replica + c.expert_shard * topology.ep * tp, tp, topology.ep, c.ep};
    case Circle::kExpertShard:
      return {replica + c.ep * tp, topology.ep * tp, folded / topology.ep, c.expert_shard};
  }
  return {rank, 1, 1, 0};
}

std::vector<int64_t> members(const model::Topology& topology, Circle circle, int64_t rank) {
  const CircleRanks circle_of = circle_ranks(topology, circle, rank);
  std::vector<int64_t> ranks;
  for (int64_t i = 0; i < circle_of.size; ++i)
    ranks.push_back(circle_of.first + i * circle_of.step);
  return ranks;
}

std::vector<int64_t> even_cuts(int64_t count, int64_t size) {
  std::vector<int64_t> cuts;
  for (int64_t r = 0; r <= size; ++r) cuts.push_back(count * r / size);
  return cuts;
}

}  // namespace lockstep::parallel
