// Invariant policies: every topology gives the bytes of one process, for any packing.
#include <gtest/gtest.h>

#include <map>

#include "harness/trainer/trainer.hpp"
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

/// Lengths from a seed: up to 6 documents; empty, short, of whole tiles, just beside a tile, long.
/// Of three seeds one has a document that reaches over all ranks.
Documents random_pack(uint64_t seed) {
  std::vector<int64_t> lengths;
  Draws next(seed);
  if (seed % 3 == 0) lengths = {3, 64 * (world().size() + 1) + 5, 2};
  for (int64_t n = lengths.empty() ? 2 + next(5) : 0; n > 0; --n) {
    const int64_t tiles = 64 * next(3);
    switch (next(4)) {
      case 0:
        lengths.push_back(next(3));
        break;
      case 1:
        lengths.push_back(tiles);
        break;
      case 2:
        lengths.push_back(tiles + 63 + next(3));
        break;
      default:
        lengths.push_back(tiles + next(64));
    }
  }
  return tiny_documents(lengths, seed);
}

TrainerResult run(const Documents& docs,
                  const model::Numerics& num,
                  const parallel::Mesh& mesh,
                  bool recompute = false,
                  const std::vector<int64_t>& cuts = {}) {
  harness::TrainerOptions options;
  options.numerics = num;
  options.grads = true;
  options.recompute = recompute;
  options.cp_cuts = cuts;
  return harness::Trainer(tiny(), options, mesh).run(docs);
}

/// Names whose bytes differ; empty if none.
std::vector<std::string> differing(const TrainerResult& a, const TrainerResult& b) {
  std::vector<std::string> names;
  if (!same_bytes(a.logits, b.logits)) names.emplace_back("logits");
  if (!same_bytes(a.logprobs, b.logprobs)) names.emplace_back("logprobs");
  if (a.loss != b.loss) names.emplace_back("loss");
  if (a.grads.size() != b.grads.size()) names.emplace_back("number of gradients");
  for (const auto& [name, grad] : b.grads) {
    if (!a.grads.contains(name) || !same_bytes(a.grads.at(name), grad)) names.push_back(name);
  }
  return names;
}

/// One process, each pack once.
const TrainerResult& alone(uint64_t seed, const std::string& policy) {
  static std::map<std::pair<uint64_t, std::string>, TrainerResult> results;
  const auto key = std::make_pair(seed, policy);
  if (!results.contains(key)) {
    results.emplace(
        key, run(random_pack(seed), model::Numerics::policy(policy), parallel::Mesh::single()));
  }
  return results.at(key);
}

class Invariant : public testing::TestWithParam<const char*> {};

TEST_P(Invariant, EveryTopologyGivesTheBytesOfOneProcess) {
  const model::Numerics num = model::Numerics::policy(GetParam());
  uint64_t turn = 0;
  for (const Topology& topology : topologies(world().size(), 1)) {
    const parallel::Mesh mesh = parallel::Mesh::create(world(), topology);
    const uint64_t seed = turn++ % 3 + 12 * static_cast<uint64_t>(world().size());
    const auto names = differing(run(random_pack(seed), num, mesh), alone(seed, GetParam()));
    EXPECT_TRUE(names.empty()) << model::to_string(topology) << " pack " << seed << ": "
                               << names.size() << " differ, " << names.front();
  }
}

TEST_P(Invariant, RecomputeGivesTheSameBytes) {
  const model::Numerics num = model::Numerics::policy(GetParam());
  const Topology topology = topologies(world().size(), 1).back();
  const parallel::Mesh mesh = parallel::Mesh::create(world(), topology);
  const uint64_t seed = 12 * static_cast<uint64_t>(world().size());
  const auto names = differing(run(random_pack(seed), num, mesh, true), alone(seed, GetParam()));
  EXPECT_TRUE(names.empty()) << model::to_string(topology) << names.front();
}

struct Trained {
  std::vector<harness::TrainStep> steps;
  std::map<std::string, Tensor> weights;
};

/// Steps with a clipping norm far below the gradient's, on other documents each.
Trained train(const std::string& policy, const parallel::Mesh& mesh, bool two_micro_batches) {
  harness::TrainerOptions options;
  options.numerics = model::Numerics::policy(policy);
  options.logits = false;
  options.optimizer = parallel::OptimizerOptions{.lr = 3e-3, .weight_decay = 0.1, .clip_norm = 0.1};
  options.router_bias_speed = 1e-3;
  harness::Trainer trainer(tiny(), options, mesh);
  Trained result;
  for (uint64_t s = 1; s <= (every_topology() ? 5 : 2); ++s) {
    std::vector<Documents> batches{tiny_documents({70, 130, 0, 3}, s),
                                   tiny_documents({64, 1, 90}, 100 + s)};
    if (!two_micro_batches) {
      Documents& both = batches[0];
      both.ids = at::cat({both.ids, batches[1].ids});
      both.packing = Packing::of_lengths({70, 130, 0, 3, 64, 1, 90});
      batches.pop_back();
    }
    result.steps.push_back(trainer.train_step(batches));
  }
  result.weights = trainer.weights();
  return result;
}

