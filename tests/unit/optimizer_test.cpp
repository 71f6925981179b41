// The optimizer on one rank's shards against plain float64 arithmetic.
#include "parallel/optim/optimizer.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "model/base/seeded.hpp"
#include "parallel/optim/muon.hpp"
#include "tests/support/compare.hpp"

namespace lockstep::tests {
namespace {

using parallel::Optimizer;
using parallel::OptimizerOptions;
using parallel::OptimizerStep;
using parallel::ShardedParameters;

Tensor seeded(const char* name, int64_t count, double amplitude) {
  return at::tensor(seeded_uniform(11, name, count)).mul(amplitude);
}

/// One matrix that is computed with in bfloat16 and kept in float32 for the optimizer.
ShardedParameters mixed(const parallel::Mesh& mesh, const Tensor& start) {
  parallel::ParamSpec spec;
  spec.name = "weight";
  spec.shape = start.sizes().vec();
  spec.compute_dtype = at::kBFloat16;
  spec.load_rows = [start](int64_t begin, int64_t end) {
    return start.narrow(0, begin, end - begin);
  };
  parallel::ShardOptions options;
  options.grads = options.masters = true;
  return {{std::move(spec)}, mesh, options};
}

OptimizerOptions slow() {
  OptimizerOptions options;
  options.lr = 1e-5;
  options.weight_decay = 0.1;
  options.clip_norm = 0;
  return options;
}

TEST(Optimizer, B55MastersFollowAnExactOptimizerWhereBfloat16WouldNotMove) {
  const parallel::Mesh mesh = parallel::Mesh::single();
  const OptimizerOptions options = slow();
  const Tensor start = seeded("start", 64 * 5, 1.0).view({64, 5});
  ShardedParameters params = mixed(mesh, start);
  Optimizer optimizer(params, mesh, options);
  Tensor exact = start.to(at::kDouble), m = at::zeros_like(exact), v = at::zeros_like(exact);
  for (int step = 1; step <= 100; ++step) {
    const Tensor grad =
        seeded(("gradient " + std::to_string(step)).c_str(), 64 * 5, 0.01).view({64, 5});
    params.shards()[0].grad = grad;
    optimizer.step();
    const Tensor g = grad.to(at::kDouble);
    m = m * options.beta1 + g * (1 - options.beta1);
    v = v * options.beta2 + g * g * (1 - options.beta2);
    exact = exact * (1 - options.lr * options.weight_decay) -
            options.lr * (m / (1 - std::pow(options.beta1, step))) /
                ((v / (1 - std::pow(options.beta2, step))).sqrt() + options.eps);
  }
  const Tensor& master = params.shards()[0].value;
  EXPECT_EQ(master.scalar_type(), at::kFloat);
  EXPECT_LE(rel_l2(master, exact), 1e-6);
  EXPECT_GT(rel_l2(master, start), 1e-4) << "the steps do nothing";
  // What is computed with moves only where the steps add up to a rounding step of bfloat16; updated
  // in bfloat16 it would not move at all.
  params.enter(0, model::Pass::kForward);
  const Tensor compute = params.get("weight");
  EXPECT_TRUE(same_bytes(compute, master.to(at::kBFloat16)));
  EXPECT_GT(compute.ne(start.to(at::kBFloat16)).sum().item<int64_t>(), 10);
}

TEST(Optimizer, B55WeightDecayAloneShrinksWeights) {
  const parallel::Mesh mesh = parallel::Mesh::single();
  const OptimizerOptions options = slow();
  const Tensor start = at::cat({seeded("start", 63, 1.0), at::zeros({1})}).view({8, 8});
  ShardedParameters params = mixed(mesh, start);
  Optimizer optimizer(params, mesh, options);
  OptimizerStep last;
  for (int step = 0; step < 100; ++step) {
    params.shards()[0].grad = at::zeros({8, 8});
    last = optimizer.step();
  }
  const Tensor expected =
      start.to(at::kDouble) * std::pow(1 - options.lr * options.weight_decay, 100);
  // Each step shrinks a weight by 8 to 17 steps of float32 and may round half a step to the same
  // side every time: 100 times 2^-24.
  EXPECT_LE(rel_l2(params.shards()[0].value, expected), 100 * 0x1p-24);
  EXPECT_GT(rel_l2(start, expected), 0.9e-4) << "nothing shrank";
  EXPECT_EQ(last.num_parameters, 64);
  EXPECT_LT(last.num_unchanged, 8) << "a float32 master moves at every step unless it is zero";
  EXPECT_GE(last.num_unchanged, 1) << "zero stays";
}

TEST(Optimizer, MuonStepsAlongSingularVectors) {
  const parallel::Mesh mesh = parallel::Mesh::single();
  OptimizerOptions options = slow();
  options.kind = parallel::OptimizerKind::kMuon;
  options.lr = 1e-2;
  for (const auto& [rows, columns] : {std::pair(24, 7), std::pair(7, 24)}) {
    const Tensor start =
        seeded("start", int64_t{rows} * columns, 1.0).to(at::kDouble).view({rows, columns});
    parallel::ParamSpec spec;
    spec.name = "weight";
    spec.shape = start.sizes().vec();
    spec.compute_dtype = at::kDouble;
    spec.load_rows = [&](int64_t begin, int64_t end) {
      return start.narrow(0, begin, end - begin);
    };
    ShardedParameters params({spec}, mesh, {.grads = true, .masters = true, .wide = at::kDouble});
    Optimizer optimizer(params, mesh, options);
    Tensor exact = start.clone(), momentum = at::zeros_like(start);
    for (int step = 1; step <= 3; ++step) {
      const Tensor grad = seeded(("gradient " + std::to_string(step)).c_str(), start.numel(), 0.01)
                              .to(at::kDouble)
                              .view({rows, columns});
      params.shards()[0].grad = grad;
      optimizer.step();
      momentum = momentum * 0.95 + grad;
      auto [u, s, v] = at::linalg_svd(momentum, /*full_matrices=*/false);
      s = s / (momentum.norm() + 1e-8);
      for (const auto& [a, b, c] : {std::array{4.0848, -6.8946, 2.9270},
                                    std::array{3.9505, -6.3029, 2.6377},
                                    std::array{3.7418, -5.5913, 2.3037},
                                    std::array{2.8769, -3.1427, 1.2046},
                                    std::array{2.8366, -3.0525, 1.2012}})
        s = s * a + s.pow(3) * b + s.pow(5) * c;
      EXPECT_NEAR(s.min().item<double>(), 1, 0.2) << "not orthogonal";
      EXPECT_NEAR(s.max().item<double>(), 1, 0.2) << "not orthogonal";
      exact = exact * (1 - options.lr * options.weight_decay) -
              u.mul(s).matmul(v) * (options.lr * 0.2 * std::sqrt(24.0));
    }
    EXPECT_LE(rel_l2(params.shards()[0].value, exact), 1e-12) << rows << " rows";
  }
}

TEST(Optimizer, MuonLeavesVectorsEmbeddingAndHeadToAdamW) {
  using parallel::MuonMatrices;
  const auto kind = [](const char* name, std::vector<int64_t> shape) {
    parallel::ParamSpec spec;
    spec.name = name;
    spec.shape = std::move(shape);
    return parallel::muon_matrices(spec);
  };
  EXPECT_EQ(kind("embed_tokens.weight", {32, 8}), MuonMatrices::kNone);
  EXPECT_EQ(kind("lm_head.weight", {32, 8}), MuonMatrices::kNone);
  EXPECT_EQ(kind("layers.0.self_attn.A_log", {8}), MuonMatrices::kNone);
  EXPECT_EQ(kind("layers.0.self_attn.conv1d.weight", {32, 4}), MuonMatrices::kRows);
  EXPECT_EQ(kind("layers.0.mlp.experts.down_proj", {4, 8, 2}), MuonMatrices::kStack);
  EXPECT_EQ(kind("layers.0.attn_hc.fn", {24, 32}), MuonMatrices::kWhole);
}

TEST(Optimizer, AGradientThatIsNotFiniteIsNamedAndNothingChanges) {
  const parallel::Mesh mesh = parallel::Mesh::single();
  const Tensor start = seeded("start", 20, 1.0).view({4, 5});
  ShardedParameters params = mixed(mesh, start);
  Optimizer optimizer(params, mesh, slow());
  params.shards()[0].grad = at::full({4, 5}, std::nanf(""));
  try {
    optimizer.step();
    FAIL() << "took a step with NaN";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("weight"), std::string::npos) << error.what();
  }
  EXPECT_TRUE(same_bytes(params.shards()[0].value, start));
}

}  // namespace
}  // namespace lockstep::tests
