#include "harness/launch/rank_guard.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "harness/launch/mpi_start.hpp"
#include "model/base/error.hpp"

namespace lockstep::harness {
namespace {

pid_t g_child = 0;  // of the guard
pid_t g_guard = 0;  // of the rank

constexpr int kPassedOn[] = {SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};

void pass_on(int signal) {
  if (g_child > 0) kill(g_child, signal);
}

bool has_threads() {
  std::error_code error;
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task", error)) {
    count += entry.exists(error) ? 1 : 0;
  }
  return error || count != 1;
}

int64_t launched_ranks() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"}) {
    if (const char* value = std::getenv(name)) return std::atoll(value);
  }
  return 1;
}

}  // namespace

void guard_rank(std::string_view command) {
  const char* wish = std::getenv("LOCKSTEP_RANK_GUARD");
  const bool off = wish != nullptr && std::string_view(wish) == "off";
  if (off || !under_mpi_launcher() || launched_ranks() < 2 || has_threads()) return;
  // Signals that come before the child is known wait until it is.
  sigset_t all, before;
  sigemptyset(&all);
  for (const int signal : kPassedOn) sigaddset(&all, signal);
  sigprocmask(SIG_BLOCK, &all, &before);
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child <= 0) {
    if (child == 0) {
      g_guard = parent;
      prctl(PR_SET_PDEATHSIG, SIGTERM);
      if (getppid() != parent) _exit(exit_code(ErrorKind::kComm));
    }
    sigprocmask(SIG_SETMASK, &before, nullptr);
    return;
  }
  g_child = child;
  struct sigaction action {};
  action.sa_handler = pass_on;
  for (const int signal : kPassedOn) sigaction(signal, &action, nullptr);
  sigprocmask(SIG_SETMASK, &before, nullptr);
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFEXITED(status)) _exit(WEXITSTATUS(status));
  const int signal = WTERMSIG(status);
  const std::string text = fmt::format(
      "world_rank {0}: lockstep{1}{2}: comm error\n"
      "  world_rank {0}: its process {3} was ended by signal {4} ({5}){6}\n",
      launcher_rank(),
      command.empty() ? "" : " ",
      command,
      child,
      signal,
      strsignal(signal),
      signal == SIGKILL ? ": by someone, or by the system for want of memory (`dmesg | tail` "
                          "tells); fewer tokens, "
                          "more ranks or --recompute need less"
                        : "");
  if (write(STDERR_FILENO, text.data(), text.size()) < 0) _exit(exit_code(ErrorKind::kInternal));
  _exit(exit_code(ErrorKind::kComm));
}

bool guard_is_gone() noexcept { return g_guard > 0 && getppid() != g_guard; }

void wake_guard() noexcept {
  if (g_guard > 0 && !guard_is_gone()) kill(g_guard, SIGCONT);
}

}  // namespace lockstep::harness
