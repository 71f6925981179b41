// The inference engine over tp ranks.
#include "harness/inference/inference.hpp"

#include <gtest/gtest.h>

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
