// A dump that transformers made with docs/examples/dump_from_pytorch.py, held against ours.
#include "tests/unit/cli_program_support.hpp"

namespace lockstep::harness {
namespace {

std::string stored(const std::string& name) {
  return (fs::path(LOCKSTEP_SOURCE_DIR) / "tests" / "data" / name).string();
}

class TorchDump : public Program {
 protected:
  void SetUp() override {
    Program::SetUp();
    write("map.toml", "\"model.language_model.*\" = \"{}\"\n");
  }
  Outcome dump(const std::string& model) {
    return lockstep({"dump",
                     "--model",
                     model,
                     "--docs",
                     stored("torch_dump_docs.json"),
                     "--modules",
                     "*",
                     "--out",
                     path("ours.safetensors")});
  }
  Outcome compare() {
    return lockstep({"compare",
                     stored("torch_dump.safetensors"),
                     path("ours.safetensors"),
                     "--module-map",
                     path("map.toml"),
                     "--limit",
                     "1e-5"});
  }
};

TEST_F(TorchDump, AgreesModuleByModule) {
  ASSERT_EQ(dump(kModel).exit_code, 0);
  const Outcome outcome = compare();
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output << outcome.errors;
  EXPECT_THAT(outcome.output, HasSubstr("23 of 23 tensors pass"));
}

TEST_F(TorchDump, AWeightThatDiffersIsFoundInItsLayer) {
  const std::string model =
      changed_model("model.language_model.layers.2.post_attention_layernorm.weight",
                    [](const Tensor& weight) { return weight.mul(1.01).contiguous(); });
  ASSERT_EQ(dump(model).exit_code, 0);
  const Outcome outcome = compare();
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.output,
              HasSubstr("first over its limit in model order: "
                        "model.language_model.layers.2.post_attention_layernorm"));
}

TEST_F(TorchDump, LogprobsAgreeToTheMismatchKlOfRoundings) {
  const Outcome made = lockstep({"logits",
                                 "--model",
                                 kModel,
                                 "--docs",
                                 stored("torch_dump_docs.json"),
                                 "--out",
                                 path("ours.safetensors")});
  ASSERT_EQ(made.exit_code, 0) << made.errors;
  const auto judged = [&](const std::string& only, const std::string& limit) {
    return lockstep({"compare",
                     path("ours.safetensors"),
                     stored("torch_dump.safetensors"),
                     "--only",
                     only,
                     "--metric",
                     "mismatch_kl",
                     "--limit",
                     limit});
  };
  EXPECT_EQ(judged("logprobs", "1e-10").exit_code, 0);
  EXPECT_EQ(judged("logprobs", "0").exit_code, 1);
  const Outcome other = judged("logits", "1");
  EXPECT_EQ(other.exit_code, 1);
  EXPECT_THAT(other.output, HasSubstr("--only logprobs"));
}

}  // namespace
}  // namespace lockstep::harness
