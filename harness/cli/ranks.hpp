// Carrying out a command on all ranks of a launcher so that all of them end with one exit code.
#pragma once

#include <cstdint>
#include <functional>

#include "harness/cli/commands.hpp"
#include "parallel/comm/group.hpp"

namespace lockstep::harness {

/// Starts MPI where a launcher started this process, runs `body` on every rank and returns the
/// largest exit code of all ranks. A rank that throws reports it and ends the whole job with the
/// exit code of the error: bad input is told by rank 0 alone, since every rank finds it, anything
/// else by the rank that met it.
int on_ranks(const Context& context,
             std::string_view command,
             const std::function<int(const parallel::Session&)>& body);

/// Starts this command again on that many ranks of this machine and passes on what they print.
/// Returns their exit code. Throws kComm where the launcher starts none.
int start_own_ranks(int64_t ranks, const Context& context);

/// Throws kConfig where --hang-rank names none of these ranks, or the only one of a command that
/// needs no launcher.
void check_hang_rank(int64_t ranks);

}  // namespace lockstep::harness
