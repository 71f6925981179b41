// A rank that is killed in the middle of a weight sync: the others end with code 3 and name it, and
// their engines do not serve what is half old and half new.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "harness/launch/mpi_start.hpp"

namespace lockstep::tests {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

TEST(KilledSync, IsNamedByTheOtherRanksAndNothingTornIsServed) {
  const fs::path folder = fs::path(testing::TempDir()) / "lockstep_killed_sync";
  fs::remove_all(folder);
  fs::create_directories(folder);
  std::vector<std::string> command = harness::mpirun_command(3);
  for (const std::string& word : {std::string("--enable-recovery"),
                                  std::string("--quiet"),
                                  std::string(LOCKSTEP_BINARY_DIR) + "/killed_sync",
                                  folder.string()})
    command.push_back(word);
  const harness::Outcome outcome =
      harness::run_command(command, {"OMP_NUM_THREADS=1", "MKL_NUM_THREADS=1"});
  for (int rank = 0; rank < 2; ++rank) {
    std::ifstream told(folder / fmt::format("told.{}", rank));
    ASSERT_TRUE(told.is_open()) << outcome.errors;
    int code = -1;
    told >> code;
    const std::string message(std::istreambuf_iterator<char>(told), {});
    EXPECT_EQ(code, 3) << message;
    for (const char* part : {"weights of version 2, bucket",
                             "world_rank 2",
                             "is gone",
                             "an update to version 2 was not finished"})
      EXPECT_THAT(message, HasSubstr(part));
  }
  fs::remove_all(folder);
}

}  // namespace
}  // namespace lockstep::tests
