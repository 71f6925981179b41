#include "parallel/mesh/mesh.hpp"

namespace lockstep::parallel {

Mesh Mesh::single() {
  Mesh mesh;
  mesh.cp_ = mesh.all_ = std::make_shared<const Group>(Group::single());
  return mesh;
}

Mesh Mesh::create(const Group& world, const model::Topology& topology) {
  model::validate(topology);
  LOCKSTEP_CHECK(topology.dp == 1 && topology.fsdp == 1 && topology.tp == 1 && topology.ep == 1,
                 kMesh,
                 "topology {}: this version splits the sequence only; use cp=N",
                 model::to_string(topology));
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
  mesh.all_ =
      std::make_shared<const Group>(world.split(mesh.active_ ? 0 : -1, world.rank(), "run"));
  mesh.cp_ = mesh.all_;
  return mesh;
}

}  // namespace lockstep::parallel
