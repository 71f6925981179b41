// Waiting for a call with a deadline, and finding out whose fault it is when it passes.
#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>
#include <utility>

#include "parallel/comm/board.hpp"
#include "parallel/comm/group_impl.hpp"

namespace lockstep::parallel {
namespace {

int64_t g_timeout_ms = 300000;
int64_t g_step = -1;
bool g_patient = false;

constexpr int64_t kLookEveryMs = 50;
/// Of patience with ranks of other machines.
constexpr int64_t kUnseenDeadlines = 10;
constexpr int64_t kGoneMs = 500;  // what a rank sent before its end arrives within this

std::string short_name(const Call& call) {
  return fmt::format("{} of {}", op_name(call.op), call.what);
}

std::string name_of(const Call& call) {
  return fmt::format("{} (group {}{})",
                     short_name(call),
                     call.g.name,
                     call.sequence > 0 ? fmt::format(", call {}", call.sequence) : "");
}

/// Ranks that a wait may be waiting for: one, or all others of the group.
std::vector<int> awaited(const Call& call) {
  std::vector<int> ranks;
  for (int r = 0; r < call.g.size; ++r) {
    if (r != call.g.rank && (call.peer < 0 || r == call.peer)) ranks.push_back(r);
  }
  return ranks;
}

int world_rank(const Call& call, int rank) { return call.g.world_ranks[static_cast<size_t>(rank)]; }

/// Awaited ranks that will not answer, however long one waits; of a rank on another machine that
/// cannot be known.
struct Out {
  bool gone = false, stopped = false, unseen = false;
};
Out who_is_out(const Call& call) {
  Out out;
  for (const int rank : awaited(call)) {
    const board::State state = board::look(world_rank(call, rank)).state;
    out.gone = out.gone || state == board::State::kGone;
    out.stopped = out.stopped || state == board::State::kStopped;
    out.unseen = out.unseen || state == board::State::kUnknown;
  }
  return out;
}

/// Who keeps a wait from ending: the awaited ranks that are not in the same call themselves.
std::string blame(const Call& call) {
  const std::string own = name_of(call);
  std::vector<int> missing;
  std::string stories;
  for (const int rank : awaited(call)) {
    const board::Seen seen = board::look(world_rank(call, rank));
    if (call.peer < 0 && seen.state == board::State::kWaiting && seen.call == own) continue;
    missing.push_back(rank);
    if (missing.size() > 8) continue;
    stories += "; " + board::describe(world_rank(call, rank), seen);
    if (call.sequence == 0) continue;
    const int64_t made = board::last_call(world_rank(call, rank), call.g.key, call.sequence);
    if (made > 0 && made < call.sequence) {
      stories += fmt::format(" (its last call of group {} was call {}, this is call {})",
                             call.g.name,
                             made,
                             call.sequence);
    }
  }
  std::string names;
  for (const int rank : missing) {
    names += names.empty() ? fmt::format("rank {}", rank) : fmt::format(", rank {}", rank);
  }
  return (names.empty() ? std::string("any peer") : names) + stories;
}

/// Throws when a rank of this machine made another call as this one's number in the group.
void check_order(const Call& call) {
  if (call.sequence == 0) return;
  for (const int rank : awaited(call)) {
    const auto theirs = board::call_of(world_rank(call, rank), call.g.key, call.sequence);
    if (!theirs || theirs->hash == call.hash) continue;
    // Posted names may be cut.
    const bool same_name = short_name(call).starts_with(theirs->text);
    fail(ErrorKind::kComm,
         "{}: the ranks of this group do not make the same calls: call {} is {} here and {} on "
         "rank {} (world_rank {}); look for a call that one of them leaves out, makes in another "
         "order or with another size",
         call.where(),
         call.sequence,
         short_name(call),
         same_name ? "one of another size" : theirs->text,
         rank,
         world_rank(call, rank));
  }
}

/// A transport often fails because ranks made different calls; then that is the news.
bool held(const std::function<bool()>& condition, const Call& call) {
  try {
    return condition();
  } catch (const TransportError& error) {
    tell_failure(error, call);
  }
}

/// Blocks until the condition holds.
void until_true(const std::function<bool()>& condition, const Call& call) {
  using std::chrono::steady_clock;
  bool entered = false;
  // Ranks often share cores in tests, so after a short spin the thread yields them.
  const auto start = steady_clock::now();
  auto last_good = start, looked = start;
  std::optional<steady_clock::time_point> gone_since;
  for (int64_t polls = 0;; ++polls) {
    if (held(condition, call)) {
      if (entered) board::leave();  // after a failure others may still want to know where
      return;
    }
    if (polls < 2000) {
      if (polls > 20) std::this_thread::yield();
      continue;
    }
    if (!entered) {
      board::enter(name_of(call));
      entered = true;
    }
    const auto now = steady_clock::now();
    const auto ms = [&](steady_clock::time_point since) {
      return std::chrono::duration_cast<std::chrono::milliseconds>(now - since).count();
    };
    const int64_t waited = ms(start);
    if (ms(looked) >= kLookEveryMs) {
      looked = now;
      check_order(call);
      const Out out = who_is_out(call);
      const bool given_up = out.unseen && waited >= kUnseenDeadlines * g_timeout_ms;
      if (!out.gone && !out.stopped && !given_up) last_good = now;
      if (out.gone && !gone_since) gone_since = now;
    }
    if (gone_since && ms(*gone_since) >= kGoneMs) {
      fail(ErrorKind::kComm,
           "{}: {} got no answer after {} ms from {}. Look at that rank's log, and at `dmesg | "
           "tail` for want of memory",
           call.where(),
           op_name(call.op),
           waited,
           blame(call));
    }
    if ((g_patient ? ms(last_good) : waited) >= g_timeout_ms) {
      fail(ErrorKind::kComm,
           "{}: {} got no answer in {} ms from {}. Look at that rank's log; raise the deadline "
           "(--comm-timeout-ms, or comm_timeout_ms in a scenario) if it is only slow",
           call.where(),
           op_name(call.op),
           waited,
           blame(call));
    }
    std::this_thread::sleep_for(std::chrono::microseconds(std::min<int64_t>(20 + waited, 1000)));
  }
}

}  // namespace

std::string Call::where() const {
  return fmt::format("group {} rank {} of {}{}: {}",
                     g.name,
                     g.rank,
                     g.size,
                     g_step >= 0 ? fmt::format(" step {}", g_step) : "",
                     what);
}

CallTime::~CallTime() {
  const bool recorded = call_.sequence > 0 || call_.peer >= 0;
  if (!recorded) return;
  call_.g.ledger.add_seconds(
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count());
}

Until Call::until() const {
  return [this](const std::function<bool()>& condition) { until_true(condition, *this); };
}

void tell_failure(const TransportError& error, const Call& call) {
  check_order(call);
  fail(ErrorKind::kComm, "{}: {}: {}", call.where(), op_name(call.op), error.what());
}

void announce(const Call& call) {
  if (call.sequence == 0) return;
  board::post(call.g.key, call.sequence, call.hash, short_name(call));
  check_order(call);
}

void wait(Work& work, const Call& call) {
  const CallTime time(call);
  try {
    until_true([&] { return work.done(); }, call);
  } catch (...) {
    work.abandon();
    throw;
  }
}

void set_comm_timeout_ms(int64_t ms) {
  LOCKSTEP_CHECK(ms > 0, kConfig, "comm timeout of {} ms must be above 0", ms);
  g_timeout_ms = ms;
}
int64_t comm_timeout_ms() { return g_timeout_ms; }

void set_comm_step(int64_t step) { g_step = step; }

PatientWaits::PatientWaits() : before_(std::exchange(g_patient, true)) {}
PatientWaits::~PatientWaits() { g_patient = before_; }

}  // namespace lockstep::parallel
