// Every rank runs every test; a test passes when it passes on all ranks. Usage: mpirun -n N
// rank_tests [gtest flags] [--hang-rank=R]; LOCKSTEP_COMM=nccl runs all of it over NCCL,
// LOCKSTEP_COMM_LEDGER=1 prints what each axis sent
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string_view>

#include "parallel/comm/ledger.hpp"
#include "tests/rank/world.hpp"

namespace lockstep::tests {

const parallel::Group*& world_slot() {
  static const parallel::Group* group = nullptr;
  return group;
}

const parallel::Group& world() { return *world_slot(); }

namespace {

/// Failures carry the rank; passes are told by rank 0 alone.
class RankPrinter final : public testing::EmptyTestEventListener {
 public:
  explicit RankPrinter(testing::TestEventListener* inner) : inner_(inner) {}
  void OnTestStart(const testing::TestInfo& info) override {
    if (world().rank() == 0) inner_->OnTestStart(info);
  }
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (result.failed()) fmt::print(stderr, "world_rank {}: ", world().rank());
    if (result.failed() || (result.skipped() && world().rank() == 0))
      inner_->OnTestPartResult(result);
  }
  void OnTestEnd(const testing::TestInfo& info) override {
    if (world().rank() == 0) inner_->OnTestEnd(info);
  }
  void OnTestIterationEnd(const testing::UnitTest& unit, int iteration) override {
    if (world().rank() == 0) inner_->OnTestIterationEnd(unit, iteration);
  }

 private:
  testing::TestEventListener* inner_;
};

}  // namespace
}  // namespace lockstep::tests

int main(int argc, char** argv) {
  using namespace lockstep;
  // Before the first tensor: device memory is tested where the whole tensor library can be had.
  const char* backend = std::getenv("LOCKSTEP_COMM");
  const char* library = std::getenv("LOCKSTEP_NCCL_LIBRARY");
  const bool fake = library != nullptr && *library == '\0';
  if (backend != nullptr && std::string_view(backend) == "nccl" && !fake) {
    // The tensor library then takes this NCCL too, instead of its own beside it.
    if (library != nullptr) dlopen(library, RTLD_NOW | RTLD_LOCAL);
    dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL);
  }
  for (int i = 1; i < argc; ++i) {
    const std::string_view flag(argv[i]);
    if (flag.starts_with("--hang-rank=")) setenv("LOCKSTEP_HANG_RANK", argv[i] + 12, 1);
  }
  auto session = parallel::Session::start(&argc, &argv);
  tests::world_slot() = &session.world();
  parallel::set_comm_timeout_ms(60000);
  testing::InitGoogleTest(&argc, argv);
  testing::TestEventListeners& listeners = testing::UnitTest::GetInstance()->listeners();
  listeners.Append(new tests::RankPrinter(listeners.Release(listeners.default_result_printer())));
  int failed = RUN_ALL_TESTS();
  // A rank whose tests failed may have left the others in a collective; their deadline ends them.
  if (failed != 0) session.abort(1);
  if (const auto difference = parallel::compare_ledgers(session.world())) {
    fmt::print(stderr, "world_rank {}: {}\n", session.world().rank(), difference->text);
    failed = 1;
  }
  if (session.world().rank() == 0 && std::getenv("LOCKSTEP_COMM_LEDGER") != nullptr)
    fmt::print("{}", parallel::ledger_table());
  return static_cast<int>(session.world().all_reduce_max(failed, "verdict"));
}
