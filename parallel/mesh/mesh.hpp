// The communication groups of one run.
#pragma once

#include <array>
#include <memory>

#include "model/config/topology.hpp"
#include "parallel/comm/group.hpp"
#include "parallel/mesh/layout.hpp"

namespace lockstep::parallel {

/// Copies share the groups.
class Mesh {
 public:
  /// A mesh of one rank; needs no MPI.
  static Mesh single();

  /// Lays `topology` over the first num_ranks() ranks of `world`. Collective over world. Returns an
  /// inactive mesh on ranks beyond. Throws kMesh when the world is too small.
  static Mesh create(const Group& world, const model::Topology& topology);

  [[nodiscard]] bool active() const { return active_; }
  [[nodiscard]] const model::Topology& topology() const { return topology_; }
  [[nodiscard]] const Coordinates& place() const { return place_; }
  [[nodiscard]] const Group& group(Circle circle) const {
    return *groups_[static_cast<size_t>(circle)];
  }
  [[nodiscard]] const Group& all() const { return group(Circle::kAll); }
  [[nodiscard]] const Group& tokens() const { return group(Circle::kTokens); }
  [[nodiscard]] const Group& dp() const { return group(Circle::kDp); }
  [[nodiscard]] const Group& shard() const { return group(Circle::kShard); }
  [[nodiscard]] const Group& cp() const { return group(Circle::kCp); }
  [[nodiscard]] const Group& tp() const { return group(Circle::kTp); }
  [[nodiscard]] const Group& ep() const { return group(Circle::kEp); }
  [[nodiscard]] const Group& expert_shard() const { return group(Circle::kExpertShard); }

 private:
  bool active_ = true;
  model::Topology topology_;
  Coordinates place_;
  std::array<std::shared_ptr<const Group>, kCircles.size()> groups_;
};

}  // namespace lockstep::parallel