TEST_P(Invariant, StepsOfTheOptimizerLeaveTheSameWeights) {
  static std::map<std::string, Trained> whole;
  if (!whole.contains(GetParam()))
    whole.emplace(GetParam(), train(GetParam(), parallel::Mesh::single(), false));
  const Trained& one = whole.at(GetParam());
  EXPECT_LT(one.steps.back().optimizer.clip_factor, 1);
  const std::vector<Topology> all = topologies(world().size(), 1);
  const size_t stride = every_topology() ? 1 : (all.size() + 3) / 4;
  bool split_batch = true;
  for (size_t i = 0; i < all.size(); i += stride) {
    const Topology& topology = all[i];
    const Trained split = train(GetParam(), parallel::Mesh::create(world(), topology), split_batch);
    const std::string what =
        model::to_string(topology) + (split_batch ? ", two micro-batches" : "");
    split_batch = !split_batch;
    for (size_t s = 0; s < one.steps.size(); ++s) {
      EXPECT_EQ(split.steps[s].loss, one.steps[s].loss) << what << " step " << s;
      EXPECT_EQ(split.steps[s].optimizer.grad_norm, one.steps[s].optimizer.grad_norm)
          << what << " step " << s;
    }
    int64_t differing = 0;
    std::string name;
    for (const auto& [weight, value] : one.weights) {
      if (same_bytes(split.weights.at(weight), value)) continue;
      ++differing;
      name = weight;
    }
    EXPECT_EQ(differing, 0) << what << ": " << name;
  }
}

TEST_P(Invariant, TensorParallelismKeepsTheBytesOfLogitsAndHasNoGradients) {
  if (world().size() > 4) GTEST_SKIP() << "the model has 4 heads";
  harness::TrainerOptions options;
  options.numerics = model::Numerics::policy(GetParam());
  const parallel::Mesh mesh = parallel::Mesh::create(world(), {.tp = world().size()});
  const uint64_t seed = 12 * static_cast<uint64_t>(world().size());
  const TrainerResult split = harness::Trainer(tiny(), options, mesh).run(random_pack(seed));
  EXPECT_TRUE(same_bytes(split.logits, alone(seed, GetParam()).logits));
  if (world().size() == 1) return;
  try {
    run(random_pack(seed), options.numerics, mesh);
    ADD_FAILURE() << "gradients under tp";
  } catch (const Error& error) {
    EXPECT_EQ(exit_code(error.kind()), 2);
    EXPECT_NE(std::string(error.what()).find("tp = 1"), std::string::npos) << error.what();
  }
}

INSTANTIATE_TEST_SUITE_P(Policies,
                         Invariant,
                         testing::Values("invariant-f32", "invariant-bf16"),
                         [](const auto& param) {
                           return std::string(param.param) == "invariant-f32" ? "F32" : "Bf16";
                         });

/// The same forward arithmetic and cuts, but gradients added in the order of the ranks.
TEST(InvariantNeeds, ExactSums) {
  if (world().size() == 1) GTEST_SKIP() << "one rank has one order";
  model::Numerics num = model::Numerics::policy("float32");
  num.set("D06", "fixed");
  num.set("D62", "handover");
  num.set("D63", "fixed-tiles");
  const int64_t ranks = world().size();
  std::vector<int64_t> cuts;
  for (int64_t r = 0; r <= ranks; ++r) cuts.push_back(64 * r);
  const Documents docs = tiny_documents({64 * ranks}, 3);
  Topology topology;
  topology.cp = ranks;
  const parallel::Mesh mesh = parallel::Mesh::create(world(), topology);
  const TrainerResult split = run(docs, num, mesh, false, cuts),
                      one = run(docs, num, parallel::Mesh::single());
  EXPECT_TRUE(same_bytes(split.logits, one.logits));
  EXPECT_FALSE(differing(split, one).empty());
}

TEST(InvariantNeeds, CutsAtTiles) {
  const model::Numerics num = model::Numerics::policy("invariant-f32");
  const int64_t ranks = world().size();
  if (ranks == 1) GTEST_SKIP() << "one rank has no cut";
  Topology topology;
  topology.cp = ranks;
  const parallel::Mesh mesh = parallel::Mesh::create(world(), topology);
  const Documents docs = tiny_documents({200}, 3);
  std::vector<int64_t> cuts(static_cast<size_t>(ranks), 0);
  cuts.push_back(200);
  cuts[static_cast<size_t>(ranks) - 1] = 63;
  try {
    run(docs, num, mesh, false, cuts);
    ADD_FAILURE() << "a cut inside a tile was taken";
  } catch (const Error& error) {
    EXPECT_EQ(exit_code(error.kind()), 2);
    EXPECT_NE(std::string(error.what()).find("row 63"), std::string::npos) << error.what();
  }
  cuts[static_cast<size_t>(ranks) - 1] = 64;
  EXPECT_TRUE(differing(run(docs, num, mesh, false, cuts), run(docs, num, parallel::Mesh::single()))
                  .empty());
}

}  // namespace
}  // namespace lockstep::tests
