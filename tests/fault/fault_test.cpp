// One rank of a pair is killed, stopped, leaves out a call or makes two in another order, in every
// kind of call: the other ends with code 3 in time and says who and where. Nothing hangs.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <ostream>
#include <string>
#include <vector>

#include "harness/launch/mpi_start.hpp"
#include "parallel/comm/transport.hpp"
#include "tests/fault/kinds.hpp"

namespace lockstep::tests {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

struct Told {
  int code = -1;
  int64_t ms = 0;
  std::string message;
};

struct Way {
  std::string name, program;
  std::vector<std::string> environment;

  friend void PrintTo(const Way& way, std::ostream* out) { *out << way.name; }
};

/// Real NCCL is shown where there is a GPU; several ranks on one need NCCL 2.30 and its switch.
const Way kWays[] = {
    {"Mpi", "fault_ranks", {"LOCKSTEP_COMM=mpi"}},
    {"FakeNccl", "fault_ranks_fake_nccl", {"LOCKSTEP_COMM=nccl", "LOCKSTEP_NCCL_LIBRARY="}},
    {"Nccl", "fault_ranks", {"LOCKSTEP_COMM=nccl", "NCCL_MULTI_RANK_GPU_ENABLE=1"}}};

class Fault : public testing::TestWithParam<Way> {
 protected:
  void SetUp() override {
    std::string name = testing::UnitTest::GetInstance()->current_test_info()->name();
    std::replace(name.begin(), name.end(), '/', '_');
    folder_ = fs::path(testing::TempDir()) / ("lockstep_fault_" + name);
    program_ = fs::path(LOCKSTEP_BINARY_DIR) / GetParam().program;
    if (!fs::exists(program_)) GTEST_SKIP() << "built without " << GetParam().program;
    const std::string missing = GetParam().name == "Nccl" ? parallel::nccl_missing() : "";
    if (!missing.empty()) GTEST_SKIP() << missing;
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  /// One start for all kinds. With recovery the launcher leaves the survivors of a killed rank
  /// alone.
  void start(const std::string& fault) {
    std::vector<std::string> command =
        harness::mpirun_command(2 * static_cast<int64_t>(kKinds.size()));
    for (const char* word : {"--enable-recovery", "--quiet"}) command.emplace_back(word);
    command.push_back(program_.string());
    command.push_back(fault);
    command.push_back(folder_.string());
    std::vector<std::string> environment = GetParam().environment;
    for (const char* one : {"OMP_NUM_THREADS=1", "MKL_NUM_THREADS=1"})
      environment.emplace_back(one);
    outcome_ = harness::run_command(command, environment);
  }

  /// What a rank of the pair of this kind wrote.
  [[nodiscard]] Told told(std::string_view kind, int rank) const {
    std::ifstream file(folder_ / fmt::format("{}.{}", kind, rank));
    Told told;
    file >> told.code >> told.ms;
    told.message.assign(std::istreambuf_iterator<char>(file), {});
    return told;
  }

  /// The rank ended in time, with code 3, and named the call and where the other one is.
  void expect_told(std::string_view kind,
                   int rank,
                   const std::vector<std::string>& parts,
                   int64_t most_ms = kDeadlineMs + 10000) const {
    const Told got = told(kind, rank);
    EXPECT_EQ(got.code, 3) << kind << " rank " << rank << ": " << got.message << outcome_.errors;
    EXPECT_LE(got.ms, most_ms) << kind;
    EXPECT_THAT(got.message, HasSubstr(std::string(kind) + " pair"));
    for (const std::string& part : parts) EXPECT_THAT(got.message, HasSubstr(part)) << kind;
  }

  static std::string world_rank_of(std::string_view kind, int rank) {
    const auto index = std::find(kKinds.begin(), kKinds.end(), kind) - kKinds.begin();
    return fmt::format("world_rank {}", 2 * index + rank);
  }

  fs::path folder_, program_;
  harness::Outcome outcome_;
};

TEST_P(Fault, TheOtherRankOfAKilledOneNamesItLongBeforeTheDeadlineInEveryKindOfCall) {
  start("kill");
  for (const std::string_view kind : kKinds)
    expect_told(kind, 0, {"broken call", world_rank_of(kind, 1), "is gone"}, kFarDeadlineMs / 4);
}

TEST_P(Fault, TheOtherRankOfAStoppedOneNamesItInEveryKindOfCall) {
  start("stop");
  for (const std::string_view kind : kKinds)
    expect_told(kind, 0, {"broken call", world_rank_of(kind, 1), "is stopped"});
}

TEST_P(Fault, B42ACallThatOneRankSkipsIsNamedByBothInEveryKind) {
  start("skip");
  for (const std::string_view kind : kKinds) {
    // A message that was never sent is no difference between collectives: both wait in vain.
    expect_told(kind, 0, {"broken call", "next call", "rank 1"});
    expect_told(kind, 1, {"next call", "broken call", "rank 0"});
  }
}

TEST_P(Fault, B42CallsInAnotherOrderAreNamedByBothInEveryKind) {
  start("reorder");
  for (const std::string_view kind : kKinds) {
    expect_told(kind, 0, {"broken call", "next call", "rank 1"});
    expect_told(kind, 1, {"next call", "broken call", "rank 0"});
  }
}

INSTANTIATE_TEST_SUITE_P(Transports, Fault, testing::ValuesIn(kWays), [](const auto& way) {
  return way.param.name;
});

}  // namespace
}  // namespace lockstep::tests
