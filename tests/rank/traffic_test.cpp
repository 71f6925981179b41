// Bytes of a training step: the formula against what the ledger saw.
#include "parallel/plan/traffic.hpp"

#include <gtest/gtest.h>

#include "harness/trainer/trainer.hpp"
#include "model/config/config_json.hpp"
#include "model/layers/context.hpp"
#include "parallel/comm/ledger.hpp"
#include "parallel/plan/footprint.hpp"
#include "parallel/plan/placement.hpp"
#include "tests/rank/world.hpp"
#include "tests/support/compare.hpp"
#include "tests/support/tiny_model.hpp"

namespace lockstep::tests {
namespace {

using harness::Documents;
using harness::Trainer;
using harness::TrainerOptions;
using model::Topology;
using parallel::Circle;
using parallel::Traffic;

/// Over all purposes.
using Totals = std::map<std::string, Traffic>;

Totals in_ledger() {
  Totals totals;
  for (const parallel::LedgerTotals& sum : parallel::ledger_totals())
    totals[sum.group] = {Circle::kAll, "", sum.calls, sum.bytes_sent, sum.bytes_received};
  return totals;
}

Totals by_formula(const std::vector<Traffic>& lines) {
  Totals totals;
  for (const Traffic& line : lines) {
    Traffic& sum = totals[std::string(parallel::circle_name(line.circle))];
    sum.calls += line.calls;
    sum.bytes_sent += line.bytes_sent;
    sum.bytes_received += line.bytes_received;
  }
  return totals;
}

/// Of every layer with experts, those each token of the batch went to.
std::map<int64_t, Tensor> routes(const harness::TrainerResult& result) {
  std::map<int64_t, Tensor> experts;
  for (const auto& [name, value] : result.trace)
    experts[std::stoll(name.substr(std::string("layers.").size()))] = value;
  return experts;
}

/// Every axis alone, and products of them.
std::vector<Topology> some_topologies() {
  const int64_t n = world().size();
  std::vector<Topology> all{
      {.dp = n}, {.fsdp = n}, {.fsdp = n, .ep = n}, {.cp = n}, {.cp = n, .ep = n}};
  if (n <= 4) all.push_back({.tp = n});
  if (n % 4 == 0) {
    all.push_back({.fsdp = n / 2, .tp = 2, .ep = n / 2});
    all.push_back({.fsdp = n / 2, .cp = 2, .ep = n});
    all.push_back({.dp = n / 2, .cp = 2, .ep = 2});
  }
  return all;
}

struct Case {
  std::string name, policy, sums, states;  ///< D61, D62
  bool recompute;
  parallel::OptimizerKind optimizer = parallel::OptimizerKind::kAdamW;
};

class StepBytes : public testing::TestWithParam<Case> {};

TEST_P(StepBytes, OfEveryAxisAreThoseOfTheFormula) {
  TrainerOptions options;
  options.numerics = model::Numerics::policy(GetParam().policy);
  options.numerics.set("D61", GetParam().sums);
  options.numerics.set("D62", GetParam().states);
  options.recompute = GetParam().recompute;
  options.trace = "layers.*.mlp.gate.experts";
  options.optimizer = parallel::OptimizerOptions{.kind = GetParam().optimizer};
  options.router_bias_speed = 1e-3;
  const Documents docs = tiny_documents({33, 1, 12, 25, 40}, 3);
  for (const Topology& topology : some_topologies()) {
    // No exact gradients there, and no whole matrices.
    if (topology.tp > 1 &&
        (options.numerics.invariant() || GetParam().optimizer == parallel::OptimizerKind::kMuon))
      continue;
    const parallel::Mesh mesh = parallel::Mesh::create(world(), topology);
    Trainer trainer(tiny(), options, mesh);
    const std::map<int64_t, Tensor> experts = routes(trainer.run(docs));
    const Totals before = in_ledger();
    (void)trainer.train_step({docs});
    const Totals after = in_ledger();
    const parallel::StepPlan plan{.config = tiny()->config(),
                                  .num = options.numerics,
                                  .topology = topology,
                                  .batch = docs.packing,
                                  .cp_cuts = {},
                                  .recompute = options.recompute,
                                  .balance = true,
                                  .optimizer = GetParam().optimizer,
                                  .routes = experts};
    const std::vector<Traffic> lines = parallel::step_traffic(plan, world().rank());
    Totals expected = by_formula(lines);
    const std::string what = model::to_string(topology) + ", " + GetParam().name;
    for (const Circle circle : parallel::kCircles) {
      const std::string name(parallel::circle_name(circle));
      const auto moved = [&](const Totals& totals) {
        const auto found = totals.find(name);
        return found == totals.end() ? Traffic{} : found->second;
      };
      const Traffic a = moved(after), b = moved(before), want = moved(expected);
      EXPECT_EQ(a.calls - b.calls, want.calls) << what << ": calls of " << name;
      EXPECT_EQ(a.bytes_sent - b.bytes_sent, want.bytes_sent) << what << ": " << name;
      EXPECT_EQ(a.bytes_received - b.bytes_received, want.bytes_received) << what << ": " << name;
    }
    if (world().rank() != 0) continue;
    fmt::print("bytes of a step, {}: rank 0, by formula and in the ledger\n", what);
    for (const Traffic& line : lines)
      fmt::print("  {:<12} {:<22} {:>5} calls {:>12} sent {:>12} received\n",
                 parallel::circle_name(line.circle),
                 line.what,
                 line.calls,
                 line.bytes_sent,
                 line.bytes_received);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Numerics,
    StepBytes,
    testing::Values(
        Case{"Float32", "float32", "one", "handover", false},
        Case{"BFloat16SplitSumsAffineStatesRecompute",
             "fsdp-fp32-islands",
             "tp",
             "affine-fp32",
             true},
        Case{"InvariantBfloat16", "invariant-bf16", "one", "handover", true},
        Case{"Float32Muon", "float32", "one", "handover", false, parallel::OptimizerKind::kMuon},
        Case{"InvariantBfloat16Muon",
             "invariant-bf16",
             "one",
             "handover",
             true,
             parallel::OptimizerKind::kMuon}),
    [](const auto& c) { return c.param.name; });

/// What one training step on these documents moved and left.
struct Stepped {
  std::map<int64_t, Tensor> experts;      ///< of each token, by layer
  Totals moved;                           ///< of this rank, by circle
  std::map<std::string, Tensor> weights;  ///< after the step
  int64_t ep_bytes = 0;                   ///< sent on all ranks
};

Stepped step(const TrainerOptions& options, const parallel::Mesh& mesh, const Documents& docs) {
  Trainer trainer(tiny(), options, mesh);
  Stepped result{routes(trainer.run(docs)), {}, {}, 0};
  const Totals before = in_ledger();
  (void)trainer.train_step({docs});
  result.moved = in_ledger();
  for (auto& [name, sum] : result.moved) {
    const auto old = before.find(name);
    if (old == before.end()) continue;
    sum.calls -= old->second.calls;
    sum.bytes_sent -= old->second.bytes_sent;
    sum.bytes_received -= old->second.bytes_received;
  }
  result.weights = trainer.weights();
  const std::string ep(parallel::circle_name(Circle::kEp));
  for (const int64_t sent : world().all_gather(result.moved[ep].bytes_sent, "bytes of ep"))
    result.ep_bytes += sent;
  return result;
}

TEST(StepPadding, B39PaddingIsNeitherRoutedNorCountedNorSent) {
  TrainerOptions options;
  options.numerics = model::Numerics::policy("float64");
  options.trace = "layers.*.mlp.gate.experts";
  options.optimizer = parallel::OptimizerOptions{};
  options.router_bias_speed = 1e-3;
  const int64_t top_k = tiny()->config().num_experts_per_tok;
  // 40 tokens and 24 of padding.
  const Tensor row = at::cat(
      {tiny_documents({40}, 4).ids, at::full({24}, *tiny()->config().pad_token_id, at::kLong)});
  const std::vector<int64_t> bounds{0, 23, 40};
  const Documents bare = harness::from_row(row.narrow(0, 0, 40), bounds),
                  padded = harness::from_row(row, bounds),
                  taken_for_tokens = harness::from_row(row, {0, 23, 40, 64});
  for (const Topology& topology : some_topologies()) {
    const std::string what = model::to_string(topology);
    const parallel::Mesh mesh = parallel::Mesh::create(world(), topology);
    const Stepped without = step(options, mesh, bare), with = step(options, mesh, padded);
    const parallel::StepPlan plan{.config = tiny()->config(),
                                  .num = options.numerics,
                                  .topology = topology,
                                  .batch = bare.packing,
                                  .cp_cuts = {},
                                  .recompute = false,
                                  .balance = true,
                                  .routes = without.experts};
    Totals expected = by_formula(parallel::step_traffic(plan, world().rank()));
    for (const Circle circle : parallel::kCircles) {
      const std::string name(parallel::circle_name(circle));
      const auto find = [&](const Totals& totals) {
        const auto found = totals.find(name);
        return found == totals.end() ? Traffic{} : found->second;
      };
      const Traffic a = find(with.moved), b = find(without.moved), want = find(expected);
      EXPECT_EQ(a.bytes_sent, b.bytes_sent) << what << ": " << name;
      EXPECT_EQ(a.bytes_received, b.bytes_received) << what << ": " << name;
      EXPECT_EQ(a.bytes_sent, want.bytes_sent) << what << ": " << name;
      EXPECT_EQ(a.bytes_received, want.bytes_received) << what << ": " << name;
    }
    size_t num_biases = 0;
    for (const auto& [name, value] : with.weights) {
      EXPECT_TRUE(same_bytes(value, without.weights.at(name))) << what << ": " << name;
      if (!name.ends_with("e_score_correction_bias")) continue;
      ++num_biases;
      const int64_t layer = std::stoll(name.substr(name.find("layers.") + 7));
      const std::string stored = name.substr(name.find("layers."));
      const Tensor load =
          at::bincount(with.experts.at(layer).reshape({-1}), {}, tiny()->config().n_routed_experts);
      EXPECT_EQ(load.sum().item<int64_t>(), 40 * top_k) << what << ": " << name;
      const Tensor counts = load.to(at::kDouble);
      const Tensor moved = (counts.mean() - counts).sign().mul(options.router_bias_speed);
      EXPECT_TRUE(at::equal(value, tiny()->load(stored).to(at::kDouble).add(moved).to(value)))
          << what << ": " << name;
    }
    EXPECT_EQ(num_biases, with.experts.size());
    // Padding that takes part is seen.
    const Stepped wrong = step(options, mesh, taken_for_tokens);
    if (topology.ep > 1) {
      EXPECT_EQ(with.ep_bytes, without.ep_bytes) << what;
      EXPECT_GT(wrong.ep_bytes, with.ep_bytes) << what;
    }
  }
}

TEST(Footprint, IsThatOfTheShards) {
  const model::Numerics num = model::Numerics::policy("fsdp-fp32-islands");
  const model::ModelConfig& config = tiny()->config();
  for (const Topology& topology : some_topologies()) {
    const parallel::Mesh mesh = parallel::Mesh::create(world(), topology);
    parallel::ShardOptions options;
    options.masters = true;
    options.wide = num.acc();
    options.head_unit = model::head_unit(config.num_hidden_layers);
    const parallel::ShardedParameters params(
        parallel::parameter_specs(*tiny(), num, mesh), mesh, options);
    int64_t elements = 0, bytes = 0, trained = 0;
    for (const parallel::Shard& shard : params.shards()) {
      elements += shard.value.numel();
      bytes += static_cast<int64_t>(shard.value.nbytes());
      if (shard.spec.trainable) trained += static_cast<int64_t>(shard.value.nbytes());
    }
    parallel::Footprint sum;
    const Packing batch = Packing::whole({0, 1});
    const parallel::StepPlan plan{.config = config,
                                  .num = num,
                                  .topology = topology,
                                  .batch = batch,
                                  .cp_cuts = {},
                                  .recompute = false,
                                  .balance = false,
                                  .routes = {}};
    for (const parallel::Footprint& f : parallel::footprint(plan, world().rank())) {
      sum.elements += f.elements;
      sum.parameters += f.parameters;
      sum.gradients += f.gradients;
    }
    EXPECT_EQ(sum.elements, elements) << model::to_string(topology);
    EXPECT_EQ(sum.parameters, bytes) << model::to_string(topology);
    EXPECT_EQ(sum.gradients, trained) << model::to_string(topology);
  }
}

}  // namespace
}  // namespace lockstep::tests
