#include "model/base/parallel.hpp"

#include <ATen/Parallel.h>

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

}  // namespace

void parallel_for(int64_t begin, int64_t end, int64_t grain, RangeBody body) {
  at::parallel_for(begin, end, grain, [&](int64_t b, int64_t e) {
    const OneBlasThread guard;
    body(b, e);
  });
}

int num_threads() { return at::get_num_threads(); }

}  // namespace lockstep
