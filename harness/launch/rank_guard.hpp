// A launcher reports a rank that a signal ended with a code of its own (137 for SIGKILL). A guard
// process between the launcher and the rank keeps the exit codes of this program.
#pragma once

#include <string_view>

namespace lockstep::harness {

/// Where a launcher that this program did not start itself started this process as one of several
/// ranks: goes on in a child process, while this one passes signals on, waits, and ends with the
/// child's exit code, or, when a signal ended the child, reports that and ends with 3. Does nothing
/// elsewhere, in a process that already has threads, or with LOCKSTEP_RANK_GUARD=off. Call before
/// MPI starts.
void guard_rank(std::string_view command);

/// The guard of this rank was killed, which is why the rank ends. Async-signal-safe.
bool guard_is_gone() noexcept;

/// To be called when the rank ends: a guard that was stopped goes on, since the launcher waits for
/// it.
void wake_guard() noexcept;

}  // namespace lockstep::harness
