#include "parallel/comm/wait.hpp"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "parallel/comm/board.hpp"

namespace lockstep::parallel {
namespace {

int64_t g_timeout_ms = 300000;
bool g_patient = false;

/// A request given up on must not write into a buffer that its caller frees. Collectives cannot be
/// cancelled; their caller ends the process.
void abandon(MPI_Request& request) {
  int done = 0;
  if (MPI_Cancel(&request) == MPI_SUCCESS) MPI_Test(&request, &done, MPI_STATUS_IGNORE);
}

int world_rank_of(const GroupImpl& g, int rank) {
  MPI_Group own = MPI_GROUP_NULL, world = MPI_GROUP_NULL;
  MPI_Comm_group(g.comm, &own);
  MPI_Comm_group(MPI_COMM_WORLD, &world);
  int result = -1;
  MPI_Group_translate_ranks(own, 1, &rank, world, &result);
  MPI_Group_free(&own);
  MPI_Group_free(&world);
  return result;
}

/// Ranks that a wait may be waiting for: one, or all others of the group.
std::vector<int> awaited(const GroupImpl& g, int peer) {
  std::vector<int> ranks;
  for (int r = 0; r < g.size; ++r) {
    if (r != g.rank && (peer < 0 || r == peer)) ranks.push_back(r);
  }
  return ranks;
}

/// A rank that is stopped or gone will not answer, however long one waits.
bool someone_is_out(const GroupImpl& g, int peer) {
  for (const int rank : awaited(g, peer)) {
    const board::State state = board::look(world_rank_of(g, rank)).state;
    if (state == board::State::kStopped || state == board::State::kGone) return true;
  }
  return false;
}

/// Who keeps a wait from ending: the awaited ranks that are not in the same call themselves.
std::string blame(const GroupImpl& g, int peer, const std::string& call) {
  std::vector<int> missing;
  std::string stories;
  for (const int rank : awaited(g, peer)) {
    const int world_rank = world_rank_of(g, rank);
    const board::Seen seen = board::look(world_rank);
    if (peer < 0 && seen.state == board::State::kWaiting && seen.call == call) continue;
    missing.push_back(rank);
    if (missing.size() <= 8) stories += "; " + board::describe(world_rank, seen);
  }
  std::string names;
  for (const int rank : missing) {
    names += names.empty() ? fmt::format("rank {}", rank) : fmt::format(", rank {}", rank);
  }
  return (names.empty() ? std::string("any peer") : names) + stories;
}

}  // namespace

std::string where(const GroupImpl& g, std::string_view what) {
  return fmt::format("group {} rank {} of {}: {}", g.name, g.rank, g.size, what);
}

void check(int code, const GroupImpl& g, std::string_view what, std::string_view call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  fail(ErrorKind::kComm,
       "{}: {} failed: {}",
       where(g, what),
       call,
       std::string_view(text, static_cast<size_t>(length)));
}

void wait(MPI_Request& request,
          const GroupImpl& g,
          std::string_view what,
          std::string_view call,
          int peer) {
  using std::chrono::steady_clock;
  struct Entered {
    bool in = false;
    ~Entered() {
      if (in) board::leave();
    }
  } entered;
  // Ranks often share cores in tests, so after a short spin the thread yields them.
  const auto start = steady_clock::now();
  auto last_good = start, looked = start;  // of a patient wait
  std::string place;
  for (int64_t polls = 0;; ++polls) {
    int done = 0;
    check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), g, what, call);
    if (done != 0) return;
    if (polls < 2000) {
      if (polls > 20) std::this_thread::yield();
      continue;
    }
    if (!entered.in) {
      place = fmt::format("{} of {} (group {})", call, what, g.name);
      board::enter(place);
      entered.in = true;
    }
    const auto now = steady_clock::now();
    const auto ms = [&](steady_clock::time_point since) {
      return std::chrono::duration_cast<std::chrono::milliseconds>(now - since).count();
    };
    const int64_t waited = ms(start);
    if (g_patient && ms(looked) >= 500) {
      looked = now;
      if (!someone_is_out(g, peer)) last_good = now;
    }
    if ((g_patient ? ms(last_good) : waited) >= g_timeout_ms) {
      const std::string who = blame(g, peer, place);
      abandon(request);
      fail(ErrorKind::kComm,
           "{}: {} got no answer in {} ms from {}. Look at that rank's log; raise the deadline "
           "(--comm-timeout-ms, or comm_timeout_ms in a scenario) if it is only slow",
           where(g, what),
           call,
           waited,
           who);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(std::min<int64_t>(20 + waited, 1000)));
  }
}

void set_comm_timeout_ms(int64_t ms) {
  LOCKSTEP_CHECK(ms > 0, kConfig, "comm timeout of {} ms must be above 0", ms);
  g_timeout_ms = ms;
}
int64_t comm_timeout_ms() { return g_timeout_ms; }

PatientWaits::PatientWaits() : before_(std::exchange(g_patient, true)) {}
PatientWaits::~PatientWaits() { g_patient = before_; }

}  // namespace lockstep::parallel
