#include "model/base/heap.hpp"

#include <cstdio>

#if __has_include(<malloc.h>)
#include <malloc.h>
#endif

namespace lockstep {

bool keep_freed_memory() noexcept {
#if defined(M_MMAP_MAX) && defined(M_TRIM_THRESHOLD)
  // No block in a mapping of its own, and never shrink the heap (-1 is the largest threshold).
  return mallopt(M_MMAP_MAX, 0) == 1 && mallopt(M_TRIM_THRESHOLD, -1) == 1;
#else
  return false;
#endif
}

bool reset_peak_memory() noexcept {
#if defined(M_TRIM_THRESHOLD)
  malloc_trim(0);
#endif
  std::FILE* file = std::fopen("/proc/self/clear_refs", "w");
  if (file == nullptr) return false;
  const bool written = std::fputs("5", file) >= 0;
  return std::fclose(file) == 0 && written;
}

int64_t peak_memory_bytes() noexcept {
  std::FILE* file = std::fopen("/proc/self/status", "r");
  if (file == nullptr) return 0;
  char line[256];
  long long kilobytes = 0;
  while (std::fgets(line, sizeof line, file) != nullptr) {
    if (std::sscanf(line, "VmHWM: %lld kB", &kilobytes) == 1) break;
  }
  std::fclose(file);
  return int64_t{kilobytes} * 1024;
}

}  // namespace lockstep
