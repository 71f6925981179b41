#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstddef>
#include <memory>

#include "model/base/heap.hpp"

namespace lockstep {
namespace {

long page_faults_of_a_large_block() {
  rusage before{}, after{};
  getrusage(RUSAGE_SELF, &before);
  const size_t size = size_t{96} << 20;
  const std::unique_ptr<char[]> block(new char[size]);
  // volatile, or the compiler removes the allocation altogether.
  for (size_t i = 0; i < size; i += 4096) static_cast<volatile char*>(block.get())[i] = 1;
  getrusage(RUSAGE_SELF, &after);
  return after.ru_minflt - before.ru_minflt;
}

TEST(Heap, LargeBlocksAreRecycledWithoutPageFaults) {
  if (!keep_freed_memory()) GTEST_SKIP() << "this C library has no such setting";
  page_faults_of_a_large_block();
  // 24576 pages of 4 KB; a handful for other reasons.
  EXPECT_LT(page_faults_of_a_large_block(), 500);
}

}  // namespace
}  // namespace lockstep
