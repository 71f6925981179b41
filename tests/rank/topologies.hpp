// All ways to lay out a number of ranks.
#pragma once

#include <cstdlib>
#include <string_view>
#include <vector>

#include "model/config/topology.hpp"

namespace lockstep::tests {

/// Every product of axes with this number of ranks, and every ep that divides fsdp x cp.
inline std::vector<model::Topology> topologies(int64_t ranks, int64_t max_tp) {
  std::vector<model::Topology> all;
  for (int64_t dp = 1; dp <= ranks; ++dp) {
    for (int64_t fsdp = 1; dp * fsdp <= ranks; ++fsdp) {
      for (int64_t cp = 1; dp * fsdp * cp <= ranks; ++cp) {
        if (ranks % (dp * fsdp * cp) != 0) continue;
        const int64_t tp = ranks / (dp * fsdp * cp);
        if (tp > max_tp) continue;
        for (int64_t ep = 1; ep <= fsdp * cp; ++ep) {
          if (fsdp * cp % ep == 0) all.push_back({dp, fsdp, cp, tp, ep});
        }
      }
    }
  }
  return all;
}

/// LOCKSTEP_TOPOLOGIES=all: tests that take some topologies, or fewer steps, for want of time take
/// all of them, which is hours on ranks that share processors.
inline bool every_topology() {
  const char* wish = std::getenv("LOCKSTEP_TOPOLOGIES");
  return wish != nullptr && std::string_view(wish) == "all";
}

}  // namespace lockstep::tests
