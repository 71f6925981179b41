#include "parallel/plan/offload.hpp"

#include <array>

#include "model/base/error.hpp"

namespace lockstep::parallel {

std::string_view offload_name(Offload offload) {
  switch (offload) {
    case Offload::kOptimizer:
      return "optimizer";
    case Offload::kFull:
      return "full";
    default:
      return "none";
  }
}

Offload parse_offload(std::string_view name) {
  constexpr std::array<Offload, 3> kAll = {Offload::kNone, Offload::kOptimizer, Offload::kFull};
  for (const Offload offload : kAll)
    if (offload_name(offload) == name) return offload;
  fail(ErrorKind::kConfig, "offload '{}' does not exist; use none, optimizer or full", name);
}

}  // namespace lockstep::parallel
