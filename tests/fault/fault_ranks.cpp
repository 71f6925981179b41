// Ranks of which half do something wrong in the middle of a call. The ranks of an mpirun form
// pairs; the two of a pair share one kind of call, so that one start tries all kinds. Usage: mpirun
// -n 2K fault_ranks kill|stop|skip|reorder|away FOLDER; deadlines are those of kinds.hpp. Each rank
// that lives to tell writes FOLDER/KIND.RANK: exit code, milliseconds, message.
#include <chrono>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <functional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "parallel/comm/board.hpp"
#include "parallel/comm/group.hpp"
#include "tests/fault/kinds.hpp"

namespace lockstep::tests {
namespace {

using parallel::Group;

Tensor block() { return at::ones({4, 3}); }
const std::vector<int64_t> kTwo = {2, 2}, kFour = {4, 4};

/// One call of each kind; `what` is what messages must name.
void call(const std::string& kind, const Group& pair, const std::string& what) {
  Tensor tensor = block();
  if (kind == "all-gather") (void)pair.all_gather_rows(tensor, kFour, what);
  if (kind == "pending") (void)pair.all_gather_rows_start(tensor, kFour, what).wait();
  if (kind == "reduce-scatter") (void)pair.reduce_scatter_rows(tensor, kTwo, what);
  if (kind == "all-reduce") pair.all_reduce_sum(tensor, what);
  if (kind == "all-to-all") (void)pair.all_to_all_rows(tensor, kTwo, kTwo, what);
  if (kind == "broadcast") pair.broadcast(tensor, 1, what);
  if (kind == "barrier") pair.barrier(what);
  if (kind == "message") {
    if (pair.rank() == 1) pair.send(tensor, 0, 3, what);
    if (pair.rank() == 0) pair.recv(tensor, 1, 3, what);
  }
}

/// The survivor's part: the broken call, then others.
void follow_plan(const std::string& fault, const std::string& kind, const Group& pair) {
  const bool wrong = pair.rank() == 1;
  if (fault == "away") {
    const parallel::PatientWaits patient;
    parallel::set_comm_timeout_ms(kDeadlineMs / 3);  // many are waited for
    if (wrong) std::this_thread::sleep_for(std::chrono::milliseconds(10 * kDeadlineMs));
    return call(kind, pair, "broken call");
  }
  if (wrong && fault == "kill") std::raise(SIGKILL);
  if (wrong && fault == "stop") std::raise(SIGSTOP);
  if (!(wrong && (fault == "skip" || fault == "reorder"))) call(kind, pair, "broken call");
  pair.barrier("next call");
  if (wrong && fault == "reorder") call(kind, pair, "broken call");
}

int run(const std::string& fault, const std::string& folder) {
  parallel::Session session = parallel::Session::start(nullptr, nullptr);
  const Group& world = session.world();
  const std::string kind(kKinds[static_cast<size_t>(world.rank() / 2)]);
  const Group pair = world.split(world.rank() / 2, world.rank(), kind + " pair");
  // Communicators are made by the first calls, which takes long where many ranks share a GPU.
  call(kind, pair, "sound call");
  pair.barrier("sound barrier");
  world.barrier("start");
  parallel::set_comm_timeout_ms(fault == "kill" ? kFarDeadlineMs : kDeadlineMs);
  const auto start = std::chrono::steady_clock::now();
  int code = 0;
  std::string message = "no error";
  try {
    follow_plan(fault, kind, pair);
  } catch (const Error& error) {
    code = exit_code(error.kind());
    message = error.what();
  }
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(
                      std::chrono::steady_clock::now() - start)
                      .count();
  std::ofstream(fmt::format("{}/{}.{}", folder, kind, pair.rank())) << code << ' ' << ms << '\n'
                                                                    << message << '\n';
  parallel::Session::mark_left();
  // A stopped rank would keep the launcher; it is a process of this test.
  const parallel::board::Seen peer = parallel::board::look(static_cast<int>(world.rank() ^ 1));
  if (fault == "stop" && pair.rank() == 0 && peer.pid > 0) ::kill(peer.pid, SIGKILL);
  std::fflush(nullptr);
  std::_Exit(code);
}

}  // namespace
}  // namespace lockstep::tests

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  return lockstep::tests::run(argv[1], argv[2]);
}
