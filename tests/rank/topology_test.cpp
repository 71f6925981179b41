// Every topology of this many ranks against one process: logits, loss and every gradient, on every
// rank.
#include <gtest/gtest.h>

#include <algorithm>

#include "harness/trainer/trainer.hpp"
#include "model/config/config_json.hpp"
#include "parallel/mesh/layout.hpp"
#include "tests/rank/topologies.hpp"
#include "tests/rank/world.hpp"
#include "tests/support/compare.hpp"
#include "tests/support/draws.hpp"
#include "tests/support/tiny_model.hpp"

namespace lockstep::tests {
namespace {

using harness::Documents;
using harness::TrainerResult;
using model::Topology;

TrainerResult run(const Documents& docs,
                  const model::Numerics& num,
                  const parallel::Mesh& mesh,
                  bool recompute = false) {
  harness::TrainerOptions options;
  options.numerics = num;
  options.grads = true;
  options.recompute = recompute;
  return harness::Trainer(tiny(), options, mesh).run(docs);
}

void expect_equal(const TrainerResult& split,
                  const TrainerResult& one,
                  double limit,
                  const std::string& what) {
  const int64_t rows = split.local_logits.size(0);
  EXPECT_LE(rel_l2(split.local_logits, one.logits.narrow(0, split.local_begin, rows)), limit)
      << what << ": local logits";
  EXPECT_LE(rel_l2(split.logits, one.logits), limit) << what << ": gathered logits";
  EXPECT_NEAR(split.loss, one.loss, limit * std::abs(one.loss)) << what;
  ASSERT_EQ(split.grads.size(), one.grads.size());
  const auto [distance, name] = worst(split.grads, one.grads);
  EXPECT_LE(distance, limit) << what << ": gradient of " << name;
}

/// Lengths from a seed: up to 7 documents of 0 to 40 tokens.
Documents random_pack(uint64_t seed) {
  std::vector<int64_t> lengths;
  Draws next(seed);
  for (int64_t n = 1 + next(7); n > 0; --n) lengths.push_back(next(4) == 0 ? next(3) : next(41));
  return tiny_documents(lengths, seed);
}

TEST(Topologies, EveryProductOfAxesEqualsOneProcessInFloat64) {
  const model::Numerics num = model::Numerics::policy("float64");
  uint64_t seed = 1;
  for (const Topology& topology : topologies(world().size(), 4)) {
    const parallel::Mesh mesh = parallel::Mesh::create(world(), topology);
    const Documents docs = random_pack(seed++);
    expect_equal(run(docs, num, mesh),
                 run(docs, num, parallel::Mesh::single()),
                 1e-11,
                 model::to_string(topology) + fmt::format(" pack {}", seed - 1));
  }
}

TEST(Topologies, SplitSumsEqualOneProcessInFloat64) {
  model::Numerics num = model::Numerics::policy("float64");
  num.set("D61", "tp");
  uint64_t seed = 101;
  for (const Topology& topology : topologies(world().size(), 4)) {
    if (topology.tp == 1) continue;
    const parallel::Mesh mesh = parallel::Mesh::create(world(), topology);
    const Documents docs = random_pack(seed++);
    expect_equal(run(docs, num, mesh),
                 run(docs, num, parallel::Mesh::single()),
                 1e-11,
                 model::to_string(topology));
  }
}

TEST(Topologies, EveryRankTakesItsRowsOfReplayedExperts) {
  harness::TrainerOptions options;
  options.numerics = model::Numerics::policy("float64");
  options.numerics.set("D68", "replay");
  options.grads = true;
  const model::ModelConfig& config = tiny()->config();
  uint64_t seed = 201;
  for (const Topology& topology : topologies(world().size(), 2)) {
    const Documents docs = random_pack(seed++);
    // Not what a router would choose: token t takes the experts t, t + 1, ...
    const Tensor experts = at::arange(docs.packing.global_tokens())
                               .unsqueeze(1)
                               .add(at::arange(config.num_experts_per_tok))
                               .remainder(config.n_routed_experts);
    options.replay.clear();
    for (const model::MlpKind kind : config.mlps)
      options.replay.push_back(kind == model::MlpKind::kMoe ? experts : Tensor());
    const parallel::Mesh mesh = parallel::Mesh::create(world(), topology);
    const TrainerResult one = harness::Trainer(tiny(), options, parallel::Mesh::single()).run(docs);
    expect_equal(
        harness::Trainer(tiny(), options, mesh).run(docs), one, 1e-11, model::to_string(topology));
    if (docs.packing.global_tokens() > 20) {
      EXPECT_GT(rel_l2(run(docs, model::Numerics::policy("float64"), mesh).logits, one.logits),
                1e-2);
    }
  }
}

TEST(Topologies, RecomputeGivesTheSameBytes) {
  const model::Numerics num = model::Numerics::policy("fsdp-fp32-islands");
  const std::vector<Topology> all = topologies(world().size(), 2);
  for (const Topology& topology : {all.front(), all[all.size() / 2], all.back()}) {
    const parallel::Mesh mesh = parallel::Mesh::create(world(), topology);
    const Documents docs = random_pack(5);
    const TrainerResult kept = run(docs, num, mesh), again = run(docs, num, mesh, true);
    EXPECT_TRUE(same_bytes(kept.logits, again.logits)) << model::to_string(topology);
    for (const auto& [name, grad] : kept.grads)
      EXPECT_TRUE(same_bytes(again.grads.at(name), grad)) << model::to_string(topology) << name;
  }
}

}  // namespace
}  // namespace lockstep::tests
