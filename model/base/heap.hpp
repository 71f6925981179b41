// Behaviour of the process's heap.
#pragma once

namespace lockstep {

/// Keeps freed memory in the process instead of handing it back to the system. A tensor above the C
/// library's limit of 32 MB otherwise costs a page fault per 4 KB each time it is allocated: more
/// than the work of a memory-bound operator, so that time grows faster than the token count. Call
/// once, at the start of a program that runs models. Peak memory stays, it is not given back until
/// exit. Returns false where the C library has no such setting.
bool keep_freed_memory() noexcept;

}  // namespace lockstep
