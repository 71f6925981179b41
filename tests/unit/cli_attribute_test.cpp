// `lockstep attribute` as users meet it.
#include <nlohmann/json.hpp>

#include "tests/unit/cli_program_support.hpp"

namespace lockstep::harness {
namespace {

class AttributeProgram : public Program {
 protected:
  void SetUp() override {
    Program::SetUp();
    write("pair.toml", R"(
[model]
preset = "tiny"
[data]
documents = [20, 1, 9]
[run.trainer]
policy = "fsdp-bf16"
[run.planted]
policy = "fsdp-bf16"
numerics = { D12 = "unrounded" }
[run.cp2]
policy = "fsdp-bf16"
numerics = { D12 = "unrounded" }
topology = { cp = 2 }
[run.cp3]
policy = "fsdp-bf16"
topology = { cp = 3 }
[run.trained]
policy = "fsdp-bf16"
topology = { fsdp = 3 }
train_steps = 1
[run.served]
engine = "inference"
policy = "vllm-bf16"
weights_from = "trained"
topology = { tp = 2 }
[run.served-fp32-head]
engine = "inference"
policy = "vllm-bf16"
numerics = { D59 = "fp32" }
weights_from = "trained"
[[compare]]
left = "planted"
right = "trainer"
what = "logprobs"
metric = "mismatch_kl"
)");
  }
  Outcome attribute(std::vector<std::string> more) {
    std::vector<std::string> words = {
        "attribute", path("pair.toml"), "--out", path("result"), "--seeds", "2"};
    words.insert(words.end(), more.begin(), more.end());
    return lockstep(words);
  }
};

TEST_F(AttributeProgram, BlamesThePlantedSwitchAndWritesAReport) {
  const Outcome outcome = attribute({"--json"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.errors;
  const auto json = nlohmann::json::parse(outcome.output);
  EXPECT_EQ(json["from"], "trainer");
  EXPECT_EQ(json["to"], "planted");
  ASSERT_EQ(json["switches"].size(), 1U);
  EXPECT_EQ(json["switches"][0]["id"], "D12");
  EXPECT_EQ(json["switches"][0]["cost"]["values"].size(), 2U);
  EXPECT_EQ(json["same"]["max_logprob"]["mean"], 0.0);
  EXPECT_GT(json["whole"]["max_logprob"]["mean"].get<double>(), 0.0);
  EXPECT_EQ(json["sum_of_parts"]["mean"], json["whole"]["mismatch_kl"]["mean"]);
  EXPECT_GT(json["switches"][0]["layers_rel_l2"]["layers.0"].get<double>(), 0.0);
  EXPECT_TRUE(fs::exists(path("result/report.html")));
}

TEST_F(AttributeProgram, ASideOnSeveralRanksCostsTheSame) {
  const Outcome one = attribute({"--json"}), two = attribute({"--to", "cp2", "--json"});
  ASSERT_EQ(two.exit_code, 0) << two.errors;
  const auto a = nlohmann::json::parse(one.output), b = nlohmann::json::parse(two.output);
  EXPECT_EQ(b["switches"][0]["id"], "D12");
  EXPECT_NEAR(a["whole"]["max_logprob"]["mean"].get<double>(),
              b["whole"]["max_logprob"]["mean"].get<double>(),
              0.1);
}

TEST_F(AttributeProgram, SidesMayDifferInRanks) {
  const Outcome one = attribute({"--json"}),
                two = attribute({"--from", "cp3", "--to", "cp2", "--json"});
  ASSERT_EQ(two.exit_code, 0) << two.errors;
  const auto a = nlohmann::json::parse(one.output), b = nlohmann::json::parse(two.output);
  ASSERT_EQ(b["switches"].size(), 1U);
  EXPECT_EQ(b["switches"][0]["id"], "D12");
  EXPECT_NEAR(a["whole"]["max_logprob"]["mean"].get<double>(),
              b["whole"]["max_logprob"]["mean"].get<double>(),
              0.1);
}

TEST_F(AttributeProgram, SidesMayServeTheWeightsOfATrainerOnMoreRanks) {
  const Outcome outcome = attribute({"--from", "served", "--to", "served-fp32-head", "--json"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.errors;
  const auto json = nlohmann::json::parse(outcome.output);
  ASSERT_EQ(json["switches"].size(), 1U);
  EXPECT_EQ(json["switches"][0]["id"], "D59");
  EXPECT_GT(json["switches"][0]["alone"]["max_logprob"]["mean"].get<double>(), 0.0);
}

TEST_F(AttributeProgram, FindsTheSwitchOfADump) {
  ASSERT_EQ(lockstep({"run", path("pair.toml"), "--out", path("made")}).exit_code, 0);
  const Outcome outcome =
      attribute({"--from", "trainer", "--dump", path("made/runs/pair/planted/rank0.safetensors")});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.errors;
  EXPECT_THAT(outcome.output, HasSubstr("D12 norm_statistic = unrounded: 0 nat, the same bits"));
}

TEST_F(AttributeProgram, BadInputIsOneErrorThatSaysWhatToChange) {
  expect_refused(
      attribute({"--from", "trainr"}), 2, {"--from trainr", "trainer, planted", "vllm-bf16"});
  expect_refused(attribute({"--from", "planted", "--to", "planted"}),
                 2,
                 {"same value for every numerics switch", "--to"});
  expect_refused(attribute({"--dump", path("docs.json")}), 2, {"docs.json"});
  expect_refused(attribute({"--seeds", "0"}), 2, {"--seeds"});
  write("alone.toml",
        "[model]\npreset = \"tiny\"\n[data]\ndocuments = [3]\n[run.a]\npolicy = \"float32\"\n");
  expect_refused(lockstep({"attribute", path("alone.toml")}), 2, {"--from", "--to", "alone.toml"});
}

}  // namespace
}  // namespace lockstep::harness
