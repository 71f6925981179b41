// The built program in a folder of its own, for tests that meet it as users do.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "harness/launch/mpi_start.hpp"
#include "model/checkpoint/safetensors.hpp"

namespace lockstep::harness {

namespace fs = std::filesystem;
using ::testing::AnyOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

class Program : public testing::Test {
 protected:
  void SetUp() override {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = fs::path(testing::TempDir()) / (std::string("lockstep_cli_") + info->name());
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    write("docs.json", R"({"documents": [[1, 2, 3, 4, 5, 6, 7], [8], [9, 10, 11]]})");
  }
  void TearDown() override { fs::remove_all(folder_); }

  [[nodiscard]] std::string path(const std::string& name) const {
    return (folder_ / name).string();
  }
  void write(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ / name) << text;
  }

  static Outcome lockstep(const std::vector<std::string>& words) {
    std::vector<std::string> command = {(fs::path(LOCKSTEP_BINARY_DIR) / "lockstep").string()};
    command.insert(command.end(), words.begin(), words.end());
    return run_command(command);
  }
  /// A copy of the small checkpoint in which one tensor is another.
  template <typename Change>
  std::string changed_model(const std::string& tensor, const Change& change) const {
    fs::copy(kModel, folder_ / "model", fs::copy_options::recursive);
    std::map<std::string, Tensor> tensors;
    {
      const model::Safetensors file = model::Safetensors::open(kModel);
      for (const auto& [name, info] : file.tensors()) tensors[name] = file.load(name).clone();
    }
    tensors.at(tensor) = change(tensors.at(tensor));
    model::write_safetensors_file(path("model/model.safetensors"), tensors);
    return path("model");
  }
  /// logits of the small checkpoint, with more words behind.
  Outcome logits(const std::vector<std::string>& more,
                 const std::string& docs = "docs.json") const {
    std::vector<std::string> words = {
        "logits", "--model", kModel, "--docs", path(docs), "--out", path("out.safetensors")};
    words.insert(words.end(), more.begin(), more.end());
    return lockstep(words);
  }
  /// The command ends with this code, says all of these in one block, and leaves no output.
  void expect_refused(const Outcome& outcome,
                      int code,
                      const std::vector<std::string>& parts) const {
    EXPECT_EQ(outcome.exit_code, code) << outcome.errors;
    for (const std::string& part : parts) EXPECT_THAT(outcome.errors, HasSubstr(part));
    for (const auto& entry : fs::directory_iterator(folder_)) {
      EXPECT_THAT(entry.path().filename().string(), Not(HasSubstr("out")))
          << "left behind by a failure";
    }
  }

  const std::string kModel = std::string(LOCKSTEP_SOURCE_DIR) + "/golden/data/hf-tiny/released";
  fs::path folder_;
};

}  // namespace lockstep::harness
