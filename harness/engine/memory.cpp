#include "harness/engine/memory.hpp"

#include <sys/resource.h>

namespace lockstep::harness {

int64_t peak_rss_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;
}

}  // namespace lockstep::harness
