#include "harness/launch/mpi_start.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <thread>

#include "model/base/error.hpp"

extern char** environ;

namespace lockstep::harness {
namespace {

constexpr size_t kKept = 64 * 1024;

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
  const pid_t parent = getpid();
  const pid_t child = fork();
  LOCKSTEP_CHECK(
      child >= 0, kInternal, "starting {}: fork: {}", command.front(), std::strerror(errno));
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent) _exit(127);
    dup2(out.write_end(), STDOUT_FILENO);
    dup2(err.write_end(), STDERR_FILENO);
    execvpe(argv[0], argv.data(), env.data());
    const int error = errno;
    if (write(failed.write_end(), &error, sizeof error) < 0) _exit(126);
    _exit(127);
  }
  out.close_end(1);
  err.close_end(1);
  failed.close_end(1);

  Outcome outcome;
  // What a rank says that waits for a debugger has to be read at once.
  const bool live = std::getenv("LOCKSTEP_HANG_RANK") != nullptr;
  std::string line;
  pollfd fds[2] = {{out.read_end(), POLLIN, 0}, {err.read_end(), POLLIN, 0}};
  while (fds[0].fd >= 0 || fds[1].fd >= 0) {
    if (poll(fds, 2, -1) < 0 && errno != EINTR) break;
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
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
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
