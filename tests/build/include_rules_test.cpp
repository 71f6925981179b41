// The include law: which room may include which. Rooms follow the data; nothing includes what is
// downstream of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <vector>

namespace {

namespace fs = std::filesystem;
using Rooms = std::set<std::string>;

const Rooms kModel = {
    "model/base", "model/config", "model/checkpoint", "model/ops", "model/seams", "model/layers"};
const Rooms kScheme = {
    "model/base", "model/config", "model/seams", "parallel/mesh", "parallel/comm"};
const Rooms kParallel = {"parallel/comm",
                         "parallel/mesh",
                         "parallel/fsdp",
                         "parallel/ep",
                         "parallel/cp",
                         "parallel/tp",
                         "parallel/optim",
                         "parallel/plan",
                         "parallel/checkpoint"};

Rooms operator+(Rooms a, const Rooms& b) {
  a.insert(b.begin(), b.end());
  return a;
}

const Rooms kLaunch =
    kModel + kParallel +
    Rooms{"golden/store", "golden/compare", "harness/engine", "harness/trainer", "harness/result"};
const Rooms kRuns = kLaunch + Rooms{"harness/inference", "harness/launch"};

/// Room -> rooms it may include besides itself.
const std::map<std::string, Rooms>& law() {
  static const std::map<std::string, Rooms> table = {
      {"model/base", {}},
      {"model/config", {"model/base"}},
      {"model/seams", {"model/base"}},
      {"golden/store", {"model/base"}},
      {"golden/compare", {"model/base"}},
      {"model/checkpoint", {"model/base", "model/config"}},
      {"model/ops", {"model/base", "model/config"}},
      {"model/layers",
       {"model/base", "model/config", "model/checkpoint", "model/ops", "model/seams"}},
      {"parallel/comm", {"model/base"}},
      {"parallel/mesh", {"model/base", "model/config", "parallel/comm"}},
      {"parallel/fsdp", kScheme},
      {"parallel/optim", kScheme + Rooms{"parallel/fsdp"}},
      {"parallel/ep", kScheme},
      {"parallel/cp", kScheme},
      {"parallel/tp", kScheme},
      {"parallel/plan", kModel + kParallel},
      {"parallel/checkpoint", kModel + kParallel},
      {"harness/engine", {"model/base", "model/config", "model/checkpoint", "model/seams"}},
      {"harness/trainer", kModel + kParallel + Rooms{"harness/engine"}},
      {"harness/inference",
       kModel + Rooms{"parallel/comm", "parallel/mesh", "parallel/plan", "harness/engine"}},
      {"harness/sync",
       kModel + kParallel + Rooms{"harness/engine", "harness/trainer", "harness/inference"}},
      {"harness/result", {"model/base", "model/config", "golden/store", "golden/compare"}},
      {"harness/launch", kLaunch},
      {"harness/runner", kRuns + Rooms{"harness/sync"}},
      {"harness/attribute", kRuns + Rooms{"harness/runner"}},
      {"harness/cli",
       kRuns + Rooms{"harness/sync", "harness/runner", "harness/attribute", "reports/writer"}},
      {"reports/writer", {"model/base", "harness/result"}},
  };
  return table;
}

/// Third-party header prefix -> rooms that may include it.
const std::map<std::string, Rooms>& third_party() {
  static const std::map<std::string, Rooms> table = {
      {"mpi.h", {"parallel/comm"}},
      {"nccl.h", {"parallel/comm"}},
      {"hdf5.h", {"golden/store"}},
      {"nlohmann/",
       {"model/config",
        "model/checkpoint",
        "parallel/checkpoint",
        "golden/store",
        "harness/result",
        "harness/launch",
        "reports/writer",
        "harness/cli",
        "harness/runner",
        "harness/attribute"}},
      {"toml++/", {"model/config", "harness/launch", "harness/cli"}},
      {"CLI/", {"harness/cli"}},
      {"ATen/", {"model/base"}},
      {"torch/", {"model/base", "model/ops", "model/layers"}},
      {"cuda", {"parallel/comm", "model/ops"}},
  };
  return table;
}

struct Include {
  std::string file, room, target;
  int line;
  bool quoted;
};

std::vector<Include> includes() {
  std::vector<Include> found;
  static const std::regex directive(R"re(^\s*#\s*include\s*(["<])([^">]+)[">])re");
  for (const auto& [room, _] : law()) {
    const fs::path dir = fs::path(LOCKSTEP_SOURCE_DIR) / room;
    if (!fs::exists(dir)) continue;
    for (const auto& entry : fs::directory_iterator(dir)) {
      const std::string extension = entry.path().extension();
      if (extension != ".hpp" && extension != ".cpp" && extension != ".cu" && extension != ".cuh")
        continue;
      std::ifstream stream(entry.path());
      std::string text;
      for (int line = 1; std::getline(stream, text); ++line) {
        std::smatch match;
        if (std::regex_search(text, match, directive)) {
          found.push_back({room + "/" + entry.path().filename().string(),
                           room,
                           match[2],
                           line,
                           match[1] == "\""});
        }
      }
    }
  }
  return found;
}

