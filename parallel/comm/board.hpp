// What the ranks of this machine are doing, in memory they share: so that a rank that waits in vain
// can say for whom, and a rank that is being ended can say who is gone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep::parallel::board {

enum class State {
  kUnknown,  ///< on another machine, or there is no shared memory
  kComputing,
  kWaiting,  ///< in the call it entered
  kStopped,  ///< by a signal or a debugger
  kGone,     ///< its process ended without leaving
  kLeft,     ///< it finished, or is ending on purpose
};

struct Seen {
  State state = State::kUnknown;
  int pid = 0;
  std::string call;  ///< that it waits in, or waited in last
};

/// Collective over all ranks, after MPI_Init. Where the ranks of a machine cannot share memory
/// everything else here does nothing and every rank is kUnknown.
void open();
/// Collective, before MPI_Finalize.
void close() noexcept;

/// This rank waits in a call, or computes again.
void enter(std::string_view call) noexcept;
void leave() noexcept;

/// A collective call as a rank made it known.
struct Posted {
  uint64_t hash = 0;
  std::string text;
};
/// Makes this rank's `sequence`-th collective of the group `key` known. Readers that look after
/// their own post see every post that was made before.
void post(uint64_t key, int64_t sequence, uint64_t hash, std::string_view text) noexcept;
/// What that rank made as that call; nothing if it has not come to it, or long ago.
std::optional<Posted> call_of(int world_rank, uint64_t key, int64_t sequence);
/// The latest call of that group, up to `sequence`, that the rank made and that is still known; 0
/// without one.
int64_t last_call(int world_rank, uint64_t key, int64_t sequence);

Seen look(int world_rank);
/// "world_rank 1 (process 4711) is stopped; `kill -CONT 4711` resumes it".
std::string describe(int world_rank, const Seen& seen);

/// True for the first rank of this machine that asks: it is the one that reports a failure.
/// Async-signal-safe.
bool claim_report() noexcept;
/// Marks this rank as one that ends on purpose. Async-signal-safe.
void mark_left() noexcept;
/// Why this rank may be ending, for a signal handler: where it is, which ranks of this machine are
/// gone. Returns the length, without a zero byte. Async-signal-safe.
size_t last_words(char* text, size_t size) noexcept;

}  // namespace lockstep::parallel::board
