#include "harness/launch/mpi_start.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <thread>

#include "model/base/error.hpp"

extern char** environ;

namespace lockstep::harness {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kKept = 64 * 1024;
/// What a child gets to end itself in once it was told to; a launcher needs about a second.
constexpr auto kToEnd = std::chrono::seconds(10);
constexpr std::array kEnding = {SIGTERM, SIGINT, SIGHUP, SIGQUIT};

class Pipe {
 public:
  Pipe() {
    LOCKSTEP_CHECK(pipe2(ends_, O_CLOEXEC) == 0,
                   kInternal,
                   "starting a command: no pipe: {}; close programs or raise `ulimit -n`",
                   std::strerror(errno));
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  ~Pipe() {
    close_end(0);
    close_end(1);
  }
  void close_end(int end) {
    if (ends_[end] >= 0) close(ends_[end]);
    ends_[end] = -1;
  }
  [[nodiscard]] int read_end() const { return ends_[0]; }
  [[nodiscard]] int write_end() const { return ends_[1]; }

 private:
  int ends_[2] = {-1, -1};
};

void keep_tail(std::string& text, std::string_view more) {
  text.append(more);
  if (text.size() > 2 * kKept) text.erase(0, text.size() - kKept);
}

std::string launcher() {
  const char* chosen = std::getenv("LOCKSTEP_MPIRUN");
  return chosen != nullptr ? chosen : "mpirun";
}

/// Processes of this machine and their parents, without those that have ended.
std::map<pid_t, pid_t> parents() {
  std::map<pid_t, pid_t> found;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
    const pid_t pid = std::atoi(entry.path().filename().c_str());
    if (pid <= 0) continue;
    std::ifstream file(entry.path() / "stat");
    std::string stat;
    std::getline(file, stat);
    char state = 'Z';
    int parent = 0;
    const size_t name_end = stat.rfind(')');  // a name may hold anything
    if (name_end == std::string::npos ||
        std::sscanf(stat.c_str() + name_end + 1, " %c %d", &state, &parent) != 2 || state == 'Z' ||
        state == 'X') {
      continue;
    }
    found[pid] = parent;
  }
  return found;
}

/// Children of this process, their children, and so on.
std::set<pid_t> descendants() {
  const std::map<pid_t, pid_t> parent_of = parents();
  std::set<pid_t> found = {getpid()};
  for (bool more = true; more;) {
    more = false;
    for (const auto& [pid, parent] : parent_of)
      more |= found.contains(parent) && found.insert(pid).second;
  }
  found.erase(getpid());
  return found;
}

int g_told = -1;  // where the handler writes the signal

void on_ending_signal(int signal) {
  const int error = errno;
  const auto byte = static_cast<char>(signal);
  if (write(g_told, &byte, 1) < 0) _exit(128 + signal);
  errno = error;
}

/// While it lives, a signal that would end this process ends the child first: nothing that was
/// started here works on, or writes a result, once the caller has this process back.
class EndingSignals {
 public:
  EndingSignals() : others_(descendants()) {
    fcntl(told_.read_end(), F_SETFL, O_NONBLOCK);
    g_told = told_.write_end();
    struct sigaction action {};
    action.sa_handler = on_ending_signal;
    action.sa_flags = SA_RESTART;
    for (size_t i = 0; i < kEnding.size(); ++i) {
      sigaction(kEnding[i], nullptr, &before_[i]);
      // nohup
      if (before_[i].sa_handler != SIG_IGN) sigaction(kEnding[i], &action, nullptr);
    }
  }
  EndingSignals(const EndingSignals&) = delete;
  EndingSignals& operator=(const EndingSignals&) = delete;
  ~EndingSignals() { restore(); }

  /// Async-signal-safe.
  void restore() const {
    for (size_t i = 0; i < kEnding.size(); ++i) sigaction(kEnding[i], &before_[i], nullptr);
  }

  [[nodiscard]] int read_end() const { return told_.read_end(); }
  [[nodiscard]] int signal() const { return signal_; }
  [[nodiscard]] bool overdue() const { return signal_ != 0 && Clock::now() >= end_by_; }

  /// Takes the signal that came and tells the child to end. Only the first counts: a launcher that
  /// is told several times leaves its ranks behind.
  void tell(pid_t child) {
    if (!take()) return;
    end_by_ = Clock::now() + kToEnd;
    // What the launcher leaves behind comes to this process.
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    kill(child, SIGTERM);
  }

