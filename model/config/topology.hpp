// How many ranks along each mesh axis. Arithmetic only: no MPI, no device.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace lockstep::model {

enum class Axis : uint8_t { kDp, kFsdp, kCp, kTp, kEp };

/// A run needs dp * fsdp * cp * tp ranks. ep is folded over fsdp x cp: it does not multiply and
/// must divide fsdp * cp.
struct Topology {
  int64_t dp = 1, fsdp = 1, cp = 1, tp = 1, ep = 1;

  [[nodiscard]] int64_t num_ranks() const { return dp * fsdp * cp * tp; }
  bool operator==(const Topology&) const = default;
};

/// "cp=2,ep=2" -> Topology. Throws kMesh naming the axis, the value and what is allowed.
Topology parse_topology(std::string_view text);

/// "cp=2" style, axes of degree 1 left out; "1 rank" when all are 1.
std::string to_string(const Topology& topology);

/// Throws kMesh for a degree below 1 or an ep that does not divide fsdp * cp.
void validate(const Topology& topology);

}  // namespace lockstep::model
