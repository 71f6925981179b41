// Faults people met when a sequence is cut over ranks: gradients that are right on the last rank
// only, lost tokens, layers that share a selection.
#include <gtest/gtest.h>

#include "harness/trainer/trainer.hpp"
#include "model/base/seeded.hpp"
#include "model/config/config_json.hpp"
#include "model/layers/kda_layer.hpp"
#include "parallel/plan/plan.hpp"
#include "tests/rank/world.hpp"
#include "tests/support/compare.hpp"
#include "tests/support/leaf_parameters.hpp"

namespace lockstep::tests {
namespace {

parallel::Mesh mesh_of_all() {
  model::Topology topology;
  topology.cp = world().size();
  return parallel::Mesh::create(world(), topology);
}

struct LayerGrads {
  Tensor input;  ///< local rows
  Named params;  ///< summed over ranks
  int64_t begin = 0;
};

/// One KDA layer on the rows of this rank, loss = sum(y * w): gradients of its input and of every
/// parameter. `break_gate` replaces the gate of every head by that of head 0, in the way a wrong
/// backward would.
LayerGrads kda_layer_grads(const parallel::Mesh& mesh,
                           const Packing& row,
                           bool break_gate = false) {
  const auto source = model::seeded_source(model::preset_config("tiny"), 3);
  const model::Numerics num = model::Numerics::policy("float32");
  LeafParameters params(*source, num, true);
  if (break_gate) {
    const at::NoGradGuard no_grad;
    Tensor a_log = params.get("layers.1.self_attn.A_log");
    a_log.copy_(a_log[0].expand_as(a_log).clone());
  }
  const parallel::ParallelPlan schemes(source->config(), num, mesh, row, {});
  const parallel::TokenPlan& plan = schemes.tokens();
  const model::LayerContext ctx{.config = source->config(),
                                .num = num,
                                .packing = plan.packing,
                                .params = params,
                                .seams = schemes.seams()};
  const int64_t tokens = row.global_tokens(), hidden = source->config().hidden_size;
  const auto rows = [&](const char* name) {
    const std::vector<float> values = seeded_uniform(5, name, tokens * hidden);
    return at::tensor(values)
        .reshape({tokens, hidden})
        .narrow(0, plan.begin, plan.end - plan.begin)
        .clone();
  };
  Tensor x = rows("x");
  x.requires_grad_(true);
  (model::kda_mixer(ctx, 1, x) * rows("w")).sum().backward();
  LayerGrads grads{x.grad(), {}, plan.begin};
  for (const auto& [name, leaf] : params.leaves()) {
    if (!name.starts_with("layers.1.self_attn.") || !leaf.grad().defined()) continue;
    Tensor grad = leaf.grad().clone();
    mesh.cp().all_reduce_sum(grad, name);
    grads.params.emplace(name, grad);
  }
  return grads;
}

double worst_distance(const LayerGrads& split, const LayerGrads& one) {
  const double input = rel_l2(split.input, one.input.narrow(0, split.begin, split.input.size(0)));
  return std::max(input, worst(split.params, one.params).first);
}

TEST(FaultCases, B01GradientsOfAKdaLayerAreRightOnEveryRank) {
  for (const std::vector<int64_t>& lengths : {std::vector<int64_t>{256}, {100, 1, 155}}) {
    const Packing row = Packing::of_lengths(lengths);
    const LayerGrads one = kda_layer_grads(parallel::Mesh::single(), row),
                     split = kda_layer_grads(mesh_of_all(), row);
    const int64_t held = split.input.size(0);
    EXPECT_LE(rel_l2(split.input, one.input.narrow(0, split.begin, held)), 1e-4)
        << "rows from " << split.begin;
    for (const auto& [name, grad] : one.params)
      EXPECT_LE(rel_l2(split.params.at(name), grad), 1e-4) << name;
    // The same comparison sees a gate that is head 0's for every head.
    EXPECT_GT(worst_distance(kda_layer_grads(mesh_of_all(), row, true), one), 1e-2);
  }
}

TEST(FaultCases, B05OddLengthsLoseNoTokenWhenTheRowIsCut) {
  const std::shared_ptr<const model::WeightSource> source =
      model::seeded_source(model::preset_config("tiny"), 5);
  harness::TrainerOptions options;
  options.numerics = model::Numerics::policy("float64");
  options.grads = true;
  const parallel::Mesh mesh = mesh_of_all();
  for (const std::vector<int64_t>& cu : {std::vector<int64_t>{0, 4, 7}, {0, 7}, {0, 5, 14, 15}}) {
    // Padding to the next multiple of 10: two fillings must give the same bytes.
    const int64_t tokens = cu.back(), row = (tokens + 9) / 10 * 10;
    const Tensor ids = at::arange(3, 3 + row, at::kLong), filled = ids.clone();
    filled.narrow(0, tokens, row - tokens).fill_(77);
    const harness::TrainerResult one =
        harness::Trainer(source, options, parallel::Mesh::single()).run(harness::from_row(ids, cu));
    const harness::TrainerResult split =
        harness::Trainer(source, options, mesh).run(harness::from_row(ids, cu));
    const harness::TrainerResult other =
        harness::Trainer(source, options, mesh).run(harness::from_row(filled, cu));
    for (size_t d = 0; d + 1 < cu.size(); ++d) {
      EXPECT_LE(rel_l2(split.logits[cu[d + 1] - 1], one.logits[cu[d + 1] - 1]), 1e-11)
          << "last token of document " << d << " of " << tokens << " tokens";
    }
    EXPECT_LE(rel_l2(split.logits, one.logits), 1e-11);
    const auto [distance, name] = worst(split.grads, one.grads);
    EXPECT_LE(distance, 1e-11) << name;
    EXPECT_TRUE(same_bytes(split.logits, other.logits)) << "padding has influence";
    for (const auto& [grad_name, grad] : split.grads)
      EXPECT_TRUE(same_bytes(grad, other.grads.at(grad_name))) << grad_name;
  }
}

TEST(FaultCases, B58SharedLayersUseTheIdsOfTheLastFullIndexer) {
  const model::ModelConfig config = model::with_overrides(model::preset_config("tiny"), R"({
    "num_hidden_layers": 6,
    "layer_types": ["linear_attention", "indexed_attention", "indexed_attention", "linear_attention", "indexed_attention", "indexed_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "sparse", "sparse"],
    "indexer_types": ["full", "full", "shared", "full", "full", "shared"]})");
  const std::shared_ptr<const model::WeightSource> source = model::seeded_source(config, 9);
  for (const std::string& name : source->names()) {
    EXPECT_FALSE(name.starts_with("layers.2.self_attn.indexer") ||
                 name.starts_with("layers.5.self_attn.indexer"))
        << name;
  }
  harness::TrainerOptions options;
  options.numerics = model::Numerics::policy("float64");
  options.trace = "layers.*.self_attn.indexer";
  const harness::Documents docs = harness::random_documents(
      {60, 1, 45}, config.vocab_size, config.pad_token_id.value_or(-1), 2);
  const harness::TrainerResult one =
      harness::Trainer(source, options, parallel::Mesh::single()).run(docs);
  const parallel::Mesh mesh = mesh_of_all();
  const harness::TrainerResult split = harness::Trainer(source, options, mesh).run(docs);
  ASSERT_EQ(one.trace.size(), 4U);
  EXPECT_TRUE(at::equal(one.trace[0].second, one.trace[1].second));
  EXPECT_TRUE(at::equal(one.trace[2].second, one.trace[3].second));
  EXPECT_FALSE(at::equal(one.trace[1].second, one.trace[2].second))
      << "two indexers chose alike: the test sees nothing";
  for (size_t i = 0; i < 4; ++i)
    EXPECT_TRUE(at::equal(split.trace[i].second, one.trace[i].second)) << one.trace[i].first;
  EXPECT_LE(rel_l2(split.logits, one.logits), 1e-11);
}

TEST(FaultCases, B58AScheduleThatStartsWithASharedLayerIsRefused) {
  try {
    model::with_overrides(model::preset_config("tiny"),
                          R"({"indexer_types": ["full", "full", "full", "shared"]})");
    FAIL() << "accepted a shared layer without an earlier full one";
  } catch (const Error& error) {
    EXPECT_EQ(exit_code(error.kind()), 2);
    EXPECT_NE(std::string(error.what()).find("indexer_types"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace lockstep::tests
