// The inference engine over tp ranks.
#include "harness/inference/inference.hpp"

#include <gtest/gtest.h>

#include "harness/inference/scheduler.hpp"
#include "model/config/config_json.hpp"
#include "tests/rank/world.hpp"
#include "tests/support/compare.hpp"

namespace lockstep::tests {
namespace {

TEST(InferenceRanks, TensorParallelEqualsOneRank) {
  const std::shared_ptr<const model::WeightSource> source =
      model::seeded_source(model::preset_config("tiny"), 7);
  const harness::Documents docs = harness::random_documents({75, 1, 7, 50}, 131, 0, 11);
  const auto run = [&](std::string_view sums, const parallel::Mesh& mesh) {
    harness::InferenceOptions options;
    options.numerics = model::Numerics::policy("float64");
    options.numerics.set("tp_partial_sums", sums);
    options.prefill_chunk = 13;
    options.decode = 6;
    return harness::Inference(source, options, mesh).run(docs);
  };
  const Tensor want = run("one", parallel::Mesh::single()).logits;
  for (const int64_t tp : {2, 4}) {
    if (world().size() < tp) continue;
    const parallel::Mesh mesh = parallel::Mesh::create(world(), {.tp = tp});
    if (!mesh.active()) continue;
    EXPECT_LE(rel_l2(run("one", mesh).logits, want), 1e-12) << tp;
    EXPECT_LE(rel_l2(run("tp", mesh).logits, want), 1e-12) << tp;
  }
}

TEST(InferenceRanks, InTheInvariantPoliciesTheBytesAreThoseOfOneRank) {
  const std::shared_ptr<const model::WeightSource> source =
      model::seeded_source(model::preset_config("tiny"), 7);
  const harness::Documents docs = harness::random_documents({75, 1, 7, 50}, 131, 0, 11);
  for (const char* policy : {"invariant-f32", "invariant-bf16"}) {
    harness::InferenceOptions options;
    options.numerics = model::Numerics::policy(policy);
    options.prefill_chunk = 13;
    options.decode = 6;
    const auto run = [&](const parallel::Mesh& mesh) {
      return harness::Inference(source, options, mesh).run(docs).logits;
    };
    const Tensor want = run(parallel::Mesh::single());
    for (const int64_t tp : {2, 3, 4}) {
      if (world().size() < tp) continue;
      const parallel::Mesh mesh = parallel::Mesh::create(world(), {.tp = tp});
      if (!mesh.active()) continue;
      EXPECT_TRUE(same_bytes(run(mesh), want)) << policy << " tp " << tp;
    }
  }
}

TEST(InferenceRanks, EveryRankHoldsItsEntriesOfTheVocabularyAlone) {
  // Three panels of the head's sums, so that the invariant policies share them too.
  const model::ModelConfig config =
      model::with_overrides(model::preset_config("tiny"), R"({"vocab_size": 9000})");
  const std::shared_ptr<const model::WeightSource> source = model::seeded_source(config, 7);
  const harness::Documents docs = harness::random_documents({20, 1, 7}, 9000, 0, 11);
  for (const char* policy : {"float64", "invariant-f32", "invariant-bf16"}) {
    harness::InferenceOptions options;
    options.numerics = model::Numerics::policy(policy);
    options.decode = 3;
    const auto sampled = [&](harness::Inference& engine) {
      harness::Scheduler scheduler(engine, {.caches = harness::cache_sizes(16, 4, {40, 40})});
      std::vector<int64_t> requests;
      for (const double temperature : {0.0, 1.0}) {
        requests.push_back(scheduler.add({.prompt = {5, 8999, 4096, 17},
                                          .max_tokens = 8,
                                          .sampling = {temperature, 0.9, 3},
                                          .stop_ids = {}}));
      }
      scheduler.run();
      std::vector<int64_t> ids;
      for (const int64_t request : requests) {
        const std::vector<int64_t>& out = scheduler.result(request).ids;
        ids.insert(ids.end(), out.begin(), out.end());
      }
      return ids;
    };
    harness::Inference alone(source, options, parallel::Mesh::single());
    const harness::InferenceResult want = alone.run(docs);
    const std::vector<int64_t> ids = sampled(alone);
    for (const int64_t tp : {2, 3, 4}) {
      if (world().size() < tp) continue;
      const parallel::Mesh mesh = parallel::Mesh::create(world(), {.tp = tp});
      if (!mesh.active()) continue;
      harness::Inference engine(source, options, mesh);
      const harness::InferenceResult got = engine.run(docs);
      int64_t rows = engine.weights().at("lm_head").size(0);
      EXPECT_EQ(engine.weights().at("embed_tokens").size(0), rows);
      EXPECT_LE(rows, options.numerics.invariant() ? (tp == 2 ? 8192 : 4096) : 9000 / tp);
      Tensor all = at::full({1}, rows, at::kLong);
      mesh.all().all_reduce_sum(all, "rows");
      EXPECT_EQ(all.item<int64_t>(), 9000);
      EXPECT_EQ(sampled(engine), ids) << policy << " tp " << tp;
      if (options.numerics.invariant()) {
        EXPECT_TRUE(same_bytes(got.logits, want.logits)) << policy << " tp " << tp;
        EXPECT_TRUE(same_bytes(got.logprobs, want.logprobs)) << policy << " tp " << tp;
      } else {
        EXPECT_LE(rel_l2(got.logits, want.logits), 1e-12) << tp;
        EXPECT_LE(rel_l2(got.logprobs, want.logprobs), 1e-12) << tp;
      }
    }
  }
}

TEST(InferenceRanks, OtherAxesAreRefused) {
  if (world().size() < 2) GTEST_SKIP();
  const parallel::Mesh mesh = parallel::Mesh::create(world(), {.cp = 2});
  if (!mesh.active()) return;
  const std::shared_ptr<const model::WeightSource> source =
      model::seeded_source(model::preset_config("tiny"), 7);
  EXPECT_THROW(harness::Inference(source, {}, mesh), Error);
}

}  // namespace
}  // namespace lockstep::tests
