// Coordinates of ranks and the communication group of each axis.
#pragma once

#include <memory>

#include "model/config/topology.hpp"
#include "parallel/comm/group.hpp"

namespace lockstep::parallel {

/// The groups of one run. Copies share the groups.
class Mesh {
 public:
  /// A mesh of one rank; needs no MPI.
  static Mesh single();

  /// Lays `topology` over the first num_ranks() ranks of `world` (rank order: dp slowest, then
  /// fsdp, cp, tp fastest). Collective over world. Returns an inactive mesh on ranks beyond. Throws
  /// kMesh when the world is too small.
  static Mesh create(const Group& world, const model::Topology& topology);

  [[nodiscard]] bool active() const { return active_; }
  [[nodiscard]] const model::Topology& topology() const { return topology_; }
  [[nodiscard]] const Group& cp() const { return *cp_; }
  [[nodiscard]] const Group& all() const { return *all_; }

 private:
  bool active_ = true;
  model::Topology topology_;
  std::shared_ptr<const Group> cp_, all_;
};

}  // namespace lockstep::parallel