  /// Waits until the processes of the child are gone; kills them when their time is over.
  void wait_for_all() const {
    while (Clock::now() < end_by_ + kToEnd) {
      std::set<pid_t> left = descendants();
      for (const pid_t other : others_) left.erase(other);
      if (left.empty()) break;
      for (const pid_t pid : left) {
        if (overdue()) kill(pid, SIGKILL);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    prctl(PR_SET_CHILD_SUBREAPER, 0);
  }

  /// Once the child has ended: the signal that came does what it would have done.
  void act() {
    restore();
    take();
    if (signal_ != 0) raise(signal_);
  }

 private:
  bool take() {
    char byte = 0;
    if (signal_ != 0 || read(told_.read_end(), &byte, 1) != 1) return false;
    signal_ = byte;
    return true;
  }

  std::set<pid_t> others_;
  Pipe told_;
  std::array<struct sigaction, kEnding.size()> before_{};
  int signal_ = 0;
  Clock::time_point end_by_;
};

/// Reads what is there; false at the end of the stream.
bool drain(int fd, std::string& into) {
  char buffer[8192];
  const ssize_t got = read(fd, buffer, sizeof buffer);
  if (got < 0) return errno == EINTR || errno == EAGAIN;
  into.append(buffer, static_cast<size_t>(got));
  return got > 0;
}

}  // namespace

bool under_mpi_launcher() {
  return std::getenv("OMPI_COMM_WORLD_SIZE") != nullptr || std::getenv("PMI_SIZE") != nullptr ||
         std::getenv("PMIX_RANK") != nullptr;
}

int64_t launcher_rank() {
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"}) {
    if (const char* value = std::getenv(name)) return std::atoll(value);
  }
  return 0;
}

std::filesystem::path program_path() {
  std::error_code error;
  std::filesystem::path path = std::filesystem::read_symlink("/proc/self/exe", error);
  LOCKSTEP_CHECK(!error, kInternal, "finding this program: /proc/self/exe: {}", error.message());
  return path;
}

Outcome run_command(const std::vector<std::string>& command,
                    const std::vector<std::string>& extra_environment,
                    const std::function<void(std::string_view)>& on_output) {
  const auto start = std::chrono::steady_clock::now();
  // Everything the child needs is prepared here: after fork it may only call async-signal-safe
  // functions, since this process has threads.
  std::vector<char*> argv;
  argv.reserve(command.size() + 1);
  for (const std::string& word : command) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  std::vector<char*> env;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view name = std::string_view(*entry).substr(0, std::strcspn(*entry, "="));
    const bool replaced =
        std::any_of(extra_environment.begin(), extra_environment.end(), [&](const auto& extra) {
          return extra.starts_with(name) && extra[name.size()] == '=';
        });
    if (!replaced) env.push_back(*entry);
  }
  for (const std::string& entry : extra_environment) {
    env.push_back(const_cast<char*>(entry.c_str()));
  }
  env.push_back(nullptr);

