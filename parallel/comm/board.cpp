#include "parallel/comm/board.hpp"

#include <fcntl.h>
#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <new>

#include "model/base/error.hpp"

namespace lockstep::parallel::board {
namespace {

constexpr size_t kCallBytes = 160;
constexpr size_t kPosts = 256;

/// A call made known. `sequence` is 0 while the rest is being written.
struct Post {
  std::atomic<int64_t> sequence;
  std::atomic<uint64_t> key, hash;
  char text[104];
};

/// One rank's line. Written by its owner alone; a reader may meet a half-written call, which costs
/// a garbled word in a message and nothing else.
struct Line {
  std::atomic<int> world_rank, pid, waiting, left;
  char call[kCallBytes];
  Post posts[kPosts];  ///< by group and number, so that neighbours in time rarely share a place
};

struct Board {
  std::atomic<int> reported;
  std::atomic<int> num_lines;
};

static_assert(std::atomic<int>::is_always_lock_free && std::atomic<int64_t>::is_always_lock_free,
              "signal handlers and processes share these");

MPI_Comm g_machine = MPI_COMM_NULL;
MPI_Win g_window = MPI_WIN_NULL;
// Read by a signal handler.
std::atomic<Board*> g_board{nullptr};
std::atomic<Line*> g_lines{nullptr};
std::atomic<Line*> g_own{nullptr};

/// Appends to a fixed buffer without allocating.
class Words {
 public:
  Words(char* text, size_t size) : text_(text), size_(size) {}
  Words& add(const char* part) noexcept {
    for (; *part != '\0' && length_ < size_; ++part) text_[length_++] = *part;
    return *this;
  }
  Words& add(int value) noexcept {
    char digits[12];
    int count = 0;
    int64_t rest = value < 0 ? 0 : value;
    do {
      digits[count++] = static_cast<char>('0' + rest % 10);
      rest /= 10;
    } while (rest > 0);
    while (count > 0 && length_ < size_) text_[length_++] = digits[--count];
    return *this;
  }
  [[nodiscard]] size_t length() const noexcept { return length_; }

