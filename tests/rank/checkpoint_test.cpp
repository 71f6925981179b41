// Training state written at one topology and read at another, and saves that fail.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "harness/trainer/trainer.hpp"
#include "model/config/config_json.hpp"
#include "parallel/checkpoint/distributed_checkpoint.hpp"
#include "tests/rank/world.hpp"
#include "tests/support/compare.hpp"
#include "tests/support/tiny_model.hpp"

namespace lockstep::tests {
namespace {

namespace fs = std::filesystem;
using harness::Trainer;
using model::Topology;

harness::TrainerOptions options(std::string_view policy) {
  harness::TrainerOptions o;
  o.numerics = model::Numerics::policy(policy);
  o.optimizer = parallel::OptimizerOptions{};
  o.optimizer->lr = 3e-3;
  o.router_bias_speed = 1e-3;
  return o;
}

harness::Documents batch(uint64_t seed) { return tiny_documents({33, 1, 12, 25}, seed); }

/// A folder that all ranks know, gone when the test ends.
class SharedFolder {
 public:
  explicit SharedFolder(const std::string& name) {
    Tensor id = at::full({1}, static_cast<int64_t>(::getpid()), at::kLong);
    world().broadcast(id, 0, "folder");
    path_ = (fs::temp_directory_path() /
             fmt::format("lockstep-{}-{}-{}", name, world().size(), id.item<int64_t>()))
                .string();
    if (world().rank() == 0) fs::create_directories(path_);
    world().barrier("folder");
  }
  SharedFolder(const SharedFolder&) = delete;
  SharedFolder& operator=(const SharedFolder&) = delete;
  ~SharedFolder() {
    world().barrier("folder");
    std::error_code ignored;
    if (world().rank() == 0) fs::remove_all(path_, ignored);
  }
  [[nodiscard]] std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::vector<Topology> some_topologies() {
  const int64_t n = world().size();
  std::vector<Topology> all{{}, {.cp = n}, {.fsdp = n, .ep = n}, {.dp = n}};
  if (n % 2 == 0) {
    all.push_back({.fsdp = n / 2, .tp = 2});
    all.push_back({.fsdp = n / 2, .cp = 2, .ep = n});
  }
  return all;
}

void expect_same(const std::map<std::string, Tensor>& a,
                 const std::map<std::string, Tensor>& b,
                 const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (const auto& [name, value] : a) EXPECT_TRUE(same_bytes(value, b.at(name))) << what << name;
}

TEST(Checkpoint, SavedAtAnyTopologyLoadsAtAnyOther) {
  const SharedFolder folder("reshard");
  const std::vector<Topology> all = some_topologies();
  int64_t num_saves = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    const std::string name = folder / fmt::format("step-{}", i);
    const parallel::Mesh from = parallel::Mesh::create(world(), all[i]);
    std::map<std::string, Tensor> saved;
    if (from.active()) {
      Trainer trainer(tiny(), options("fsdp-fp32-islands"), from);
      trainer.train_step({batch(1)});
      trainer.train_step({batch(2)});
      trainer.save(name, {{"seed", "3"}});
      saved = trainer.weights();
    }
    world().barrier("saved");
    for (const auto& [file, bytes] :
         parallel::checkpoint_files(tiny()->config(),
                                    model::Numerics::policy("fsdp-fp32-islands"),
                                    parallel::OptimizerKind::kAdamW)) {
      EXPECT_EQ(fs::file_size(fs::path(name) / file), bytes) << model::to_string(all[i]) << file;
    }
    for (const Topology& other : {all[(i + 1) % all.size()], all[(i + 2) % all.size()]}) {
      const parallel::Mesh to = parallel::Mesh::create(world(), other);
      ++num_saves;
      if (!to.active()) continue;
      const std::string what =
          fmt::format("{} -> {}: ", model::to_string(all[i]), model::to_string(other));
      Trainer trainer(tiny(), options("fsdp-fp32-islands"), to);
      const parallel::TrainingState state = trainer.load(name);
      EXPECT_EQ(state.step, 2) << what;
      EXPECT_EQ(state.values.at("seed"), "3") << what;
      const std::map<std::string, Tensor> loaded = trainer.weights();
      if (from.active()) expect_same(loaded, saved, what);
      // Moments too: saved again from here the files are the same.
      const std::string again = fmt::format("{}-again-{}", name, num_saves);
      trainer.save(again, {{"seed", "3"}});
      to.all().barrier("saved again");
      for (const char* file :
           {"model.safetensors", "exp_avg.safetensors", "exp_avg_sq.safetensors"}) {
        std::ifstream a(name + "/" + file, std::ios::binary),
            b(again + "/" + file, std::ios::binary);
        const std::string left((std::istreambuf_iterator<char>(a)), {}),
            right((std::istreambuf_iterator<char>(b)), {});
        EXPECT_EQ(left.size(), right.size()) << what << file;
        EXPECT_TRUE(left == right) << what << file;
      }
    }
    world().barrier("loaded");
  }
}

TEST(Checkpoint, GoingOnEqualsNeverHavingStopped) {
  const SharedFolder folder("resume");
  const parallel::Mesh mesh =
      parallel::Mesh::create(world(), Topology{.fsdp = world().size(), .ep = world().size()});
  for (const auto& [kind, name] : {std::pair(parallel::OptimizerKind::kAdamW, "adamw"),
                                   std::pair(parallel::OptimizerKind::kMuon, "muon")}) {
    harness::TrainerOptions with = options("float32");
    with.optimizer->kind = kind;
    Trainer straight(tiny(), with, mesh);
    for (uint64_t s = 0; s < 4; ++s) {
      straight.train_step({batch(s)});
      if (s == 1) straight.save(folder / name);
    }
    for (const auto& [file, bytes] :
         parallel::checkpoint_files(tiny()->config(), with.numerics, kind))
      EXPECT_EQ(fs::file_size(fs::path(folder / name) / file), bytes) << name << file;
    Trainer resumed(tiny(), with, mesh);
    resumed.load(folder / name);
    for (uint64_t s = 2; s < 4; ++s) resumed.train_step({batch(s)});
    expect_same(resumed.weights(), straight.weights(), fmt::format("{} resumed: ", name));
  }
}

TEST(Checkpoint, UnfinishedDamagedAndForeignFoldersAreRefusedAndTheOldOneStays) {
  const SharedFolder folder("refuse");
  const parallel::Mesh mesh = parallel::Mesh::create(world(), Topology{.fsdp = world().size()});
  Trainer trainer(tiny(), options("float32"), mesh);
  trainer.save(folder / "step-1");
  trainer.save(folder / "step-2");
  if (world().rank() == 0) {
    fs::remove(folder / "step-2/state.json");  // as a save that was killed before its end
  }
  world().barrier("damaged");
  EXPECT_EQ(parallel::latest_checkpoint(folder.path(), "step-"), folder / "step-1");
  const auto refused = [&](const std::string& name, std::string_view expected) {
    try {
      trainer.load(name);
      ADD_FAILURE() << name << " was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInput);
      EXPECT_NE(std::string(error.what()).find(expected), std::string::npos) << error.what();
    }
  };
  refused(folder / "step-2", "did not finish");
  EXPECT_NO_THROW(trainer.load(folder / "step-1"));
  // An existing checkpoint is never written over.
  try {
    trainer.save(folder / "step-1");
    ADD_FAILURE() << "wrote over a checkpoint";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInput) << error.what();
  }
  harness::TrainerOptions sgd = options("float32");
  sgd.optimizer->kind = parallel::OptimizerKind::kSgd;
  Trainer other(tiny(), sgd, mesh);
  try {
    other.load(folder / "step-1");
    ADD_FAILURE() << "took another optimizer's state";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("adamw"), std::string::npos) << error.what();
  }
  world().barrier("truncate");
  if (world().rank() == 0) fs::resize_file(folder / "step-1/exp_avg.safetensors", 100);
  world().barrier("truncated");
  refused(folder / "step-1", "exp_avg.safetensors has 100 bytes");
  world().barrier("refused");
}

}  // namespace
}  // namespace lockstep::tests
