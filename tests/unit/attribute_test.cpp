// Costs of switches, found on cases whose answer is known.
#include "harness/attribute/attribute.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "harness/attribute/attribution_report.hpp"
#include "harness/launch/workload.hpp"
#include "harness/runner/execute.hpp"
#include "model/config/config_json.hpp"
#include "tests/support/tiny_model.hpp"

namespace lockstep::harness {
namespace {

using model::Switch;
using testing::HasSubstr;

RunSpec run_of(std::string name,
               std::string policy,
               std::vector<std::pair<std::string, std::string>> switches = {}) {
  RunSpec run;
  run.name = std::move(name);
  run.policy = std::move(policy);
  if (run.policy.starts_with("vllm")) run.engine = "inference";
  run.numerics = std::move(switches);
  return run;
}

/// Log-probabilities by formula: what each switch of `to` adds is known, the order is not.
struct Formula {
  std::vector<std::pair<std::string, double>> adds;
  int64_t runs = 0;

  RunOutput operator()(const RunSpec& run, int64_t seed) {
    ++runs;
    const model::Numerics num = numerics_of(run);
    const model::Numerics base = model::Numerics::policy("fsdp-bf16");
    double shift = 0;
    for (const model::Switch s : num.differences(base)) {
      for (const auto& [id, add] : adds) {
        if (model::switch_info(s).id == id) shift += add * (1 + 0.1 * static_cast<double>(seed));
      }
    }
    RunOutput out;
    out.tokens = 4;
    out.logprobs = at::full({4}, -2.0 + shift, at::kDouble);
    out.logprobs[3] = std::nan("");
    out.logits = at::full({4, 2}, shift, at::kDouble);
    if (!run.trace.empty())
      out.trace = {{"layers.0", at::ones({2})}, {"norm", at::full({2}, 1 + shift)}};
    return out;
  }
};

double kl(double l) { return std::exp(l) - l - 1; }

TEST(Attribute, CostsOfAFormulaAreItsTerms) {
  Formula formula{{{"D09", 0.01}, {"D12", 0.3}, {"D53", 0}}};
  RunSpec to = run_of("to", "fsdp-bf16");
  const model::Numerics base = model::Numerics::policy("fsdp-bf16");
  for (const char* id : {"D09", "D12", "D53"}) {
    for (const model::SwitchInfo& row : model::kSwitches) {
      if (row.id != id) continue;
      const auto s = static_cast<Switch>(&row - model::kSwitches.data());
      to.numerics.emplace_back(id, base.value(s) == row.values[0] ? row.values[1] : row.values[0]);
    }
  }
  to.trace = "*";
  const Attribution all =
      attribute(run_of("from", "fsdp-bf16"), to, 2, std::ref(formula), AttributeStep{});
  ASSERT_EQ(all.costs.size(), 3U);
  EXPECT_EQ(all.costs[0].id, Switch::kNormStatistic);
  EXPECT_EQ(all.costs[1].id, Switch::kHcMixRoundings);
  EXPECT_EQ(all.costs[2].id, Switch::kSwigluRoundings);
  EXPECT_TRUE(all.costs[2].inert);
  EXPECT_FALSE(all.costs[1].inert);
  EXPECT_EQ(all.same.mismatch_kl.mean(), 0);
  for (size_t seed = 0; seed < 2; ++seed) {
    const double scale = 1 + 0.1 * static_cast<double>(seed);
    // The trainer of the pair is `from`, which lies lower.
    EXPECT_NEAR(all.costs[0].cost.values[seed], kl(-0.3 * scale), 1e-15);
    EXPECT_NEAR(all.costs[1].cost.values[seed], kl(-0.01 * scale), 1e-15);
    EXPECT_NEAR(all.whole.mismatch_kl.values[seed], kl(-0.31 * scale), 1e-15);
    EXPECT_NEAR(all.costs[0].saved.values[seed], kl(-0.31 * scale) - kl(-0.01 * scale), 1e-15);
    EXPECT_NEAR(all.costs[0].cumulative.mismatch_kl.values[seed], kl(-0.3 * scale), 1e-15);
    EXPECT_NEAR(all.costs[2].cumulative.mismatch_kl.values[seed], kl(-0.31 * scale), 1e-15);
    EXPECT_NEAR(all.parts.values[seed], kl(-0.3 * scale) + kl(-0.01 * scale), 1e-15);
  }
  EXPECT_THAT(all.layer_names, testing::ElementsAre("layers.0", "norm"));
  EXPECT_EQ(all.costs[0].layers[0], 0);
  EXPECT_GT(all.costs[0].layers[1], 0.1);
  EXPECT_EQ(formula.runs, 2 * (3 + 3 * 3));
  const std::string text = text_of(all);
  EXPECT_THAT(text, HasSubstr("3 switches differ"));
  EXPECT_THAT(text, HasSubstr("1 of them change no byte"));
  EXPECT_THAT(json_of(all), HasSubstr("\"id\": \"D12\""));
  EXPECT_EQ(result_of(all, "s").comparisons.front().details.size(), 4U);
}

TEST(Attribute, IntervalsAreThoseOfStudent) {
  // Three values 1, 2, 3: s = 1, t(2) = 4.303.
  const Spread spread{{1, 2, 3}};
  EXPECT_DOUBLE_EQ(spread.mean(), 2);
  EXPECT_NEAR(spread.half_width(), 4.303 / std::sqrt(3.0), 1e-12);
  EXPECT_FALSE(spread.is_clear());
  EXPECT_TRUE((Spread{{2.0, 2.1, 1.9}}).is_clear());
  EXPECT_TRUE(std::isnan((Spread{{1}}).half_width()));
  EXPECT_FALSE((Spread{{0, 0}}).is_clear());
}

TEST(Attribute, EqualSidesAreRefused) {
  Formula formula;
  EXPECT_THROW(attribute(run_of("a", "fsdp-bf16"),
                         run_of("b", "fsdp-bf16"),
                         1,
                         std::ref(formula),
                         AttributeStep{}),
               Error);
  EXPECT_EQ(formula.runs, 0);
}

class Planted : public testing::Test {
 protected:
  Planted() {
    work_.source = model::seeded_source(model::preset_config("tiny"), 7);
    work_.documents = random_documents({40, 1, 23}, work_.source->config().vocab_size, -1, 3);
  }
  Evaluate evaluate() {
    return [this](const RunSpec& run, int64_t) {
      return execute_run(run, work_, parallel::Mesh::single());
    };
  }
  Workload work_;
};

/// Of two switches that differ, one has nothing to act on in this model.
TEST_F(Planted, TheSwitchThatActsIsBlamedAndTheOtherIsNot) {
  RunSpec to = run_of("to", "fsdp-bf16", {{"D12", "unrounded"}, {"D62", "handover"}});
  to.trace = "layers.?";
  RunSpec from = run_of("from", "fsdp-bf16", {{"D62", "affine-tf32x3"}});
  const Attribution all = attribute(from, to, 1, evaluate(), AttributeStep{});
  ASSERT_GE(all.costs.size(), 2U);
  EXPECT_EQ(all.costs[0].id, Switch::kNormStatistic);
  EXPECT_GT(all.costs[0].alone.max_logprob.mean(), 0);
  EXPECT_EQ(all.costs[0].cumulative.mismatch_kl.mean(), all.whole.mismatch_kl.mean());
  EXPECT_TRUE(all.costs[1].inert);
  EXPECT_EQ(all.costs[1].cost.mean(), 0);
  EXPECT_EQ(all.same.max_logprob.mean(), 0);
}

/// What the search and `run.NAME.numerics` may ask of an engine is done, or refused as a choice.
TEST_F(Planted, EveryValueOfEverySwitchRunsInBothEngines) {
  for (const char* policy : {"fsdp-bf16", "vllm-bf16", "float32"}) {
    for (const bool inference : {false, true}) {
      RunSpec run = run_of("x", policy);
      run.engine = inference ? "inference" : "trainer";
      run.grads = !inference;
      const model::Numerics base = numerics_of(run);
      for (size_t s = 0; s < model::kNumSwitches; ++s) {
        const model::SwitchInfo& row = model::kSwitches[s];
        for (size_t v = 0; v < row.num_values(); ++v) {
          if (base.value(static_cast<Switch>(s)) == row.values[v]) continue;
          run.numerics = {{std::string(row.id), std::string(row.values[v])}};
          try {
            const RunOutput out = evaluate()(run, 0);
            EXPECT_TRUE(std::isfinite(out.loss)) << policy << run.engine << row.id << row.values[v];
          } catch (const Error& error) {
            EXPECT_EQ(error.kind(), ErrorKind::kConfig)
                << policy << ' ' << run.engine << ' ' << row.id << " = " << row.values[v] << ": "
                << error.what();
          }
        }
      }
    }
  }
}

/// A dump whose numerics nobody tells: every switch that acts is found, to the bit.
TEST_F(Planted, EverySwitchThatActsIsFoundInADump) {
  const RunSpec plain = run_of("trainer", "fsdp-bf16");
  const Tensor before = evaluate()(plain, 0).logprobs;
  const model::Numerics base = numerics_of(plain);
  int64_t acting = 0, planted = 0;
  for (size_t s = 0; s < model::kNumSwitches; s += 4) {
    const model::SwitchInfo& row = model::kSwitches[s];
    for (size_t v = 0; v < row.num_values(); ++v) {
      if (base.value(static_cast<Switch>(s)) == row.values[v]) continue;
      Tensor dump;
      try {
        dump = evaluate()(
                   run_of("x", "fsdp-bf16", {{std::string(row.id), std::string(row.values[v])}}), 0)
                   .logprobs;
      } catch (const Error&) {
        continue;
      }
      ++planted;
      const Explanation found = explain(plain, {"fsdp-bf16"}, dump, 1, evaluate(), AttributeStep{});
      if (found.start == 0) {
        EXPECT_TRUE(found.found.empty());
        continue;
      }
      ++acting;
      ASSERT_EQ(found.found.size(), 1U) << row.id << " = " << row.values[v];
      EXPECT_EQ(found.found[0].distance, 0) << row.id << " = " << row.values[v];
      // Or one that does the same here: tf32 and tf32-above-32 on more than 32 tokens.
      const Candidate& best = found.found[0];
      const std::string planted_value = fmt::format("{} = {}", row.id, row.values[v]);
      EXPECT_TRUE((best.id == static_cast<Switch>(s) && best.value == row.values[v]) ||
                  std::count(best.ties.begin(), best.ties.end(), planted_value) == 1)
          << planted_value;
    }
  }
  EXPECT_GE(acting, 5) << "of " << planted;
}

TEST_F(Planted, TheNearestPolicyIsWhereTheSearchStarts) {
  const Tensor dump =
      evaluate()(run_of("x", "fsdp-fp32-islands", {{"D12", "unrounded"}}), 0).logprobs;
  const Explanation found = explain(run_of("trainer", "float32"),
                                    {"float32", "hf-bf16", "fsdp-bf16", "fsdp-fp32-islands"},
                                    dump,
                                    3,
                                    evaluate(),
                                    AttributeStep{});
  EXPECT_EQ(found.policy, "fsdp-fp32-islands");
  ASSERT_EQ(found.found.size(), 1U);
  EXPECT_EQ(found.found[0].id, Switch::kNormStatistic);
  EXPECT_EQ(found.found[0].distance, 0);
  EXPECT_THAT(text_of(found), HasSubstr("the same bits"));
}

TEST_F(Planted, ADumpOfOtherTokensIsRefused) {
  try {
    explain(run_of("t", "float32"), {"float32"}, at::zeros({5}), 1, evaluate(), AttributeStep{});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInput);
    EXPECT_THAT(error.what(), HasSubstr("float"));
  }
}

}  // namespace
}  // namespace lockstep::harness
