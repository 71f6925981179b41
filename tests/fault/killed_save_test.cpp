// A process that is killed while it saves a checkpoint: what it left is refused, the checkpoint
// before it loads with its bytes, and the next save of the same name succeeds.
#include "tests/fault/killed_save.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <tuple>

#include "harness/launch/mpi_start.hpp"
#include "model/checkpoint/safetensors.hpp"
#include "tests/support/compare.hpp"

namespace lockstep::tests {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

/// Ranks, and the call in which one of them is killed.
class KilledSave : public testing::TestWithParam<std::tuple<int64_t, std::string>> {
 protected:
  void SetUp() override {
    folder_ = fs::path(testing::TempDir()) / fmt::format("lockstep_killed_{}_{}", point(), ranks());
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  static int64_t ranks() { return std::get<0>(GetParam()); }
  static std::string point() { return std::get<1>(GetParam()); }
  [[nodiscard]] std::string path(const std::string& name) const {
    return (folder_ / name).string();
  }

  [[nodiscard]] harness::Outcome start() const {
    std::vector<std::string> command;
    if (ranks() > 1) {
      command = harness::mpirun_command(ranks());
      for (const char* word : {"--enable-recovery", "--quiet"}) command.emplace_back(word);
    }
    for (const std::string& word :
         {std::string(LOCKSTEP_BINARY_DIR) + "/killed_save", point(), folder_.string()}) {
      command.push_back(word);
    }
    return harness::run_command(command, {"OMP_NUM_THREADS=1", "MKL_NUM_THREADS=1"});
  }

  /// One error that says what to do.
  void expect_refused(harness::Trainer& trainer, const std::string& name) const {
    try {
      trainer.load(path(name));
      ADD_FAILURE() << name << " was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(exit_code(error.kind()), 2);
      EXPECT_THAT(error.what(), HasSubstr(path(name)));
      EXPECT_THAT(error.what(), HasSubstr("did not finish; use an earlier checkpoint"));
    }
  }

  fs::path folder_;
};

TEST_P(KilledSave, IsRefusedAndTheOneBeforeItKeepsItsBytes) {
  const harness::Outcome outcome = start();
  const int64_t killed = point() == "head" || point() == "rename" ? 0 : ranks() - 1;
  if (ranks() == 1) {
    EXPECT_EQ(outcome.exit_code, 128 + SIGKILL) << outcome.errors;
  }
  for (int64_t r = 0; r < ranks(); ++r) {
    std::ifstream told(path(fmt::format("told.{}", r)));
    EXPECT_EQ(told.is_open(), r != killed) << "rank " << r << ": " << outcome.errors;
    if (r == killed) continue;
    int code = -1;
    told >> code;
    const std::string message(std::istreambuf_iterator<char>(told), {});
    EXPECT_EQ(code, 3) << message;
    EXPECT_THAT(message, HasSubstr(fmt::format("world_rank {}", killed)));
    EXPECT_THAT(message, HasSubstr("is gone"));
  }

  ASSERT_TRUE(fs::exists(path(".step-2.partial/model.safetensors"))) << outcome.errors;
  const parallel::Mesh mesh = parallel::Mesh::single();
  harness::Trainer trainer(tiny(), killed_save_options(), mesh);
  expect_refused(trainer, "step-2");
  // Before its rename the folder is complete, and only its name says that the save was killed.
  if (point() != "rename") expect_refused(trainer, ".step-2.partial");
  EXPECT_EQ(parallel::latest_checkpoint(folder_.string(), "step-"), path("step-1"));
  EXPECT_EQ(trainer.load(path("step-1")).step, 1);
  const model::Safetensors expected = model::Safetensors::open(path("step-1.expected.safetensors"));
  const std::map<std::string, Tensor> weights = trainer.weights();
  EXPECT_EQ(weights.size(), expected.tensors().size());
  for (const auto& [name, value] : weights)
    EXPECT_TRUE(same_bytes(value, expected.load(name))) << name;

  trainer.train_step({tiny_documents({40}, 2)});
  trainer.save(path("step-2"));
  EXPECT_FALSE(fs::exists(path(".step-2.partial")));
  EXPECT_EQ(trainer.load(path("step-2")).step, 2);
}

INSTANTIATE_TEST_SUITE_P(Points,
                         KilledSave,
                         testing::Combine(testing::Values(1, 2, 4),
                                          testing::Values("head", "write", "sync", "rename")),
                         [](const auto& c) {
                           return fmt::format("{}On{}", std::get<1>(c.param), std::get<0>(c.param));
                         });

}  // namespace
}  // namespace lockstep::tests
