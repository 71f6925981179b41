#include "harness/cli/ranks.hpp"

#include <signal.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <thread>

#include "harness/cli/errors.hpp"
#include "harness/launch/mpi_start.hpp"
#include "harness/launch/rank_guard.hpp"
#include "parallel/comm/ledger.hpp"

namespace lockstep::harness {
namespace {

// Read by a signal handler.
char g_head[128];
size_t g_head_size = 0;

/// A launcher that lost one rank ends the others with SIGTERM. The first of them says why.
void on_sigterm(int) {
  static char text[2048];
  parallel::Session::mark_left();
  if (parallel::Session::claim_report()) {
    size_t size = g_head_size;
    std::copy_n(g_head, size, text);
    size += parallel::Session::last_words(text + size, sizeof text - 1 - size);
    constexpr std::string_view kKilled = "; the process that guarded this rank was killed";
    if (guard_is_gone() && size + kKilled.size() < sizeof text) {
      size += kKilled.copy(text + size, kKilled.size());
    }
    text[size++] = '\n';
    if (write(STDERR_FILENO, text, size) < 0) _exit(5);
  }
  wake_guard();
  _exit(3);
}

void name_command(std::string_view command) {
  const std::string head = fmt::format("lockstep {}: comm error\n  ", command);
  g_head_size = std::min(head.size(), sizeof g_head);
  std::copy_n(head.data(), g_head_size, g_head);
}

void report_when_ended() {
  struct sigaction action {};
  action.sa_handler = on_sigterm;
  sigaction(SIGTERM, &action, nullptr);
}

/// MPI has no deadline of its own for starting and ending, where a rank that is stopped would keep
/// the others for ever.
void on_alarm(int) {
  constexpr std::string_view kText =
      "the ranks did not meet within the deadline (--comm-timeout-ms) while MPI started or ended: "
      "one of them is stopped, or did not start; `ps` shows a stopped process as T\n";
  if (write(STDERR_FILENO, g_head, g_head_size) < 0 ||
      write(STDERR_FILENO, kText.data(), kText.size()) < 0) {
    _exit(5);
  }
  wake_guard();
  _exit(3);
}

void set_alarm(int64_t ms) {
  std::signal(SIGALRM, on_alarm);
  itimerval timer{};
  timer.it_value.tv_sec = ms / 1000;
  timer.it_value.tv_usec = ms % 1000 * 1000;
  setitimer(ITIMER_REAL, &timer, nullptr);
}

}  // namespace

void check_hang_rank(int64_t ranks) {
  const char* wish = std::getenv("LOCKSTEP_HANG_RANK");
  if (wish == nullptr) return;
  LOCKSTEP_CHECK(ranks > 1 || under_mpi_launcher(),
                 kConfig,
                 "--hang-rank {}: this command runs in one process; start it under a debugger: "
                 "`gdb --args lockstep ...`",
                 wish);
  LOCKSTEP_CHECK(
      std::atoll(wish) < ranks,
      kConfig,
      "--hang-rank {}: there is no such rank; this command runs on {}, which are 0 to {}",
      wish,
      ranks,
      ranks - 1);
}

int start_own_ranks(int64_t ranks, const Context& context) {
  const Outcome outcome = run_ranks(
      ranks, context.arguments, [](std::string_view line) { print(fmt::format("{}\n", line)); });
  const std::string told = own_errors(outcome.errors);
  // No rank of these commands ends with 1: that is the launcher, which started none.
  LOCKSTEP_CHECK(outcome.exit_code != 1,
                 kComm,
                 "starting {} ranks: the launcher ended with 1; its own words are\n{}",
                 ranks,
                 outcome.errors);
  // Ranks end with 0 to 5, or with 128 and a signal; other codes are the launcher's own.
  constexpr int kLastSignal = 128 + 64;
  LOCKSTEP_CHECK(outcome.exit_code <= kLastSignal,
                 kConfig,
                 "starting {} ranks: the launcher ended with {} before they ran: does "
                 "`mpirun -n {} hostname` work? PATH is {}; its own words are\n{}",
                 ranks,
                 outcome.exit_code,
                 ranks,
                 std::getenv("PATH") == nullptr ? "not set, set it" : std::getenv("PATH"),
                 outcome.errors);
  if (!told.empty() || outcome.exit_code != 0) {
    std::fputs(fmt::format("{}\n", told.empty() ? outcome.errors : told).c_str(), stderr);
  }
  // A rank that a signal ended is a peer that died.
  return outcome.exit_code >= 128 ? exit_code(ErrorKind::kComm) : outcome.exit_code;
}

int on_ranks(const Context& context,
             std::string_view command,
             const std::function<int(const parallel::Session&)>& body) {
  name_command(command);
  const bool launched = under_mpi_launcher();
  // A rank that waits for a debugger does so in the start of its session.
  if (launched && std::getenv("LOCKSTEP_HANG_RANK") == nullptr)
    set_alarm(parallel::comm_timeout_ms());
  parallel::Session session = parallel::Session::start(nullptr, nullptr);
  if (launched) set_alarm(0);
  const int64_t world_rank = session.world().rank();
  if (session.world().size() == 1) return body(session);
  report_when_ended();
  try {
    const int code = body(session);
    const parallel::PatientWaits patient;  // rank 0 may still be writing
    const int worst = static_cast<int>(session.world().all_reduce_max(code, "exit code"));
    if (world_rank == 0 && std::getenv("LOCKSTEP_COMM_LEDGER") != nullptr)
      std::fputs(parallel::ledger_table().c_str(), stderr);
    set_alarm(parallel::comm_timeout_ms());  // for what MPI does at the end
    return worst;
  } catch (const std::exception& error) {
    const Failure failure = explain(error);
    const bool everywhere =
        failure.kind != ErrorKind::kComm && failure.kind != ErrorKind::kInternal;
    if (everywhere && world_rank != 0) {
      // Rank 0 meets the same error and ends the job; if it did not, this rank speaks after all.
      std::this_thread::sleep_for(std::chrono::seconds(3));
    }
    if (parallel::Session::claim_report()) {
      std::fputs(fmt::format("{}{}",
                             everywhere ? "" : fmt::format("world_rank {}: ", world_rank),
                             error_block(failure, command))
                     .c_str(),
                 stderr);
      std::fflush(stderr);
    }
    if (context.json && world_rank == 0) std::cout << error_json(failure) << std::flush;
    wake_guard();
    session.abort(exit_code(failure.kind));
    return exit_code(failure.kind);
  }
}

}  // namespace lockstep::harness
