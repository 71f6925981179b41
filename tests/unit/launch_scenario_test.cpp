#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "harness/launch/scenario.hpp"
#include "harness/launch/schema.hpp"
#include "model/base/error.hpp"

namespace lockstep::harness {
namespace {

using ::testing::HasSubstr;

const std::string kGood = R"(name = "good"
tags = ["cpu"]

[model]
preset = "tiny"

[data]
documents = [300, 1, 0, 64]
seed = 3

[run.cp1]
policy = "float64"
grads = true

[run.cp2]
policy = "float64"
topology = { cp = 2 }
grads = true
trace = "layers.*"

[[compare]]
left = "cp2"
right = "cp1"
what = "grads"
metric = "rel_l2"
limit = 1e-11
)";

ScenarioSet parse(const std::string& text, const std::vector<std::string>& sets = {}) {
  return parse_scenario(text, "dir/good.toml", sets);
}

/// The good scenario with one line replaced.
std::string with(const std::string& from, const std::string& to) {
  std::string text = kGood;
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

void expect_error(const std::string& text,
                  ErrorKind kind,
                  const std::vector<std::string>& parts,
                  const std::vector<std::string>& sets = {}) {
  try {
    parse(text, sets);
    ADD_FAILURE() << "accepted:\n" << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    for (const std::string& part : parts) EXPECT_THAT(error.what(), HasSubstr(part));
  }
}

TEST(Scenario, RunsThatReplayComeAfterTheirSourceWhichKeepsItsChoice) {
  const std::string text = with("[run.cp2]", "[run.aa]\nreplay = \"cp2\"\n\n[run.cp2]");
  const Scenario s = parse(text).points[0].scenario;
  ASSERT_EQ(s.runs.size(), 3U);
  EXPECT_EQ(s.runs.back().name, "aa");
  EXPECT_THAT(s.runs.back().numerics,
              ::testing::Contains(std::pair<std::string, std::string>("D68", "replay")));
  EXPECT_EQ(s.find_run("cp2")->trace, "layers.*,*.mlp.gate.experts");
  EXPECT_EQ(s.find_run("cp1")->trace, "");
  expect_error(with("[run.cp2]", "[run.aa]\nreplay = \"cp3\"\n\n[run.cp2]"),
               ErrorKind::kInput,
               {"cp3", "no other run", "did you mean"});
  expect_error(with("[run.cp2]", "[run.aa]\nreplay = \"aa\"\n\n[run.cp2]"),
               ErrorKind::kInput,
               {"no other run"});
  expect_error(
      with("[run.cp2]", "[run.aa]\nreplay = \"bb\"\n\n[run.bb]\nreplay = \"cp2\"\n\n[run.cp2]"),
      ErrorKind::kInput,
      {"name cp2"});
  expect_error(
      with("[run.cp2]",
           "[run.aa]\nengine = \"inference\"\npolicy = \"float64\"\nreplay = \"cp2\"\n\n[run.cp2]"),
      ErrorKind::kConfig,
      {"replay belongs to the trainer"});
}

TEST(Scenario, ARunThatServesTheWeightsOfATrainerRunNeedsTheRanksOfBoth) {
  const auto serving = [](const std::string& keys) {
    return with("[run.cp2]", "[run.aa]\nengine = \"inference\"\n" + keys + "\n\n[run.cp2]");
  };
  const Scenario s = parse(serving("weights_from = \"cp2\"")).points[0].scenario;
  const RunSpec& run = *s.find_run("aa");
  ASSERT_EQ(run.trainer.size(), 1U);
  EXPECT_EQ(run.trainer[0].name, "cp2");
  EXPECT_EQ(run.num_ranks(), 2);
  EXPECT_EQ(parse(serving("weights_from = \"cp2\"\ntopology = { tp = 4 }"))
                .points[0]
                .scenario.find_run("aa")
                ->num_ranks(),
            4);
  EXPECT_EQ(parse(with("grads = true", "train_steps = 3\ngrads = true"))
                .points[0]
                .scenario.find_run("cp1")
                ->train_steps,
            3);
  expect_error(serving("weights_from = \"cp3\""),
               ErrorKind::kInput,
               {"no trainer run", "cp1, cp2", "did you mean"});
  expect_error(serving("weights_from = \"aa\""), ErrorKind::kInput, {"no trainer run"});
  expect_error(serving("train_steps = 1"), ErrorKind::kConfig, {"belongs to the trainer"});
  expect_error(with("[run.cp2]", "[run.aa]\nweights_from = \"cp2\"\n\n[run.cp2]"),
               ErrorKind::kConfig,
               {"belongs to the inference engine"});
}

TEST(Scenario, GoodFileIsReadInFull) {
  const ScenarioSet set = parse(kGood);
  ASSERT_EQ(set.points.size(), 1U);
  const Scenario& s = set.points[0].scenario;
  EXPECT_EQ(s.name, "good");
  EXPECT_EQ(s.model.preset, "tiny");
  EXPECT_EQ(s.data.documents, (std::vector<int64_t>{300, 1, 0, 64}));
  EXPECT_EQ(s.data.seed, 3U);
  ASSERT_EQ(s.runs.size(), 2U);
  EXPECT_EQ(s.runs[0].name, "cp1");
  EXPECT_EQ(s.runs[1].topology.cp, 2);
  EXPECT_EQ(s.runs[1].trace, "layers.*");
  EXPECT_TRUE(s.runs[0].grads);
  ASSERT_EQ(s.compares.size(), 1U);
  EXPECT_EQ(s.compares[0].what, "grads");
  EXPECT_EQ(s.compares[0].limit, 1e-11);
}

TEST(Scenario, TextThatIsNotTomlNamesTheLine) {
  expect_error("name = \"x\"\n[model\n", ErrorKind::kInput, {"dir/good.toml:2", "not valid TOML"});
}

TEST(Scenario, UnknownKeysNameLineAndTheKeyThatWasMeant) {
  expect_error(with("policy = \"float64\"", "polcy = \"float64\""),
               ErrorKind::kInput,
               {"dir/good.toml:12", "run.cp1.polcy", "did you mean 'policy'?"});
  expect_error("descripton = \"?\"\n" + kGood,
               ErrorKind::kInput,
               {"dir/good.toml:1", "did you mean 'description'?"});
  expect_error(with("preset", "presets"), ErrorKind::kInput, {"dir/good.toml:5", "'preset'"});
  expect_error(with("seed = 3", "seeed = 3"), ErrorKind::kInput, {"good.toml:9", "'seed'"});
  expect_error(with("limit =", "limt ="), ErrorKind::kInput, {"good.toml:26", "'limit'"});
}

TEST(Scenario, WrongTypesSayWhatWasExpectedAndWhatCame) {
  expect_error(with("documents = [300, 1, 0, 64]", "documents = 300"),
               ErrorKind::kInput,
               {"good.toml:8", "expected an array of whole numbers, got a whole number"});
  expect_error(with("documents = [300, 1, 0, 64]", "documents = [3, \"x\"]"),
               ErrorKind::kInput,
               {"expected an array of whole numbers"});
  expect_error(with("documents = [300", "documents = [-1"),
               ErrorKind::kInput,
               {"entry 0 is -1, must be 0 or more"});
  expect_error(
      with("grads = true", "grads = 1"), ErrorKind::kInput, {"good.toml:13", "true or false"});
  expect_error(with("limit = 1e-11", "limit = \"loose\""), ErrorKind::kInput, {"\"golden\""});
  expect_error(with("[run.cp1]", "[[run.cp1]]"), ErrorKind::kInput, {"expected a table"});
  expect_error(with("[[compare]]", "[compare]"), ErrorKind::kInput, {"write [[compare]]"});
}

TEST(Scenario, ImpossibleTopologiesAreMeshErrors) {
  expect_error(
      with("{ cp = 2 }", "{ cp = 0 }"), ErrorKind::kMesh, {"good.toml:17", "cp = 0", "1 to "});
  expect_error(with("{ cp = 2 }", "{ cp = 2, ep = 3 }"), ErrorKind::kMesh, {"ep = 3"});
  expect_error(with("{ cp = 2 }", "{ pp = 2 }"), ErrorKind::kMesh, {"unknown axis 'pp'"});
}

TEST(Scenario, UnknownPoliciesSwitchesAndMetricsListWhatThereIs) {
  expect_error(with("\"float64\"", "\"flaot64\""),
               ErrorKind::kConfig,
               {"good.toml:12", "hf-bf16", "did you mean 'float64'?"});
  expect_error(with("grads = true", "numerics = { D99 = \"x\" }"), ErrorKind::kConfig, {"D99"});
  expect_error(with("grads = true", "numerics = { D01 = \"x\" }"),
               ErrorKind::kConfig,
               {"good.toml:13", "D01", "allowed"});
  expect_error(with("\"rel_l2\"", "\"rel_l3\""),
               ErrorKind::kInput,
               {"good.toml:25", "did you mean 'rel_l2'?"});
  expect_error(with("\"rel_l2\"", "\"kl\""), ErrorKind::kInput, {"cannot measure grads"});
}

TEST(Scenario, ComparesMustNameRunsThatComputeWhatIsCompared) {
  expect_error(with("left = \"cp2\"", "left = \"cp3\""),
               ErrorKind::kInput,
               {"good.toml:21", "no such run", "cp1, cp2", "did you mean"});
  expect_error(with("grads = true", "grads = false"), ErrorKind::kInput, {"set grads = true"});
  expect_error(with("what = \"grads\"", "what = \"trace:layers.*\""),
               ErrorKind::kInput,
               {"[run.cp1] keeps no activations", "trace = \"layers.*\""});
  expect_error(with("what = \"grads\"", "what = \"grad\""), ErrorKind::kInput, {"'grads'"});
  expect_error(with("right = \"cp1\"\n", ""), ErrorKind::kInput, {"has no 'right'"});
  expect_error(with("right = \"cp1\"", "right = \"golden:tiny\""),
               ErrorKind::kInput,
               {"golden:CASE/REFERENCE"});
  expect_error(with("limit = 1e-11", "limit = \"golden\""),
               ErrorKind::kInput,
               {"needs a stored reference on one side"});
}

TEST(Scenario, ModelAndDataHaveExactlyOneSource) {
  expect_error(with("preset = \"tiny\"", ""), ErrorKind::kInput, {"good.toml:4", "exactly one"});
  expect_error(with("preset = \"tiny\"", "preset = \"tiny\"\ngolden = \"tiny\""),
               ErrorKind::kInput,
               {"exactly one"});
  expect_error(with("documents = [300, 1, 0, 64]", ""), ErrorKind::kInput, {"no tokens"});
  expect_error(with("preset = \"tiny\"", "golden = \"tiny\""), ErrorKind::kInput, {"leave [data]"});
  expect_error(with("preset = \"tiny\"", "checkpoint = \"/nowhere/at/all\""),
               ErrorKind::kInput,
               {"good.toml:5", "no such path"});
}

TEST(Scenario, FeaturesThisBuildLacksAreRefusedByName) {
  expect_error(with("grads = true", "grads = true\nengine = \"inference\""),
               ErrorKind::kConfig,
               {"good.toml:", "grads belongs to the trainer"});
  expect_error(with("grads = true", "device = \"gpu\""), ErrorKind::kConfig, {"gpu", "cuda"});
  expect_error(with("grads = true", "decode = 4"), ErrorKind::kConfig, {"decode"});
  expect_error(kGood + "[[fault]]\nkind = \"stall\"\n", ErrorKind::kConfig, {"fault"});
}

TEST(Scenario, SetReplacesValuesAndIsNamedInErrors) {
  const ScenarioSet set = parse(kGood,
                                {"run.*.policy=float32",
                                 "data.documents=[5, 6]",
                                 "compare.0.limit=0.5",
                                 "run.cp2.topology.cp=4"});
  const Scenario& s = set.points[0].scenario;
  EXPECT_EQ(s.runs[0].policy, "float32");
  EXPECT_EQ(s.runs[1].policy, "float32");
  EXPECT_EQ(s.runs[1].topology.cp, 4);
  EXPECT_EQ(s.data.documents, (std::vector<int64_t>{5, 6}));
  EXPECT_EQ(s.compares[0].limit, 0.5);
  expect_error(kGood, ErrorKind::kConfig, {"--set run.cp1.policy=no"}, {"run.cp1.policy=no"});
  expect_error(kGood, ErrorKind::kInput, {"no run 'cp9'"}, {"run.cp9.policy=float64"});
  expect_error(kGood, ErrorKind::kInput, {"key=value"}, {"policy"});
  expect_error(kGood, ErrorKind::kInput, {"position"}, {"compare.7.limit=1"});
  EXPECT_EQ(parse(kGood, {"model.preset=mini"}).points[0].scenario.model.preset, "mini");
}

TEST(Scenario, SweepRunsEveryCombinationWithTheLastKeyFastest) {
  const ScenarioSet set = parse(kGood + R"(
[sweep]
"data.documents" = [[64], [100, 28]]
"run.*.policy" = ["float64", "float32"]
)");
  ASSERT_EQ(set.points.size(), 4U);
  EXPECT_EQ(set.points[0].label(), "documents=[64] policy=float64");
  EXPECT_EQ(set.points[1].label(), "documents=[64] policy=float32");
  EXPECT_EQ(set.points[3].scenario.data.documents, (std::vector<int64_t>{100, 28}));
  EXPECT_EQ(set.points[3].values[0].x, 128);
  EXPECT_EQ(set.points[1].scenario.runs[1].policy, "float32");
  expect_error(kGood + "[sweep]\n\"run.cp1.policy\" = \"x\"\n", ErrorKind::kInput, {"array"});
  expect_error(kGood + "[sweep]\npolicy = [\"x\"]\n", ErrorKind::kInput, {"run.*.policy"});
  expect_error(kGood + "[sweep]\n\"run.*.policy\" = [\"x\"]\n",
               ErrorKind::kConfig,
               {"[sweep] at line 28", "unknown policy"});
}

TEST(Scenario, GoldenThisMeansTheCaseOfTheModel) {
  const std::string text = R"([model]
golden = "tiny"
[run.a]
policy = "float32"
[[compare]]
left = "a"
right = "golden:this/f64"
limit = "golden"
)";
  const Scenario s = parse(text).points[0].scenario;
  const auto ref = parse_golden_ref(s.compares[0].right, s.model);
  ASSERT_TRUE(ref.has_value());
  EXPECT_EQ(ref->golden_case, "tiny");
  EXPECT_EQ(ref->reference, "f64");
  EXPECT_FALSE(parse_golden_ref("cp1", s.model).has_value());
}

TEST(Schema, EveryKeyIsInEveryPublishedForm) {
  for (const KeyInfo& key : scenario_keys()) {
    EXPECT_THAT(schema_text(), HasSubstr(std::string(key.doc)));
    EXPECT_THAT(schema_markdown(), HasSubstr("`" + std::string(key.name) + "`"));
    EXPECT_FALSE(key.doc.empty()) << key.name;
  }
}

TEST(Schema, TheDocsPageHoldsTheTableAsItIs) {
  std::ifstream in(std::string(LOCKSTEP_SOURCE_DIR) + "/docs/scenarios.md");
  std::ostringstream text;
  text << in.rdbuf();
  EXPECT_THAT(text.str(), HasSubstr(schema_markdown()))
      << "replace the part after '## All keys' by `lockstep list schema --markdown`";
}

TEST(Schema, EveryScenarioOfTheProjectIsReadAndTagged) {
  int64_t found = 0;
  for (const auto& file : find_scenarios({std::string(LOCKSTEP_SOURCE_DIR) + "/scenarios"})) {
    const ScenarioSet set = load_scenario(file);
    EXPECT_FALSE(set.description.empty()) << file;
    EXPECT_FALSE(set.tags.empty()) << file;
    EXPECT_EQ(set.name, file.stem()) << file;
    ++found;
  }
  EXPECT_GE(found, 5);
}

TEST(Schema, NearestFindsTypingErrorsAndNothingFarAway) {
  EXPECT_EQ(did_you_mean("polcy", {"policy", "engine"}), "; did you mean 'policy'?");
  EXPECT_EQ(did_you_mean("zzzzzz", {"policy", "engine"}), "");
}

}  // namespace
}  // namespace lockstep::harness
