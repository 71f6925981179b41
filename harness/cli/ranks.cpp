#include "harness/cli/ranks.hpp"

#include <chrono>
#include <cstdio>
#include <iostream>
#include <thread>

#include "harness/cli/errors.hpp"

namespace lockstep::harness {

int on_ranks(const Context& context,
             std::string_view command,
             const std::function<int(const parallel::Session&)>& body) {
  parallel::Session session = parallel::Session::start(nullptr, nullptr);
  const int64_t world_rank = session.world().rank();
  if (session.world().size() == 1) return body(session);
  try {
    return static_cast<int>(session.world().all_reduce_max(body(session), "exit code"));
  } catch (const std::exception& error) {
    const Failure failure = explain(error);
    const bool everywhere =
        failure.kind != ErrorKind::kComm && failure.kind != ErrorKind::kInternal;
    if (everywhere && world_rank != 0) {
      // Rank 0 meets the same error and ends the job; if it did not, this rank speaks after all.
      std::this_thread::sleep_for(std::chrono::seconds(3));
    }
    std::fputs(fmt::format("{}{}",
                           everywhere ? "" : fmt::format("world_rank {}: ", world_rank),
                           error_block(failure, command))
                   .c_str(),
               stderr);
    std::fflush(stderr);
    if (context.json && world_rank == 0) std::cout << error_json(failure) << std::flush;
    session.abort(exit_code(failure.kind));
    return exit_code(failure.kind);
  }
}

}  // namespace lockstep::harness