TEST(IncludeRules, EveryRoomIncludesOnlyWhatIsUpstreamOfIt) {
  const std::vector<Include> all = includes();
  ASSERT_GT(all.size(), 100U) << "the scan found hardly any source";
  for (const Include& include : all) {
    if (!include.quoted) continue;
    const fs::path target(include.target);
    ASSERT_TRUE(fs::exists(fs::path(LOCKSTEP_SOURCE_DIR) / target))
        << include.file << ":" << include.line << " includes \"" << include.target
        << "\"; paths start at the root";
    const std::string room = target.parent_path().string();
    const bool allowed = room == include.room || law().at(include.room).contains(room);
    EXPECT_TRUE(allowed) << include.file << ":" << include.line << ": room " << include.room
                         << " may not include " << room
                         << "; move the code or, if the structure really changed, the table in "
                            "this test and docs/architecture.md";
  }
}

TEST(IncludeRules, ThirdPartyHeadersStayInTheirRooms) {
  for (const Include& include : includes()) {
    if (include.quoted) continue;
    for (const auto& [prefix, rooms] : third_party()) {
      if (!include.target.starts_with(prefix)) continue;
      EXPECT_TRUE(rooms.contains(include.room)) << include.file << ":" << include.line << ": <"
                                                << include.target << "> belongs to other rooms";
    }
  }
}

TEST(IncludeRules, DeviceFilesIncludeNoTorchHeader) {
  for (const Include& include : includes()) {
    if (!include.file.ends_with(".cu") && !include.file.ends_with(".cuh")) continue;
    EXPECT_FALSE(include.target.starts_with("torch/") || include.target.starts_with("ATen/") ||
                 include.target == "model/base/torch.hpp")
        << include.file << ":" << include.line;
  }
}

TEST(IncludeRules, EveryRoomOnDiskIsInTheTable) {
  for (const char* folder : {"model", "parallel", "harness", "golden", "reports"}) {
    if (!fs::exists(fs::path(LOCKSTEP_SOURCE_DIR) / folder)) continue;
    for (const auto& entry : fs::directory_iterator(fs::path(LOCKSTEP_SOURCE_DIR) / folder)) {
      if (!entry.is_directory()) continue;
      const auto has_source = [&] {
        for (const auto& file : fs::directory_iterator(entry.path())) {
          if (file.path().extension() == ".cpp" || file.path().extension() == ".hpp") return true;
        }
        return false;
      };
      const std::string room = std::string(folder) + "/" + entry.path().filename().string();
      if (!has_source()) continue;
      EXPECT_TRUE(law().contains(room)) << room << " has source but no row in the include law";
    }
  }
}

TEST(SourceRules, HeadersStartWithPragmaOnceAfterTheirComment) {
  for (const auto& [room, _] : law()) {
    const fs::path dir = fs::path(LOCKSTEP_SOURCE_DIR) / room;
    if (!fs::exists(dir)) continue;
    for (const auto& entry : fs::directory_iterator(dir)) {
      if (entry.path().extension() != ".hpp" && entry.path().extension() != ".cuh") continue;
      std::ifstream stream(entry.path());
      std::string line;
      while (std::getline(stream, line) && (line.starts_with("//") || line.empty())) {
      }
      EXPECT_EQ(line, "#pragma once") << entry.path();
    }
  }
}

TEST(SourceRules, NoFileIsLongerThan700Lines) {
  for (const auto& [room, _] : law()) {
    const fs::path dir = fs::path(LOCKSTEP_SOURCE_DIR) / room;
    if (!fs::exists(dir)) continue;
    for (const auto& entry : fs::directory_iterator(dir)) {
      if (!entry.is_regular_file()) continue;
      std::ifstream stream(entry.path());
      const auto lines = std::count(
          std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>(), '\n');
      EXPECT_LE(lines, 700) << entry.path() << ": split it by idea";
    }
  }
}

}  // namespace
