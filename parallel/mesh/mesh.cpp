#include "parallel/mesh/mesh.hpp"

#include <algorithm>

namespace lockstep::parallel {

Mesh Mesh::single() {
  Mesh mesh;
  mesh.groups_.fill(std::make_shared<const Group>(Group::single()));
  return mesh;
}

Mesh Mesh::create(const Group& world, const model::Topology& topology) {
  model::validate(topology);
  const int64_t needed = topology.num_ranks();
  LOCKSTEP_CHECK(needed <= world.size(),
                 kMesh,
                 "topology {} needs {} ranks, the job has {}; start it with mpirun -n {}",
                 model::to_string(topology),
                 needed,
                 world.size(),
                 needed);
  Mesh mesh;
  mesh.topology_ = topology;
  mesh.active_ = world.rank() < needed;
  if (mesh.active_) mesh.place_ = coordinates(topology, world.rank());
  for (const Circle circle : kCircles) {
    // Ranks of one circle agree on its first member.
    const int64_t color =
        mesh.active_ ? members(topology, circle, world.rank()).front() : int64_t{-1};
    mesh.groups_[static_cast<size_t>(circle)] = std::make_shared<const Group>(
        world.split(color, world.rank(), std::string(circle_name(circle))));
  }
  return mesh;
}

}  // namespace lockstep::parallel
