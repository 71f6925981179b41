#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "harness/launch/module_map.hpp"
#include "model/base/error.hpp"

namespace lockstep::harness {
namespace {

using ::testing::HasSubstr;

TEST(ModuleMap, StarsFillPlacesInOrderAndTheFirstRowCounts) {
  ModuleMap map;
  map.add("model.layers.*.self_attn.o_proj", "layers.{}.mixer.out");
  map.add("model.layers.*.mlp.experts.*.down", "layers.{}.expert{}.w2");
  map.add("model.*", "other.{}");
  EXPECT_EQ(map.translate("model.layers.12.self_attn.o_proj"), "layers.12.mixer.out");
  EXPECT_EQ(map.translate("model.layers.3.mlp.experts.7.down"), "layers.3.expert7.w2");
  EXPECT_EQ(map.translate("model.norm"), "other.norm");
  EXPECT_EQ(map.translate("lm_head"), std::nullopt);
}

TEST(ModuleMap, AnEmptyMapKeepsNames) { EXPECT_EQ(ModuleMap().translate("a.b"), "a.b"); }

TEST(ModuleMap, StarsMatchNothingTooAndTheEndMustFit) {
  EXPECT_EQ(match_pattern("a*", "a"), std::vector<std::string>{""});
  EXPECT_EQ(match_pattern("*.b.*", "x.b.y.b.z"), (std::vector<std::string>{"x", "y.b.z"}));
  EXPECT_FALSE(match_pattern("a.*.c", "a.b.d").has_value());
  EXPECT_FALSE(match_pattern("a", "ab").has_value());
}

TEST(ModuleMap, MistakesInTheFileNameItsLine) {
  const auto path = std::filesystem::path(testing::TempDir()) / "lockstep_map_test.toml";
  const auto expect = [&](const std::string& text, const std::string& part) {
    std::ofstream(path) << text;
    try {
      ModuleMap::load(path);
      ADD_FAILURE() << "accepted " << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInput);
      EXPECT_THAT(error.what(), HasSubstr(part));
    }
  };
  expect("\n\"a.*\" = \"b.{}.{}\"\n", ":2");
  expect("\"a\" = 3\n", "expected a name pattern");
  expect("\"a\" = \n", ":1");
  expect("", "no row");
  std::ofstream(path) << "[\"model.layers.*\"]\nnorm = \"n{}\"\n";
  EXPECT_EQ(ModuleMap::load(path).translate("model.layers.4.norm"), "n4");
}

}  // namespace
}  // namespace lockstep::harness
