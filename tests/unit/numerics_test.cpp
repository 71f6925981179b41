// The switch table, the policies made from it, and the documentation that must equal it.
#include "model/config/numerics.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <functional>
#include <set>
#include <sstream>

#include "model/config/numerics_markdown.hpp"
#include "model/config/topology.hpp"
#include "model/layers/parameter_policy.hpp"

namespace lockstep::tests {
namespace {

using model::kSwitches;
using model::Numerics;
using model::Switch;

TEST(Numerics, TableHasSeventyTwoRowsWithUniqueNamesAndValidValues) {
  ASSERT_EQ(kSwitches.size(), 72U);
  std::set<std::string_view> names;
  for (size_t i = 0; i < kSwitches.size(); ++i) {
    const model::SwitchInfo& s = kSwitches[i];
    EXPECT_EQ(s.id, fmt::format("D{:02}", i + 1));
    EXPECT_TRUE(names.insert(s.name).second) << s.name;
    EXPECT_GE(s.num_values(), 2U) << s.id;
    for (uint8_t v : {s.plain, s.hf, s.trainer, s.engine}) EXPECT_LT(v, s.num_values()) << s.id;
    EXPECT_FALSE(s.doc.empty()) << s.id;
  }
}

TEST(Numerics, IslandsDifferFromTheFirstTrainerInThreeSwitches) {
  const auto first = Numerics::policy("fsdp-bf16"), islands = Numerics::policy("fsdp-fp32-islands");
  EXPECT_EQ(first.differences(islands),
            (std::vector<Switch>{Switch::kHcFn, Switch::kHcBaseScale, Switch::kKdaDecayParams}));
  EXPECT_EQ(islands.name(), "fsdp-fp32-islands");
}

TEST(Numerics, SetTakesIdOrNameAndMarksTheName) {
  Numerics num = Numerics::policy("fsdp-bf16");
  num.set("D09", "3");
  EXPECT_TRUE(num.is<Switch::kHcMixRoundings>("3"));
  EXPECT_EQ(num.name(), "fsdp-bf16+D09=3");
  num.set("hc_mix_roundings", "1");
  EXPECT_TRUE(num.is<Switch::kHcMixRoundings>("1"));
}

void expect_config_error(const std::function<void()>& call, std::string_view part) {
  try {
    call();
    ADD_FAILURE() << "no error that names " << part;
  } catch (const Error& error) {
    EXPECT_EQ(exit_code(error.kind()), 2);
    EXPECT_NE(std::string_view(error.what()).find(part), std::string_view::npos) << error.what();
  }
}

TEST(Numerics, UnknownNamesAreErrorsThatListWhatExists) {
  expect_config_error([] { Numerics::policy("bf16"); }, "fsdp-fp32-islands");
  expect_config_error([] { Numerics::policy("float32").set("D73", "x"); }, "D72");
  expect_config_error([] { Numerics::policy("float32").set("D09", "2"); }, "3, 1");
}

TEST(Numerics, WidthsDecideDtypes) {
  EXPECT_EQ(Numerics::policy("float64").acc(), at::kDouble);
  EXPECT_EQ(Numerics::policy("float32").act(), at::kFloat);
  EXPECT_EQ(Numerics::policy("hf-bf16").act(), at::kBFloat16);
  EXPECT_EQ(Numerics::policy("hf-bf16").acc(), at::kFloat);
  EXPECT_FALSE(Numerics::policy("float32").rounds<Switch::kHcFn>("bf16"));
}

TEST(ParameterPolicy, KeepsWhatEachProgramKeepsInFloat32) {
  const auto hf = Numerics::policy("hf-bf16"), fsdp = Numerics::policy("fsdp-bf16"),
             islands = Numerics::policy("fsdp-fp32-islands");
  struct Row {
    const char* name;
    bool hf, fsdp, islands;  // float32?
  };
  for (const Row& row : {Row{"layers.0.attn_hc.fn", false, false, true},
                         Row{"layers.0.ffn_hc.base", true, false, true},
                         Row{"layers.0.attn_hc.scale", true, false, true},
                         Row{"layers.0.self_attn.A_log", true, false, true},
                         Row{"layers.0.self_attn.dt_bias", true, false, true},
                         Row{"layers.0.self_attn.conv1d.weight", true, false, false},
                         Row{"layers.1.mlp.gate.weight", true, true, true},
                         Row{"layers.1.mlp.gate.e_score_correction_bias", true, true, true},
                         Row{"layers.0.mlp.gate_proj.weight", false, false, false},
                         Row{"embed_tokens.weight", false, false, false},
                         Row{"layers.3.self_attn.indexer.k_norm.weight", false, false, false}}) {
    EXPECT_EQ(model::parameter_dtype(row.name, hf), row.hf ? at::kFloat : at::kBFloat16)
        << row.name;
    EXPECT_EQ(model::parameter_dtype(row.name, fsdp), row.fsdp ? at::kFloat : at::kBFloat16)
        << row.name;
    EXPECT_EQ(model::parameter_dtype(row.name, islands), row.islands ? at::kFloat : at::kBFloat16)
        << row.name;
    EXPECT_EQ(model::parameter_dtype(row.name, Numerics::policy("float64")), at::kDouble);
  }
}

TEST(Docs, NumericsPageHoldsTheTableTheCodeHas) {
  const std::string path = std::string(LOCKSTEP_SOURCE_DIR) + "/docs/numerics.md";
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  const std::string page = text.str(), begin = "<!-- switches:begin -->\n",
                    end = "<!-- switches:end -->";
  const size_t from = page.find(begin), to = page.find(end);
  ASSERT_NE(from, std::string::npos);
  ASSERT_NE(to, std::string::npos);
  const std::string current = page.substr(from + begin.size(), to - from - begin.size());
  if (std::getenv("LOCKSTEP_UPDATE_DOCS") != nullptr) {
    std::ofstream(path) << page.substr(0, from + begin.size()) << model::switches_markdown()
                        << page.substr(to);
  } else {
    EXPECT_EQ(current, model::switches_markdown())
        << "rerun with LOCKSTEP_UPDATE_DOCS=1 and look at the difference";
  }
}

TEST(Topology, ParsesPrintsAndRefuses) {
  const model::Topology t = model::parse_topology("cp=4,fsdp=2,ep=8");
  EXPECT_EQ(t.num_ranks(), 8);
  EXPECT_EQ(model::to_string(t), "fsdp=2,cp=4,ep=8");
  EXPECT_EQ(model::to_string({}), "1 rank");
  expect_config_error([] { model::parse_topology("cp=0"); }, "cp = 0");
  expect_config_error([] { model::parse_topology("pp=2"); }, "pp=2");
  expect_config_error([] { model::parse_topology("cp=two"); }, "two");
  expect_config_error([] { model::parse_topology("cp=2,cp=3"); }, "twice");
  expect_config_error([] { model::parse_topology("cp=3,ep=2"); }, "does not divide");
}

}  // namespace
}  // namespace lockstep::tests
