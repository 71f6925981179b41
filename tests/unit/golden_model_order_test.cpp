// Names in the order of the model: what "first" means in every comparison.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "golden/compare/model_order.hpp"
#include "harness/runner/compare_runs.hpp"
#include "harness/trainer/trainer.hpp"
#include "model/checkpoint/parameters.hpp"
#include "tests/support/tiny_model.hpp"

namespace lockstep::golden {
namespace {

using Names = std::vector<std::string>;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

TEST(ModelOrder, LayersCountAsNumbersAndModulesStandAsTheyAreComputed) {
  const Names sorted = {"cu_seqlens",
                        "model.embed_tokens.weight",
                        "trace/layers.0.input_layernorm",
                        "trace/layers.0.self_attn.o_norm",
                        "trace/layers.0.self_attn",
                        "trace/layers.0.post_attention_layernorm",
                        "trace/layers.0.mlp.gate.experts",
                        "trace/layers.0.mlp",
                        "trace/layers.0",
                        "layers.2",
                        "layers.10.mixer.out",
                        "layers.10",
                        "norm",
                        "lm_head.weight",
                        "f64/logits",
                        "logprobs",
                        "loss",
                        "grads/lm_head.weight",
                        "grads/model.norm.weight",
                        "grad:layers.10",
                        "grads/model.layers.10.mlp.experts.2.up_proj.weight",
                        "grads/model.layers.10.mlp.experts.10.up_proj.weight",
                        "grads/model.layers.2.input_layernorm.weight",
                        "grads/model.layers.2.hc_attn_fn",
                        "grads/model.embed_tokens.weight",
                        "block2.out",
                        "block10.out",
                        "visual.layers.0.norm"};
  Names names = sorted;
  std::sort(names.begin(), names.end());
  ASSERT_NE(names, sorted);
  EXPECT_EQ(in_model_order(names), sorted);
  std::reverse(names.begin(), names.end());
  EXPECT_EQ(in_model_order(names), sorted);
}

TEST(ModelOrder, KnowsEveryParameterInEveryNaming) {
  const auto parameters = model::expected_parameters(tests::tiny()->config());
  for (const model::Naming naming : model::kNamings) {
    Names names;
    for (const model::Parameter& p : parameters) {
      for (const model::DiskPart& part : p.parts_in(naming)) {
        names.push_back(model::disk_name(part.name, naming, true));
        // One place of its own, not that of unknown modules of the layer.
        EXPECT_TRUE(model_place(names.back()).known()) << names.back();
        EXPECT_LT(model_place(names.back()).module, model_place("layers.0.what").module)
            << names.back();
      }
    }
    const Names sorted = in_model_order(names);
    EXPECT_THAT(sorted.front(), HasSubstr("embed_tokens"));
    EXPECT_THAT(sorted.back(), HasSubstr("lm_head"));
    const auto layer = [](const std::string& name) { return model_place(name).layer; };
    EXPECT_TRUE(std::is_sorted(sorted.begin(), sorted.end(), [&](const auto& a, const auto& b) {
      return layer(a) < layer(b);
    }));
  }
}

TEST(ModelOrder, IsTheOrderInWhichTheModelRecordsItsModules) {
  harness::TrainerOptions options;
  options.numerics = model::Numerics::policy("float32");
  options.trace = "*";
  const auto run = harness::Trainer(tests::tiny(), options, parallel::Mesh::single())
                       .run(tests::tiny_documents({12}));
  Names recorded;
  for (const auto& [name, value] : run.trace) {
    if (!name.starts_with("grad:")) recorded.push_back(name);
  }
  Names names = recorded;
  std::sort(names.begin(), names.end());
  ASSERT_NE(names, recorded);
  EXPECT_EQ(in_model_order(names), recorded);
}

/// Eleven layers of which some are off by so much.
harness::RunOutput run_with(const std::map<int, double>& errors) {
  harness::RunOutput run;
  run.cu_seqlens = {0, 2, 4};
  for (int layer = 0; layer < 11; ++layer) {
    const std::string name = fmt::format("layers.{}", layer);
    Tensor value = at::ones({4, 3}, at::kDouble);
    if (errors.contains(layer)) value[3][1] += errors.at(layer);
    run.trace.emplace_back(name, value);
    run.grads[name + ".mlp.gate.weight"] = value;
  }
  return run;
}

harness::Comparison compared(const std::string& what,
                             const std::map<int, double>& errors,
                             std::optional<double> limit) {
  const harness::RunOutput clean = run_with({}), off = run_with(errors);
  harness::CompareSpec spec;
  spec.what = what;
  spec.limit = limit;
  return harness::compare_sides(
      spec, {"off", nullptr, &off, nullptr}, {"clean", nullptr, &clean, nullptr});
}

TEST(FirstDivergence, IsTheFirstLayerOverItsLimitNotTheWorst) {
  const auto c = compared("trace:layers.*", {{1, 1e-9}, {2, 1e-3}, {10, 0.5}}, 1e-6);
  EXPECT_THAT(c.first_divergence,
              StartsWith("layers.2 (3 of 11 in model order): layers.2[3,1]: got 1.001 "));
  EXPECT_THAT(c.first_divergence, HasSubstr("(document 1, position 1)"));
  EXPECT_THAT(c.worst, StartsWith("layers.10: rel_l2 0.1"));
  EXPECT_EQ(c.details.at(2).name, "layers.2");
  EXPECT_EQ(c.details.at(10).name, "layers.10");
}

TEST(FirstDivergence, OfGradientsIsTheFirstOneOfTheBackwardPass) {
  const auto c = compared("grads", {{2, 0.5}, {9, 1e-3}}, 1e-6);
  EXPECT_THAT(c.first_divergence,
              StartsWith("layers.9.mlp.gate.weight (2 of 11 in backward order): "));
  EXPECT_THAT(c.worst, StartsWith("layers.2.mlp.gate.weight: "));
}

TEST(FirstDivergence, IsSilentWithinTheLimitAndWithoutOneTheFirstThatDiffers) {
  const auto within = compared("trace:layers.*", {{1, 1e-9}, {2, 1e-3}}, 1);
  EXPECT_EQ(within.first_divergence, "");
  EXPECT_THAT(within.worst, StartsWith("layers.2: "));
  EXPECT_THAT(compared("trace:layers.*", {{1, 1e-9}, {2, 1e-3}}, std::nullopt).first_divergence,
              StartsWith("layers.1 (2 of 11"));
  const auto equal = compared("trace:layers.*", {}, std::nullopt);
  EXPECT_EQ(equal.first_divergence + equal.worst, "");
}

}  // namespace
}  // namespace lockstep::golden
