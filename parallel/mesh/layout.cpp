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

std::vector<int64_t> members(const model::Topology& topology, Circle circle, int64_t rank) {
  const Coordinates mine = coordinates(topology, rank);
  std::vector<int64_t> ranks;
  for (int64_t other = 0; other < topology.num_ranks(); ++other) {
    const Coordinates c = coordinates(topology, other);
    const bool same_replica = c.dp == mine.dp && c.tp == mine.tp;
    bool in = false;
    switch (circle) {
      case Circle::kAll:
        in = true;
        break;
      case Circle::kTokens:
        in = c.tp == mine.tp;
        break;
      case Circle::kDp:
        in = c.folded == mine.folded && c.tp == mine.tp;
        break;
      case Circle::kShard:
        in = same_replica;
        break;
      case Circle::kCp:
        in = same_replica && c.fsdp == mine.fsdp;
        break;
      case Circle::kTp:
        in = c.dp == mine.dp && c.folded == mine.folded;
        break;
      case Circle::kEp:
        in = same_replica && c.expert_shard == mine.expert_shard;
        break;
      case Circle::kExpertShard:
        in = same_replica && c.ep == mine.ep;
        break;
    }
    if (in) ranks.push_back(other);
  }
  return ranks;
}

std::vector<int64_t> even_cuts(int64_t count, int64_t size) {
  std::vector<int64_t> cuts;
  for (int64_t r = 0; r <= size; ++r) cuts.push_back(count * r / size);
  return cuts;
}

}  // namespace lockstep::parallel
