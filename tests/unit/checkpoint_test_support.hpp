// Checkpoint folders to break, for tests of loading and conversion.
#pragma once

#include <gmock/gmock.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>

#include "model/base/same_bytes.hpp"
#include "model/checkpoint/convert.hpp"
#include "model/checkpoint/safetensors.hpp"
#include "model/config/json_text.hpp"

namespace lockstep::model::test {

inline const std::string kHfTiny = LOCKSTEP_SOURCE_DIR "/golden/data/hf-tiny";

/// A temporary folder, removed at the end.
class Folder {
 public:
  Folder() {
    std::string pattern =
        (std::filesystem::temp_directory_path() / "lockstep-checkpoint-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) fail(ErrorKind::kInternal, "no temporary folder");
    path_ = pattern;
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  [[nodiscard]] std::string operator/(const std::string& name) const {
    return (path_ / name).string();
  }
  [[nodiscard]] std::string path() const { return path_.string(); }
  [[nodiscard]] std::vector<std::string> listing() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
      names.push_back(entry.path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }

 private:
  std::filesystem::path path_;
};

using Tensors = std::map<std::string, Tensor>;

/// Every tensor of a folder, copied.
inline Tensors read_all(const std::string& folder) {
  const Safetensors files = Safetensors::open(folder);
  Tensors tensors;
  for (const auto& [name, info] : files.tensors()) tensors[name] = files.load(name).clone();
  return tensors;
}

/// A checkpoint folder from a config file and tensors.
inline void write_checkpoint(const std::string& folder,
                             const std::string& config,
                             const Tensors& tensors) {
  std::filesystem::create_directories(folder);
  std::ofstream(folder + "/config.json") << config;
  write_safetensors_file(folder + "/model.safetensors", tensors);
}

/// Both sources have the same parameters with the same bytes.
inline void expect_same_weights(const WeightSource& a, const WeightSource& b) {
  ASSERT_EQ(a.names(), b.names());
  for (const std::string& name : a.names()) {
    EXPECT_TRUE(same_bytes(a.load(name), b.load(name))) << name;
  }
}

template <typename F>
std::string refusal(F&& f, ErrorKind kind = ErrorKind::kInput) {
  try {
    f();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was refused";
  return {};
}

}  // namespace lockstep::model::test
