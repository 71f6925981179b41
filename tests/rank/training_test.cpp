// Steps of the optimizer under every kind of topology against one process, and the faults that show
// only over several steps.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "harness/trainer/trainer.hpp"
#include "model/base/tensor_memory.hpp"
#include "model/config/config_json.hpp"
#include "parallel/ep/expert_parallel.hpp"
#include "tests/rank/topologies.hpp"
#include "tests/rank/world.hpp"
#include "tests/support/compare.hpp"
#include "tests/support/tiny_model.hpp"

namespace lockstep::tests {
namespace {

using harness::Documents;
using harness::Trainer;
using harness::TrainStep;
using model::Topology;

/// One topology of each kind that this many ranks allow.
std::vector<Topology> some_topologies() {
  const int64_t n = world().size();
  if (every_topology()) return topologies(n, 4);
  std::vector<Topology> all{{.cp = n}, {.fsdp = n}, {.fsdp = n, .ep = n}, {.dp = n}};
  if (n % 2 == 0) {
    all.push_back({.fsdp = n / 2, .cp = 2, .ep = n});
    all.push_back({.dp = 2, .fsdp = n / 2, .ep = n / 2});
    all.push_back({.fsdp = n / 2, .tp = 2});
  }
  return all;
}

parallel::OptimizerOptions adamw() {
  parallel::OptimizerOptions options;
  options.lr = 3e-3;
  options.weight_decay = 0.1;
  return options;
}

struct Steps {
  std::vector<TrainStep> steps;
  std::map<std::string, Tensor> weights;
};

Steps train(const parallel::Mesh& mesh,
            std::string_view policy,
            parallel::OptimizerOptions optimizer,
            int64_t num_steps,
            bool two_micro_batches = false) {
  harness::TrainerOptions options;
  options.numerics = model::Numerics::policy(policy);
  options.optimizer = optimizer;
  options.router_bias_speed = 1e-3;
  Trainer trainer(tiny(), options, mesh);
  Steps result;
  for (int64_t s = 0; s < num_steps; ++s) {
    const auto seed = static_cast<uint64_t>(s);
    std::vector<Documents> batches;
    if (two_micro_batches) {
      batches = {tiny_documents({33, 1}, seed), tiny_documents({12, 25}, seed + 100)};
    } else {
      batches = {tiny_documents({33, 1, 12, 25}, seed)};
    }
    result.steps.push_back(trainer.train_step(batches));
  }
  result.weights = trainer.weights();
  return result;
}

TEST(Training, FiveStepsEqualOneProcessInFloat64) {
  const Steps one = train(parallel::Mesh::single(), "float64", adamw(), 5);
  EXPECT_LT(one.steps.back().loss, one.steps.front().loss) << "the steps do nothing";
  for (const Topology& topology : some_topologies()) {
    const std::string what = model::to_string(topology);
    const Steps split = train(parallel::Mesh::create(world(), topology), "float64", adamw(), 5);
    for (size_t s = 0; s < 5; ++s) {
      EXPECT_NEAR(split.steps[s].loss, one.steps[s].loss, 1e-9 * one.steps[s].loss)
          << what << " step " << s;
      EXPECT_NEAR(split.steps[s].optimizer.grad_norm / one.steps[s].optimizer.grad_norm, 1, 1e-9)
          << what << " step " << s;
      EXPECT_EQ(split.steps[s].optimizer.num_parameters, one.steps[s].optimizer.num_parameters)
          << what;
    }
    const auto [distance, name] = worst(split.weights, one.weights);
    EXPECT_LE(distance, 1e-9) << what << ": " << name;
  }
}

TEST(Training, MuonOnShardsEqualsOneProcessInFloat64) {
  parallel::OptimizerOptions muon = adamw();
  muon.kind = parallel::OptimizerKind::kMuon;
  muon.beta2 = 0.95;
  const Steps one = train(parallel::Mesh::single(), "float64", muon, 3);
  EXPECT_LT(one.steps.back().loss, one.steps.front().loss) << "the steps do nothing";
  for (const Topology& topology : some_topologies()) {
    const parallel::Mesh mesh = parallel::Mesh::create(world(), topology);
    if (topology.tp > 1) {
      EXPECT_THROW(train(mesh, "float64", muon, 1), Error);
      continue;
    }
    const Steps split = train(mesh, "float64", muon, 3);
    const auto [distance, name] = worst(split.weights, one.weights);
    EXPECT_LE(distance, 1e-11) << model::to_string(topology) << ": " << name;
  }
}

TEST(Training, MicroBatchesAddUpToOneBatch) {
  Topology topology;
  topology.fsdp = world().size();
  const parallel::Mesh mesh = parallel::Mesh::create(world(), topology);
  const Steps one = train(parallel::Mesh::single(), "float64", adamw(), 2, true);
  const Steps split = train(mesh, "float64", adamw(), 2, true);
  const auto [distance, name] = worst(split.weights, one.weights);
  EXPECT_LE(distance, 1e-9) << name;
}

TEST(Training, B19KernelsReadTheWeightsTheOptimizerWrites) {
  parallel::OptimizerOptions sgd;
  sgd.kind = parallel::OptimizerKind::kSgd;
  sgd.lr = 0.5;
  sgd.weight_decay = 0;
  sgd.clip_norm = 0;
  // In float64: steps this large amplify a float32 rounding to 1e-2 in five steps.
  const Steps one = train(parallel::Mesh::single(), "float64", sgd, 5);
  for (const Topology& topology : some_topologies()) {
    const Steps split = train(parallel::Mesh::create(world(), topology), "float64", sgd, 5);
    for (size_t s = 0; s < 5; ++s)
      EXPECT_NEAR(split.steps[s].loss / one.steps[s].loss, 1, 1e-6)
          << model::to_string(topology) << " step " << s;
  }
  // Each trainable tensor moved.
  const Steps none = train(parallel::Mesh::single(), "float64", sgd, 0);
  for (const auto& [name, value] : one.weights) {
    if (name.find("indexer") != std::string::npos) {
      EXPECT_TRUE(same_bytes(value, none.weights.at(name))) << name << " is frozen but moved";
    } else {
      EXPECT_FALSE(same_bytes(value, none.weights.at(name))) << name << " never moved";
    }
  }
}

TEST(Training, B36ReplicatedParametersHaveTheSameBytesOnEveryRank) {
  for (const Topology& topology : some_topologies()) {
    const Steps split =
        train(parallel::Mesh::create(world(), topology), "fsdp-fp32-islands", adamw(), 3);
    for (const auto& [name, value] : split.weights) {
      Tensor first = value.clone();
      world().broadcast(first, 0, name);
      EXPECT_TRUE(same_bytes(first, value)) << model::to_string(topology) << ": " << name;
    }
  }
}

TEST(Training, B03AndB34GradientsDoNotScaleWithAnyAxis) {
  harness::TrainerOptions options;
  options.numerics = model::Numerics::policy("float32");
  options.grads = true;
  const Documents docs = tiny_documents({64}, 3);
  const harness::TrainerResult one = Trainer(tiny(), options, parallel::Mesh::single()).run(docs);
  for (const Topology& topology : some_topologies()) {
    const parallel::Mesh mesh = parallel::Mesh::create(world(), topology);
    const harness::TrainerResult split = Trainer(tiny(), options, mesh).run(docs);
    EXPECT_NEAR(split.loss / one.loss, 1, 1e-5) << model::to_string(topology);
    for (const auto& [name, grad] : one.grads) {
      const double norm = grad.norm().item<double>();
      if (norm < 1e-12) continue;
      EXPECT_NEAR(split.grads.at(name).norm().item<double>() / norm, 1, 1e-4)
          << model::to_string(topology) << ": " << name;
    }
  }
}

/// Every new tensor starts as this byte repeated.
class FilledMemory {
 public:
  explicit FilledMemory(uint8_t pattern) {
    watch_tensor_memory();
    fill_new_tensors(pattern);
  }
  FilledMemory(const FilledMemory&) = delete;
  FilledMemory& operator=(const FilledMemory&) = delete;
  ~FilledMemory() { fill_new_tensors(std::nullopt); }
};

TEST(Training, B37NothingReadsMemoryThatNobodyWrote) {
  Topology topology;
  topology.fsdp = topology.ep = world().size();
  const parallel::Mesh mesh = parallel::Mesh::create(world(), topology);
  for (const char* policy : {"float32", "fsdp-bf16"}) {
    // Three tokens with top-k choices cannot reach all experts: some get none, some get one.
    std::vector<std::map<std::string, Tensor>> weights;
    for (const int pattern : {0x00, 0xff, 0x7f}) {
      const FilledMemory filled(static_cast<uint8_t>(pattern));
      const Tensor fresh = at::empty({3});
      EXPECT_EQ(*static_cast<const uint8_t*>(fresh.const_data_ptr()), pattern);
      harness::TrainerOptions options;
      options.numerics = model::Numerics::policy(policy);
      options.optimizer = adamw();
      options.router_bias_speed = 1e-3;
      Trainer trainer(tiny(), options, mesh);
      for (uint64_t s = 0; s < 3; ++s) {
        const TrainStep step = trainer.train_step({tiny_documents({2, 0, 1}, s)});
        EXPECT_TRUE(std::isfinite(step.loss)) << policy;
      }
      weights.push_back(trainer.weights());
    }
    for (const auto& [name, value] : weights[0]) {
      EXPECT_TRUE(at::isfinite(value).all().item<bool>()) << policy << ": " << name;
      for (size_t i = 1; i < weights.size(); ++i)
        EXPECT_TRUE(same_bytes(value, weights[i].at(name))) << policy << ": " << name;
    }
  }
}

TEST(Training, B40RanksWithoutTokensOrWithoutRowsForTheirExpertsTakePart) {
  // The bias of three experts decides every choice; their rank gets all rows, others none.
  std::map<std::string, Tensor> weights;
  for (const std::string& name : tiny()->names()) {
    weights[name] = tiny()->load(name);
    if (!name.ends_with("e_score_correction_bias")) continue;
    weights[name] = weights[name].clone();
    weights[name].narrow(0, 0, 3).add_(100);
  }
  const auto source =
      std::shared_ptr<const model::WeightSource>(model::memory_source(tiny()->config(), weights));
  harness::TrainerOptions options;
  options.numerics = model::Numerics::policy("float64");
  options.grads = true;
  for (const std::vector<int64_t>& lengths : {std::vector<int64_t>{40, 3}, {1}}) {
    const Documents docs = tiny_documents(lengths, 3);
    const harness::TrainerResult one = Trainer(source, options, parallel::Mesh::single()).run(docs);
    int64_t unused = 0;
    for (const auto& [name, grad] : one.grads) {
      const size_t at = name.find("experts.");
      if (at == std::string::npos || name.find("shared_experts") != std::string::npos) continue;
      const bool used = std::stoll(name.substr(at + 8)) < 3;
      if (used || name.find("layers.0.") != std::string::npos) continue;
      EXPECT_EQ(grad.abs().max().item<double>(), 0) << name;
      ++unused;
    }
    EXPECT_GT(unused, 0);
    for (const Topology& topology : some_topologies()) {
      const parallel::Mesh mesh = parallel::Mesh::create(world(), topology);
      const harness::TrainerResult split = Trainer(source, options, mesh).run(docs);
      EXPECT_LE(rel_l2(split.logits, one.logits), 1e-11) << model::to_string(topology);
      const auto [distance, name] = worst(split.grads, one.grads);
      EXPECT_LE(distance, 1e-11) << model::to_string(topology) << ": " << name;
    }
  }
}

TEST(ExpertParallel, EqualsItsReferenceInEveryByte) {
  const int64_t size = world().size(), experts = 3 * size + 1;
  const std::vector<int64_t> cuts = parallel::even_cuts(experts, size);
  const auto fast = parallel::expert_parallel(world(), cuts);
  const auto plain = parallel::expert_parallel_reference(world(), cuts);
  for (const int64_t skip : {int64_t{0}, int64_t{1}, size}) {
    // Counts by rank and expert, with empty experts, and with a rank that sends nothing (skip = its
    // number).
    std::vector<int64_t> offsets{0};
    for (int64_t e = 0; e < experts; ++e) {
      const int64_t count = world().rank() + 1 == skip ? 0 : (e * 7 + world().rank() * 3) % 4;
      offsets.push_back(offsets.back() + count);
    }
    at::manual_seed(static_cast<uint64_t>(world().rank()));
    const Tensor rows = at::randn({offsets.back(), 5});
    const Tensor tags = at::arange(offsets.back(), at::kLong).div(2, "floor");
    std::vector<Tensor> results;
    for (const auto& exchange : {fast.get(), plain.get()}) {
      const Tensor leaf = rows.clone().requires_grad_(true);
      const model::Dispatched there = exchange->dispatch(leaf, offsets, tags, "test");
      const Tensor scale = at::arange(1, there.rows.size(0) + 1, at::kFloat).unsqueeze(1);
      const Tensor back = exchange->combine(there.rows * scale, there, "test");
      (back * back).sum().backward();
      results.push_back(there.rows.detach());
      results.push_back(at::tensor(there.offsets));
      results.push_back(at::tensor(*there.blocks));
      results.push_back(back.detach());
      results.push_back(leaf.grad());
    }
    for (size_t i = 0; i < 5; ++i)
      EXPECT_TRUE(at::equal(results[i], results[i + 5])) << "skip " << skip << " part " << i;
  }
}

}  // namespace
}  // namespace lockstep::tests
