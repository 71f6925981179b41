// Which rank sits where, and who talks to whom. Arithmetic only: no MPI, no device.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "model/config/topology.hpp"

namespace lockstep::parallel {

/// Place of a rank on the axes: dp slowest, then fsdp, cp, and tp fastest. `folded` numbers the
/// ranks of fsdp x cp; ep = folded mod ep_size, expert_shard = folded / ep_size.
struct Coordinates {
  int64_t dp = 0, fsdp = 0, cp = 0, tp = 0;
  int64_t folded = 0, ep = 0, expert_shard = 0;
};

/// The sets of ranks that communicate.
enum class Circle : uint8_t {
  kAll,          ///< every rank of the run
  kTokens,       ///< ranks with different tokens: same tp, ordered by (dp, fsdp, cp)
  kDp,           ///< replicas: they add gradients
  kShard,        ///< fsdp x cp: they share every dense parameter and add its gradient
  kCp,           ///< they share a row of tokens
  kTp,           ///< they share heads and inner dimensions
  kEp,           ///< they share the experts
  kExpertShard,  ///< ranks with the same experts: they share those parameters and add their
                 ///< gradients
};
inline constexpr std::array<Circle, 8> kCircles = {Circle::kAll,
                                                   Circle::kTokens,
                                                   Circle::kDp,
                                                   Circle::kShard,
                                                   Circle::kCp,
                                                   Circle::kTp,
                                                   Circle::kEp,
                                                   Circle::kExpertShard};
std::string_view circle_name(Circle circle);

/// rank in [0, num_ranks).
Coordinates coordinates(const model::Topology& topology, int64_t rank);

/// Ranks of a circle: first, first + step, ..., `size` of them; number `own` is the one asked for.
struct CircleRanks {
  int64_t first = 0, step = 1, size = 1, own = 0;
};
CircleRanks circle_ranks(const model::Topology& topology, Circle circle, int64_t rank);

/// Ranks of that circle of `rank`, ascending; contains `rank`.
std::vector<int64_t> members(const model::Topology& topology, Circle circle, int64_t rank);

/// Near-even contiguous cuts of `count` things over `size` owners: {0, ..., count}, size + 1
/// entries. Owners may get nothing.
std::vector<int64_t> even_cuts(int64_t count, int64_t size);
/// What owner `own` of those gets.
inline int64_t even_share(int64_t count, int64_t size, int64_t own) {
  return count * (own + 1) / size - count * own / size;
}

}  // namespace lockstep::parallel
