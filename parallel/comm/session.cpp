#include <mpi.h>

#include <cstdlib>
#include <utility>

#include "parallel/comm/board.hpp"
#include "parallel/comm/group_impl.hpp"
#include "parallel/comm/mpi_transport.hpp"

namespace lockstep::parallel {

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
  if (const char* wish = std::getenv("LOCKSTEP_COMM"))
    set_comm_backend(comm_backend_from_string(wish));
  return Session(true,
                 Group(std::make_shared<GroupImpl>(MPI_COMM_WORLD, false, kHashStart, "world")));
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
