// Tensor memory of a training step: what the allocator saw against what the plan says.
#include <gtest/gtest.h>

#include "harness/trainer/trainer.hpp"
#include "model/base/tensor_memory.hpp"
#include "model/checkpoint/parameters.hpp"
#include "model/config/config_json.hpp"
#include "parallel/plan/step_memory.hpp"
#include "tests/rank/world.hpp"

namespace lockstep::tests {
namespace {

using harness::Documents;
using harness::Trainer;
using model::Topology;
using parallel::OptimizerKind;

/// Experts and a vocabulary that outweigh the rest, as in the real model; 62M parameters.
model::ModelConfig fifty_million() {
  model::ModelConfig c = model::preset_config("mini");
  c.vocab_size = 4096;
  c.moe_intermediate_size = 256;
  c.n_routed_experts = 40;
  c.num_experts_per_tok = 4;
  c.num_hidden_layers = 8;
  for (size_t i = 4; i < 8; ++i) {
    c.mixers.push_back(c.mixers[i - 4]);
    c.mlps.push_back(model::MlpKind::kMoe);
    c.indexer_shared.push_back(false);
  }
  model::validate(c, "a model of 62M parameters");
  return c;
}

/// Of every layer with experts, those each token of the batch went to.
std::map<int64_t, Tensor> routes(const harness::TrainerResult& result) {
  std::map<int64_t, Tensor> experts;
  for (const auto& [name, value] : result.trace)
    experts[std::stoll(name.substr(std::string("layers.").size()))] = value;
  return experts;
}

struct Case {
  Topology topology;
  std::string policy;
  bool recompute;
  OptimizerKind optimizer = OptimizerKind::kAdamW;
  [[nodiscard]] std::string name() const {
    return fmt::format("{}, {}{}, {}",
                       model::to_string(topology),
                       policy,
                       recompute ? ", recompute" : "",
                       parallel::optimizer_name(optimizer));
  }
};

struct Measured {
  MemoryUse use, planned;
};

Measured measure(const std::shared_ptr<const model::WeightSource>& source,
                 const Case& with,
                 const std::vector<int64_t>& lengths) {
  watch_tensor_memory();
  harness::TrainerOptions options;
  options.numerics = model::Numerics::policy(with.policy);
  options.recompute = with.recompute;
  const Documents docs =
      harness::random_documents(lengths, source->config().vocab_size, 0, /*seed=*/3);
  const parallel::Mesh mesh = parallel::Mesh::create(world(), with.topology);
  parallel::StepPlan plan{.config = source->config(),
                          .num = options.numerics,
                          .topology = with.topology,
                          .batch = docs.packing,
                          .cp_cuts = {},
                          .recompute = with.recompute,
                          .balance = false,
                          .optimizer = with.optimizer,
                          .routes = {}};
  if (with.topology.ep > 1) {
    options.trace = "layers.*.mlp.gate.experts";
    plan.routes = routes(Trainer(source, options, mesh).run(docs));
    options.trace.clear();
  }
  options.optimizer = parallel::OptimizerOptions{.kind = with.optimizer};
  const MemoryBytes before = tensor_memory().now;
  Trainer trainer(source, options, mesh);
  reset_tensor_memory_peak();
  (void)trainer.train_step({docs});
  Measured result;
  result.use = tensor_memory();
  for (size_t k = 0; k < kNumMemoryKinds; ++k) {
    result.use.now[k] -= before[k];
    result.use.peak[k] -= before[k];
    result.use.at_peak[k] -= before[k];
    result.use.peak_total -= before[k];
  }
  result.planned = parallel::step_memory(plan, world().rank());
  return result;
}

/// Every kind, and the sum, but for kinds below a thousandth of the whole: scalars and indices.
void expect_planned(const Measured& m, double limit, const std::string& what) {
  const double small = static_cast<double>(m.use.peak_total) / 1000;
  std::string table =
      fmt::format("memory of a step, {}: rank {}, measured and planned\n", what, world().rank());
  const auto line = [&](std::string_view name, int64_t used, int64_t planned) {
    table += fmt::format("  {:<18} {:>12} {:>12}\n", name, used, planned);
    EXPECT_NEAR(static_cast<double>(planned),
                static_cast<double>(used),
                std::max(limit * static_cast<double>(used), small))
        << what << ": " << name << " of rank " << world().rank();
  };
  for (const MemoryKind kind : kMemoryKinds)
    line(to_string(kind), m.use.peak_of(kind), m.planned.peak_of(kind));
  line("all", m.use.peak_total, m.planned.peak_total);
  if (testing::Test::HasFailure()) fmt::print("{}", table);
}

TEST(StepMemory, OfFiftyMillionParametersOnFourRanksIsThatOfThePlan) {
  if (world().size() != 4) GTEST_SKIP() << "four ranks";
  const model::ModelConfig config = fifty_million();
  int64_t elements = 0, experts = 0;
  for (const model::Parameter& p : model::expected_parameters(config)) {
    elements += p.numel();
    if (p.layer == 1 && p.expert) experts += p.numel();
  }
  EXPECT_GE(elements, 50'000'000);
  const auto source = std::shared_ptr<const model::WeightSource>(model::seeded_source(config, 7));
  for (const Case& with : {Case{{.fsdp = 4}, "float32", false},
                           Case{{.fsdp = 4}, "fsdp-fp32-islands", false},
                           Case{{.fsdp = 4}, "fsdp-fp32-islands", true},
                           Case{{.fsdp = 4}, "fsdp-fp32-islands", true, OptimizerKind::kMuon}}) {
    const Measured m = measure(source, with, {300, 200, 250, 274});
    expect_planned(m, 0.01, with.name());
    // One layer is computed with while the next one arrives.
    const int64_t layer = experts * (with.policy == "float32" ? 4 : 2);
    EXPECT_LE(m.use.peak_of(MemoryKind::kGatheredExperts), 2 * layer) << with.name();
    EXPECT_GE(m.use.peak_of(MemoryKind::kGatheredExperts), layer) << "nothing was counted";
  }
}

/// With few tokens and large matrices, so that the optimizer's step needs more than backward: of
/// one rank's stacks of experts in bfloat16, and of a gathered matrix.
TEST(StepMemory, OfMuonsMatricesIsThatOfThePlan) {
  const int64_t n = world().size();
  if (n > 4) GTEST_SKIP() << "the model has four heads";
  model::ModelConfig config = fifty_million();
  if (n > 1) {
    config = model::preset_config("mini");
    config.intermediate_size = 4096;
  }
  const auto source = std::shared_ptr<const model::WeightSource>(model::seeded_source(config, 7));
  std::vector<Topology> all{{.fsdp = n}};
  if (n == 4) all.push_back({.dp = 2, .cp = 2});
  for (const Topology& topology : all) {
    Case with{topology, n == 1 ? "float32" : "float64", true, OptimizerKind::kMuon};
    const Measured muon = measure(source, with, {3, 2, 2, 3});
    expect_planned(muon, 0.1, with.name());
    with.optimizer = OptimizerKind::kAdamW;
    const Measured adamw = measure(source, with, {3, 2, 2, 3});
    expect_planned(adamw, 0.1, with.name());
    EXPECT_GT(muon.use.peak_of(MemoryKind::kActivations),
              1.3 * static_cast<double>(adamw.use.peak_of(MemoryKind::kActivations)))
        << "Muon's matrices are not what was measured";
  }
}

TEST(StepMemory, OfEveryAxisIsThatOfThePlan) {
  const auto source = std::shared_ptr<const model::WeightSource>(
      model::seeded_source(model::preset_config("mini"), 7));
  const int64_t n = world().size();
  if (n > 4) GTEST_SKIP() << "the model has four heads";
  std::vector<Topology> all{{.fsdp = n}};
  if (n > 1) {
    all = {{.dp = n}, {.cp = n}, {.tp = n}, {.fsdp = n, .ep = n}};
    if (n == 4) all.push_back({.fsdp = 2, .cp = 2, .ep = 4});
  }
  for (const Topology& topology : all) {
    for (const Case& with : {Case{topology, "fsdp-fp32-islands", false},
                             Case{topology, "fsdp-fp32-islands", true},
                             Case{topology, "invariant-bf16", false},
                             Case{topology, "fsdp-fp32-islands", true, OptimizerKind::kMuon},
                             Case{topology, "float64", false, OptimizerKind::kMuon}}) {
      // No exact gradients there, and no whole matrices.
      if (topology.tp > 1 &&
          (with.policy.starts_with("invariant") || with.optimizer == OptimizerKind::kMuon))
        continue;
      expect_planned(measure(source, with, {200, 57, 1, 254}), 0.1, with.name());
    }
  }
}

}  // namespace
}  // namespace lockstep::tests