  Pipe out, err, failed;
  EndingSignals ending;
  sigset_t blocked, before;
  sigemptyset(&blocked);
  for (const int signal : kEnding) sigaddset(&blocked, signal);
  pthread_sigmask(SIG_BLOCK, &blocked, &before);
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child == 0) {
    ending.restore();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent) _exit(127);
    dup2(out.write_end(), STDOUT_FILENO);
    dup2(err.write_end(), STDERR_FILENO);
    execvpe(argv[0], argv.data(), env.data());
    const int error = errno;
    if (write(failed.write_end(), &error, sizeof error) < 0) _exit(126);
    _exit(127);
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  LOCKSTEP_CHECK(
      child >= 0, kInternal, "starting {}: fork: {}", command.front(), std::strerror(errno));
  out.close_end(1);
  err.close_end(1);
  failed.close_end(1);

  Outcome outcome;
  // What a rank says that waits for a debugger has to be read at once.
  const bool live = std::getenv("LOCKSTEP_HANG_RANK") != nullptr;
  std::string line;
  int status = 0;
  bool ended = false;
  pollfd fds[3] = {
      {out.read_end(), POLLIN, 0}, {err.read_end(), POLLIN, 0}, {ending.read_end(), POLLIN, 0}};
  while (!ended && !ending.overdue()) {
    const bool open = fds[0].fd >= 0 || fds[1].fd >= 0;
    // Without its pipes a child is about to end.
    if (poll(fds, 3, !open ? 10 : ending.signal() != 0 ? 100 : -1) < 0) continue;
    if (fds[2].revents != 0) ending.tell(child);
    if (!open) ended = waitpid(child, &status, WNOHANG) == child;
    if (fds[0].fd >= 0 && fds[0].revents != 0) {
      std::string got;
      if (!drain(fds[0].fd, got)) fds[0].fd = -1;
      if (!on_output) {
        keep_tail(outcome.output, got);
      } else {
        line += got;
        for (size_t end = line.find('\n'); end != std::string::npos; end = line.find('\n')) {
          on_output(std::string_view(line).substr(0, end));
          line.erase(0, end + 1);
        }
      }
    }
    if (fds[1].fd >= 0 && fds[1].revents != 0) {
      std::string got;
      if (!drain(fds[1].fd, got)) fds[1].fd = -1;
      if (live) std::fputs(got.c_str(), stderr);
      keep_tail(outcome.errors, got);
    }
  }
  if (on_output && !line.empty()) on_output(line);
  if (ending.signal() != 0) ending.wait_for_all();
  while (!ended && waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  ending.act();
  int exec_error = 0;
  if (read(failed.read_end(), &exec_error, sizeof exec_error) == sizeof exec_error) {
    fail(ErrorKind::kInternal, "starting {}: {}", command.front(), std::strerror(exec_error));
  }
  outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return outcome;
}

std::string mpi_version() {
  try {
    const Outcome outcome = run_command({launcher(), "--version"});
    return outcome.exit_code == 0 ? outcome.output.substr(0, outcome.output.find('\n')) : "";
  } catch (const Error&) {
    return {};
  }
}

std::vector<std::string> mpirun_command(int64_t ranks) {
  std::vector<std::string> command = {
      launcher(), "-n", std::to_string(ranks), "--oversubscribe", "--bind-to", "none"};
  if (geteuid() == 0) command.emplace_back("--allow-run-as-root");
  return command;
}

Outcome run_ranks(int64_t ranks,
                  const std::vector<std::string>& arguments,
                  const std::function<void(std::string_view)>& on_output,
                  int64_t threads) {
  const int64_t cores = std::max<int64_t>(1, std::thread::hardware_concurrency());
  const int64_t most = std::max<int64_t>(64, 4 * cores);
  LOCKSTEP_CHECK(ranks <= most,
                 kMesh,
                 "starting {} ranks: this machine has {} cores and takes at most {} ranks; use "
                 "fewer, or start lockstep under mpirun over several machines",
                 ranks,
                 cores,
                 most);
  std::vector<std::string> command = mpirun_command(ranks);
  command.push_back(program_path().string());
  command.insert(command.end(), arguments.begin(), arguments.end());
  if (threads == 0) threads = std::max<int64_t>(1, cores / ranks);
  try {
    return run_command(
        command,
        // What the launcher says of a rank that died is read here, so that no rank needs a guard.
        {fmt::format("OMP_NUM_THREADS={}", threads),
         fmt::format("MKL_NUM_THREADS={}", threads),
         "LOCKSTEP_RANK_GUARD=off"},
        on_output);
  } catch (const Error& error) {
    fail(ErrorKind::kConfig,
         "starting {} ranks: {}; install OpenMPI (scripts/setup does), put {} on PATH, or set "
         "LOCKSTEP_MPIRUN",
         ranks,
         error.what(),
         launcher());
  }
}

std::string own_errors(std::string_view errors) {
  std::string kept;
  std::vector<std::string> seen;
  std::istringstream in{std::string(errors)};
  bool banner = false;
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("-----------------------------------------------------------------")) {
      banner = !banner;
      continue;
    }
    const bool signal = line.find("exited on signal") != std::string::npos;
    if (signal) kept += line + '\n';
    if (banner || line.starts_with("[") || line.empty()) continue;
    if (line.starts_with("MPI_ABORT was invoked") || line.starts_with("with errorcode")) continue;
    if (std::find(seen.begin(), seen.end(), line) != seen.end()) continue;
    seen.push_back(line);
    kept += line + '\n';
  }
  while (!kept.empty() && kept.back() == '\n') kept.pop_back();
  return kept;
}

}  // namespace lockstep::harness
