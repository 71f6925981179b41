// Tasks of unequal cost on the threads of parallel_for.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "model/base/parallel.hpp"

namespace lockstep::model {

/// Calls body(task) once for every task in [0, count), each thread taking the next one not begun,
/// highest index first (the costly end of a causal row). make_body(worker) is called once per
/// thread, worker < num_threads(), and may own that thread's scratch. Which thread runs a task is
/// not fixed: tasks must write disjoint results.
template <typename MakeBody>
void dynamic_tasks(int64_t count, MakeBody make_body) {
  std::atomic<int64_t> next{0}, next_worker{0};
  const int64_t workers = std::min<int64_t>(count, num_threads());
  parallel_for(0, workers, 1, [&](int64_t, int64_t) {
    auto body = make_body(next_worker++);
    for (int64_t task = next++; task < count; task = next++) body(count - 1 - task);
  });
}

}  // namespace lockstep::model