 private:
  char* text_;
  size_t size_, length_ = 0;
};

/// The letter of /proc/PID/stat: R, S, D run, T is stopped, Z and '\0' are gone. Async-signal-safe.
char process_state(int pid) noexcept {
  char path[32] = {};
  Words(path, sizeof path - 1).add("/proc/").add(pid).add("/stat");
  const int fd = ::open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return '\0';
  char text[128];
  const ssize_t got = ::read(fd, text, sizeof text);
  ::close(fd);
  // "4711 (name) S ...", where the name may hold anything.
  for (ssize_t at = got - 3; at > 0; --at) {
    if (text[at] == ')') return text[at + 2];
  }
  return '\0';
}

bool gone(char state) noexcept { return state == '\0' || state == 'Z' || state == 'X'; }

size_t place_of(uint64_t key, int64_t sequence) {
  return (key + static_cast<uint64_t>(sequence)) % kPosts;
}

Line* line_of(int world_rank) {
  Board* board = g_board.load();
  Line* lines = g_lines.load();
  if (board == nullptr) return nullptr;
  for (int i = 0; i < board->num_lines.load(); ++i) {
    if (lines[i].world_rank.load() == world_rank) return &lines[i];
  }
  return nullptr;
}

}  // namespace

void open() {
  int world_rank = 0, rank = 0, size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
  if (MPI_Comm_split_type(
          MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, world_rank, MPI_INFO_NULL, &g_machine) !=
      MPI_SUCCESS) {
    return;
  }
  MPI_Comm_set_errhandler(g_machine, MPI_ERRORS_RETURN);
  MPI_Comm_rank(g_machine, &rank);
  MPI_Comm_size(g_machine, &size);
  const auto bytes = static_cast<MPI_Aint>(
      rank == 0 ? sizeof(Board) + static_cast<size_t>(size) * sizeof(Line) : 0);
  void* own = nullptr;
  if (MPI_Win_allocate_shared(
          bytes, 1, MPI_INFO_NULL, g_machine, static_cast<void*>(&own), &g_window) != MPI_SUCCESS) {
    g_window = MPI_WIN_NULL;
    return;
  }
  MPI_Aint segment = 0;
  int unit = 0;
  void* base = nullptr;
  MPI_Win_shared_query(g_window, 0, &segment, &unit, static_cast<void*>(&base));
  if (rank == 0) std::memset(base, 0, static_cast<size_t>(segment));
  MPI_Barrier(g_machine);
  auto* board = static_cast<Board*>(base);
  auto* lines = reinterpret_cast<Line*>(static_cast<char*>(base) + sizeof(Board));
  Line& line = lines[rank];
  line.world_rank = world_rank;
  line.pid = getpid();
  board->num_lines = size;
  MPI_Barrier(g_machine);
  g_lines = lines;
  g_own = &line;
  g_board = board;
}

void close() noexcept {
  mark_left();
  g_board = nullptr;
  g_own = nullptr;
  if (g_window != MPI_WIN_NULL) MPI_Win_free(&g_window);
  if (g_machine != MPI_COMM_NULL) MPI_Comm_free(&g_machine);
}

void enter(std::string_view call) noexcept {
  Line* own = g_own.load();
  if (own == nullptr) return;
  const size_t length = std::min(call.size(), kCallBytes - 1);
  std::memcpy(own->call, call.data(), length);
  own->call[length] = '\0';
  own->waiting = 1;
}

void leave() noexcept {
  Line* own = g_own.load();
  if (own != nullptr) own->waiting = 0;
}

void post(uint64_t key, int64_t sequence, uint64_t hash, std::string_view text) noexcept {
  Line* own = g_own.load();
  if (own == nullptr) return;
  Post& post = own->posts[place_of(key, sequence)];
  post.sequence = 0;
  const size_t length = std::min(text.size(), sizeof post.text - 1);
  std::memcpy(post.text, text.data(), length);
  post.text[length] = '\0';
  post.key = key;
  post.hash = hash;
  post.sequence = sequence;  // sequentially consistent, like the readers' loads
}

std::optional<Posted> call_of(int world_rank, uint64_t key, int64_t sequence) {
  const Line* line = line_of(world_rank);
  if (line == nullptr) return std::nullopt;
  const Post& post = line->posts[place_of(key, sequence)];
  if (post.sequence.load() != sequence || post.key.load() != key) return std::nullopt;
  Posted posted{post.hash.load(), std::string(post.text, strnlen(post.text, sizeof post.text))};
  if (post.sequence.load() != sequence || post.key.load() != key) return std::nullopt;
  return posted;
}

int64_t last_call(int world_rank, uint64_t key, int64_t sequence) {
  const Line* line = line_of(world_rank);
  if (line == nullptr) return 0;
  for (int64_t s = sequence; s > 0 && s > sequence - static_cast<int64_t>(kPosts); --s) {
    const Post& post = line->posts[place_of(key, s)];
    if (post.sequence.load() == s && post.key.load() == key) return s;
  }
  return 0;
}

Seen look(int world_rank) {
  const Line* line = line_of(world_rank);
  if (line == nullptr) return {};
  Seen seen;
  seen.pid = line->pid.load();
  const char state = process_state(seen.pid);
  if (line->waiting.load() != 0) seen.call.assign(line->call, strnlen(line->call, kCallBytes));
  if (line->left.load() != 0) {
    seen.state = State::kLeft;
  } else if (gone(state)) {
    seen.state = State::kGone;
  } else if (state == 'T' || state == 't') {
    seen.state = State::kStopped;
  } else if (line->waiting.load() != 0) {
    seen.state = State::kWaiting;
  } else {
    seen.state = State::kComputing;
  }
  return seen;
}

std::string describe(int world_rank, const Seen& seen) {
  const std::string who = seen.pid == 0
                              ? fmt::format("world_rank {}", world_rank)
                              : fmt::format("world_rank {} (process {})", world_rank, seen.pid);
  const std::string last = seen.call.empty() ? "" : "; it waited in " + seen.call;
  switch (seen.state) {
    case State::kComputing:
      return who + " runs and has not reached this call";
    case State::kWaiting:
      return fmt::format("{} waits in {}", who, seen.call);
    case State::kStopped:
      return fmt::format("{} is stopped; `kill -CONT {}` resumes it{}", who, seen.pid, last);
    case State::kGone:
      return who + " is gone: it crashed or was killed" + last;
    case State::kLeft:
      return who + " has ended" + last;
    default:
      return who + " is on another machine; look at its log";
  }
}

bool claim_report() noexcept {
  Board* board = g_board.load();
  return board == nullptr || board->reported.exchange(1) == 0;
}

void mark_left() noexcept {
  Line* own = g_own.load();
  if (own != nullptr) own->left = 1;
}

size_t last_words(char* text, size_t size) noexcept {
  Words words(text, size);
  const Board* board = g_board.load();
  const Line* own = g_own.load();
  const Line* lines = g_lines.load();
  if (board == nullptr || own == nullptr) {
    return words
        .add("this rank was told to end (SIGTERM): another rank died, or the job was cancelled")
        .length();
  }
  words.add("world_rank ").add(own->world_rank.load()).add(": told to end (SIGTERM) while it ");
  if (own->waiting.load() != 0) {
    words.add("waited in ").add(own->call);
  } else {
    words.add("computed");
  }
  bool any = false;
  for (int i = 0; i < board->num_lines.load(); ++i) {
    if (lines[i].left.load() != 0 || !gone(process_state(lines[i].pid.load()))) continue;
    words.add("; world_rank ").add(lines[i].world_rank.load());
    words.add(" (process ").add(lines[i].pid.load()).add(") is gone");
    any = true;
  }
  if (any) {
    words.add(
        ": it crashed or was killed, often for want of memory. Read what it wrote and `dmesg | "
        "tail`; fewer tokens or more ranks need less memory");
  } else {
    words.add(
        "; no other rank of this machine is gone: the job was cancelled, or a rank elsewhere died. "
        "Look at the launcher's messages");
  }
  return words.length();
}

}  // namespace lockstep::parallel::board
