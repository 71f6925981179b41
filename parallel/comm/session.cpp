#include <mpi.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <utility>

#include "parallel/comm/board.hpp"
#include "parallel/comm/group_impl.hpp"
#include "parallel/comm/mpi_transport.hpp"

/// Of a rank that waits for a debugger, which sets it to 0. Its name is for people.
extern "C" {
volatile std::sig_atomic_t lockstep_hang = 0;
}

namespace lockstep::parallel {
namespace {

void go_on(int) { lockstep_hang = 0; }

void wait_for_debugger(int64_t world_rank) {
  char host[256] = "this machine";
  gethostname(host, sizeof host - 1);
  fmt::print(
      stderr,
      "world_rank {0} on {1} waits for a debugger: `gdb -p {2}`, then `set var "
      "*(int*)&lockstep_hang = 0` and `continue`; or `kill -CONT {2}` to go on without one\n",
      world_rank,
      host,
      getpid());
  std::fflush(stderr);
  lockstep_hang = 1;
  const auto before = std::signal(SIGCONT, go_on);
  while (lockstep_hang != 0) std::this_thread::sleep_for(std::chrono::milliseconds(100));
  std::signal(SIGCONT, before);
}

/// One rank waits for a debugger; the others are patient for as long as it lives.
void hang_if_asked(int64_t world_rank) {
  const char* wish = std::getenv("LOCKSTEP_HANG_RANK");
  if (wish == nullptr || *wish == '\0') return;
  static const PatientWaits patient;
  if (std::atoll(wish) == world_rank) wait_for_debugger(world_rank);
}

}  // namespace

Session Session::start(int* argc, char*** argv) {
  bool launched = false;
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_SIZE", "PMI_RANK"}) {
    launched = launched ||
               std::getenv(name) != nullptr;  // NOLINT(concurrency-mt-unsafe): before any thread
  }
  if (!launched) return Session(false, Group::single());
  int provided = 0, size = 0;
  const int code = MPI_Init_thread(argc, argv, MPI_THREAD_SERIALIZED, &provided);
  LOCKSTEP_CHECK(code == MPI_SUCCESS, kComm, "MPI_Init failed with code {}", code);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (size > 1) board::open();
  Session session(true,
                  Group(std::make_shared<GroupImpl>(MPI_COMM_WORLD, false, kHashStart, "world")));
  hang_if_asked(session.world().rank());
  if (const char* wish = std::getenv("LOCKSTEP_COMM"))
    set_comm_backend(comm_backend_from_string(wish));
  return session;
}

bool Session::claim_report() noexcept { return board::claim_report(); }
void Session::mark_left() noexcept { board::mark_left(); }
size_t Session::last_words(char* text, size_t size) noexcept {
  return board::last_words(text, size);
}

void Session::abort(int exit_code) noexcept {
  board::claim_report();  // the others end without a word
  board::mark_left();
  nccl_abort_all();
  if (under_mpi_) MPI_Abort(MPI_COMM_WORLD, exit_code);
}

Session::Session(Session&& other) noexcept
    : under_mpi_(std::exchange(other.under_mpi_, false)), world_(std::move(other.world_)) {}

Session::~Session() {
  int finalized = 0;
  if (under_mpi_ && MPI_Finalized(&finalized) == MPI_SUCCESS && finalized == 0) {
    nccl_close_all();
    board::close();
    MPI_Finalize();
  }
}

}  // namespace lockstep::parallel
