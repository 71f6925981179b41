#include "model/base/parallel.hpp"

#include <ATen/Parallel.h>

#ifndef INTRA_OP_PARALLEL
#error "compile this file with -fopenmp: without it every loop of the program runs on one thread"
#endif

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <thread>

// The BLAS of the x86 LibTorch is MKL, whose thread count can be set per calling thread; other
// builds lack the symbol.
extern "C" int MKL_Set_Num_Threads_Local(int) __attribute__((weak));

namespace lockstep {
namespace {

/// One BLAS thread for the scope. at::parallel_for runs a range of one piece on the caller, outside
/// of any parallel region, where MKL would start its own threads and choose its sum order by their
/// number.
class OneBlasThread {
 public:
  OneBlasThread() {
    if (MKL_Set_Num_Threads_Local != nullptr) before_ = MKL_Set_Num_Threads_Local(1);
  }
  ~OneBlasThread() {
    if (MKL_Set_Num_Threads_Local != nullptr) MKL_Set_Num_Threads_Local(before_);
  }
  OneBlasThread(const OneBlasThread&) = delete;
  OneBlasThread& operator=(const OneBlasThread&) = delete;

 private:
  int before_ = 0;
};

/// Makes waiting threads sleep early. libgomp lets a thread that waits for the others, or for the
/// next loop, spin for up to some ten milliseconds: on a machine with other work it takes the
/// processor from the very thread it waits for. With more OpenMP threads than processors it spins a
/// few microseconds only (documented with GOMP_SPINCOUNT, which can be set before a program starts
/// but not in it), so one more team is started, which then rests for good. Where fewer threads than
/// processors are asked for, nothing changes.
bool start_resting_team() {
  if (std::getenv("GOMP_SPINCOUNT") != nullptr || std::getenv("OMP_WAIT_POLICY") != nullptr) {
    return false;
  }
  static std::mutex never_free;
  never_free.lock();
  std::thread([] {
    std::atomic<int> seen{0};
#pragma omp parallel num_threads(2)
    ++seen;
    never_free.lock();
  }).detach();
  return true;
}

}  // namespace

void parallel_for(int64_t begin, int64_t end, int64_t grain, RangeBody body) {
  [[maybe_unused]] static const bool resting = num_threads() > 1 && start_resting_team();
  at::parallel_for(begin, end, grain, [&](int64_t b, int64_t e) {
    const OneBlasThread guard;
    body(b, e);
  });
}

int num_threads() { return at::get_num_threads(); }

}  // namespace lockstep
