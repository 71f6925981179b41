#include "model/base/parallel.hpp"

#include <ATen/Parallel.h>

namespace lockstep {

void parallel_for(int64_t begin, int64_t end, int64_t grain, RangeBody body) {
  at::parallel_for(begin, end, grain, [&](int64_t b, int64_t e) { body(b, e); });
}

int num_threads() { return at::get_num_threads(); }

}  // namespace lockstep
