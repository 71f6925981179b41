// The whole model with its sequence cut over ranks, against one process, tensor by tensor and rank
// by rank.
#include "parallel/cp/context_parallel.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>

#include "harness/trainer/trainer.hpp"
#include "model/config/config_json.hpp"
#include "tests/rank/world.hpp"
#include "tests/support/compare.hpp"
#include "tests/support/tiny_model.hpp"

namespace lockstep::tests {
namespace {

using harness::Documents;
using harness::Trainer;
using harness::TrainerOptions;
using harness::TrainerResult;

TrainerResult run(const Documents& docs,
                  std::string_view policy,
                  const parallel::Mesh& mesh,
                  std::vector<int64_t> cuts = {},
                  bool recompute = false) {
  TrainerOptions options;
  options.numerics = model::Numerics::policy(policy);
  options.grads = true;
  options.recompute = recompute;
  options.cp_cuts = std::move(cuts);
  return Trainer(tiny(), options, mesh).run(docs);
}

parallel::Mesh mesh_of_all() {
  model::Topology topology;
  topology.cp = world().size();
  return parallel::Mesh::create(world(), topology);
}

/// This rank's rows and every gradient within `limit` of one process.
void expect_equal(const TrainerResult& split,
                  const TrainerResult& one,
                  double limit,
                  const std::string& what) {
  const int64_t rows = split.local_logits.size(0);
  EXPECT_LE(rel_l2(split.local_logits, one.logits.narrow(0, split.local_begin, rows)), limit)
      << what << ": local logits";
  EXPECT_LE(rel_l2(split.local_logprobs, one.logprobs.narrow(0, split.local_begin, rows)), limit)
      << what << ": local logprobs";
  EXPECT_LE(rel_l2(split.logits, one.logits), limit) << what << ": gathered logits";
  EXPECT_NEAR(split.loss, one.loss, limit * std::abs(one.loss)) << what;
  const auto [distance, name] = worst(split.grads, one.grads);
  EXPECT_LE(distance, limit) << what << ": gradient of " << name;
}

struct Row {
  const char* name;
  std::vector<int64_t> lengths;
};

class ContextParallel : public testing::TestWithParam<Row> {};

TEST_P(ContextParallel, EqualsOneProcessInFloat64) {
  const parallel::Mesh mesh = mesh_of_all();
  const Documents docs = tiny_documents(GetParam().lengths);
  expect_equal(run(docs, "float64", mesh),
               run(docs, "float64", parallel::Mesh::single()),
               1e-11,
               GetParam().name);
}

// Lengths that no rank count divides, documents across ranks, ranks with 0 or 1 token, empty
// documents.
INSTANTIATE_TEST_SUITE_P(Rows,
                         ContextParallel,
                         testing::Values(Row{"one_document", {97}},
                                         Row{"odd_documents", {75, 1, 7, 50}},
                                         Row{"b05_seven", {7}},
                                         Row{"b05_pack", {5, 9, 1}},
                                         Row{"one_token", {1}},
                                         Row{"three_tokens", {3}},
                                         Row{"empty_documents", {0, 20, 0, 13, 0}},
                                         Row{"no_target", {1, 1, 1}},
                                         Row{"nothing", {}}),
                         [](const auto& row) { return std::string(row.param.name); });

TEST(ContextParallelCuts, UnevenRanksWithZeroAndOneToken) {
  const int64_t size = world().size();
  const Documents docs = tiny_documents({41, 1, 30});
  const TrainerResult one = run(docs, "float64", parallel::Mesh::single());
  // Rank 0 has 0 tokens, rank 1 one token, then most of the row, the last rank the rest.
  if (size == 1) GTEST_SKIP() << "one rank has nothing to share unevenly";
  std::vector<int64_t> cuts{0, 0};
  for (int64_t r = 1; r < size; ++r)
    cuts.push_back(r == size - 1 ? 72 : r == 1 ? 1 : 1 + 60 * (r - 1) / (size - 1));
  expect_equal(run(docs, "float64", mesh_of_all(), cuts), one, 1e-11, "lopsided");
  // Everything on the first rank; the others only take part in collectives.
  std::vector<int64_t> first(static_cast<size_t>(size) + 1, 72);
  first[0] = 0;
  expect_equal(run(docs, "float64", mesh_of_all(), first), one, 1e-11, "all on rank 0");
  // A rank in the middle of a document holds nothing: state and halo pass it by.
  if (size >= 3) {
    std::vector<int64_t> hole(static_cast<size_t>(size) + 1, 72);
    hole[0] = 0, hole[1] = 20, hole[2] = 20;
    expect_equal(run(docs, "float64", mesh_of_all(), hole), one, 1e-11, "hole");
  }
}

TEST(ContextParallelCuts, Float32IsNoFurtherFromFloat64ThanTwiceOneProcess) {
  const Documents docs = tiny_documents({75, 1, 7, 50});
  const TrainerResult truth = run(docs, "float64", parallel::Mesh::single());
  const TrainerResult one = run(docs, "float32", parallel::Mesh::single());
  const TrainerResult split = run(docs, "float32", mesh_of_all());
  EXPECT_LE(rel_l2(split.logits, truth.logits), 2 * rel_l2(one.logits, truth.logits));
  // The error of a tensor of a few values can be small by luck in one run; the worst of the same
  // parameter over all layers is the floor for those.
  const auto kind = [](std::string name) {
    name.erase(
        std::remove_if(name.begin(), name.end(), [](char c) { return c >= '0' && c <= '9'; }),
        name.end());
    return name;
  };
  std::map<std::string, double> worst_alone;
  for (const auto& [name, exact] : truth.grads) {
    double& alone = worst_alone[kind(name)];
    alone = std::max(alone, rel_l2(one.grads.at(name), exact));
  }
  double ratio_worst = 0;
  for (const auto& [name, exact] : truth.grads) {
    const double floor = exact.numel() <= 64 ? worst_alone.at(kind(name)) : 0;
    const double limit = 2 * std::max(rel_l2(one.grads.at(name), exact), floor);
    const double mine = rel_l2(split.grads.at(name), exact);
    ratio_worst = std::max(ratio_worst, 2 * mine / limit);
    EXPECT_LE(mine, limit) << name;
  }
  RecordProperty("worst_gradient_error_ratio", std::to_string(ratio_worst));
}

TEST(ContextParallelCuts, StatesHandedOverEqualStatesComposed) {
  const Documents docs = tiny_documents({75, 1, 7, 50});
  TrainerOptions options;
  options.numerics = model::Numerics::policy("float64");
  options.grads = true;
  std::vector<TrainerResult> results;
  for (const char* way : {"handover", "affine-fp32"}) {
    options.numerics.set("D62", way);
    results.push_back(Trainer(tiny(), options, mesh_of_all()).run(docs));
  }
  expect_equal(results[0], results[1], 1e-11, "handed over");
  if (world().size() >= 4) {
    EXPECT_FALSE(same_bytes(results[0].logits, results[1].logits))
        << "one path was compared with itself";
  }
}

TEST(ContextParallelCuts, RecomputeGivesTheSameBytes) {
  const Documents docs = tiny_documents({40, 3, 21});
  const TrainerResult kept = run(docs, "float32", mesh_of_all());
  const TrainerResult again = run(docs, "float32", mesh_of_all(), {}, true);
  EXPECT_TRUE(same_bytes(kept.logits, again.logits));
  for (const auto& [name, grad] : kept.grads)
    EXPECT_TRUE(same_bytes(again.grads.at(name), grad)) << name;
}

TEST(ContextParallelCuts, EveryRankHoldsTheSameGradientBytes) {
  const Documents docs = tiny_documents({33, 8});
  const TrainerResult mine = run(docs, "float32", mesh_of_all());
  for (const auto& [name, grad] : mine.grads) {
    Tensor first = grad.clone();
    world().broadcast(first, 0, name);
    EXPECT_TRUE(same_bytes(first, grad)) << name;
  }
}

}  // namespace
}  // namespace lockstep::tests
