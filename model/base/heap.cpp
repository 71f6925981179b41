#include "model/base/heap.hpp"

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

}  // namespace lockstep
