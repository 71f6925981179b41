// Behaviour of the process's heap, and how much memory it takes.
#pragma once

#include <cstdint>

namespace lockstep {

/// Keeps freed memory in the process instead of handing it back to the system. A tensor above the C
/// library's limit of 32 MB otherwise costs a page fault per 4 KB each time it is allocated: more
/// than the work of a memory-bound operator, so that time grows faster than the token count. Call
/// once, at the start of a program that runs models. Peak memory stays, it is not given back until
/// exit. Returns false where the C library has no such setting.
bool keep_freed_memory() noexcept;

/// Hands free memory back to the system once and starts the high-water mark anew from what is
/// resident then. Returns false where the kernel has no such reset (Linux: /proc/self/clear_refs);
/// the mark then stays that of the whole process.
bool reset_peak_memory() noexcept;

/// High-water mark of resident memory since the start or the last reset; 0 where it is unknown.
int64_t peak_memory_bytes() noexcept;

}  // namespace lockstep
