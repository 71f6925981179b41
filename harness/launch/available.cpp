#include "harness/launch/available.hpp"

#include <fmt/format.h>

namespace lockstep::harness {

std::string engine_problem(std::string_view engine) {
  if (engine == "trainer") return {};
  if (engine == "inference") {
    return "this build has no inference engine; use \"trainer\"";
  }
  return fmt::format("unknown engine '{}'; use \"trainer\"", engine);
}

std::string device_problem(std::string_view device) {
  if (device == "cpu") return {};
  if (device == "cuda") {
    return "this build computes on the CPU only; use \"cpu\"";
  }
  return fmt::format("unknown device '{}'; use \"cpu\"", device);
}

std::string topology_problem(const model::Topology& topology) {
  struct Axis {
    const char* name;
    int64_t degree;
  };
  for (const Axis axis : {Axis{"dp", topology.dp},
                          Axis{"fsdp", topology.fsdp},
                          Axis{"tp", topology.tp},
                          Axis{"ep", topology.ep}}) {
    if (axis.degree != 1) {
      return fmt::format("this build runs the cp axis only, {} = {} cannot run; leave {} out",
                         axis.name,
                         axis.degree,
                         axis.name);
    }
  }
  return {};
}

}  // namespace lockstep::harness
