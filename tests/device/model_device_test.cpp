// The model on a CUDA device: whole models against the CPU, and every kernel that an operator calls
// against the operator's plain form. The goldens are the program's: lockstep golden verify --device
// cuda.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>

#include "harness/trainer/trainer.hpp"
#include "model/base/device.hpp"
#include "model/base/seeded.hpp"
#include "model/ops/conv.hpp"
#include "model/ops/device_kernels.hpp"
#include "model/ops/sparse_mla.hpp"
#include "tests/support/compare.hpp"
#include "tests/support/tiny_model.hpp"

namespace lockstep::tests {
namespace {

using harness::Documents;
using harness::Trainer;
using harness::TrainerOptions;
using harness::TrainerResult;
using model::Numerics;

/// Looks for a device before the first backward of any test.
class DeviceFirst : public testing::Environment {
 public:
  void SetUp() override { static_cast<void>(cuda_problem()); }
};
const testing::Environment* const device_first = testing::AddGlobalTestEnvironment(new DeviceFirst);

class OnCuda : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_problem().empty()) GTEST_SKIP() << cuda_problem();
  }
};

TrainerOptions options(std::string_view policy, std::string_view device) {
  TrainerOptions o;
  o.numerics = Numerics::policy(policy);
  o.grads = true;
  o.device = device_of(device);
  return o;
}

TrainerResult run(const std::shared_ptr<const model::WeightSource>& source,
                  const Documents& docs,
                  const TrainerOptions& o) {
  return Trainer(source, o, parallel::Mesh::single()).run(docs);
}

Documents documents_for(const model::ModelConfig& config, const std::vector<int64_t>& lengths) {
  return harness::random_documents(
      lengths, config.vocab_size, config.pad_token_id.value_or(-1), 11);
}

void expect_same_bytes(const TrainerResult& a, const TrainerResult& b) {
  EXPECT_TRUE(same_bytes(a.logits, b.logits));
  for (const auto& [name, grad] : a.grads) EXPECT_TRUE(same_bytes(grad, b.grads.at(name))) << name;
}

TEST_F(OnCuda, ModelsEqualThoseOfTheCpu) {
  for (const char* preset : {"tiny", "mini"}) {
    const std::shared_ptr<const model::WeightSource> source =
        model::seeded_source(model::preset_config(preset), 7);
    const Documents docs = documents_for(source->config(), {75, 1, 7, 0, 130});
    // In float32 gradients of hyper-connections' scales are sums that nearly cancel.
    for (const auto& [policy, limit] : {std::pair{"float64", 1e-11}, std::pair{"float32", 1e-3}}) {
      const TrainerResult cpu = run(source, docs, options(policy, "cpu"));
      const TrainerResult cuda = run(source, docs, options(policy, "cuda"));
      EXPECT_LE(rel_l2(cuda.logits, cpu.logits), limit) << preset << " " << policy;
      const auto [distance, name] = worst(cuda.grads, cpu.grads);
      EXPECT_LE(distance, limit) << preset << " " << policy << " " << name;
      std::printf("%s %s: logits %.2e, gradients at most %.2e (%s)\n",
                  preset,
                  policy,
                  rel_l2(cuda.logits, cpu.logits),
                  distance,
                  name.c_str());
    }
  }
}

class OnCudaIn : public OnCuda, public testing::WithParamInterface<const char*> {};

TEST_P(OnCudaIn, EveryRunGivesTheSameBytes) {
  const Documents docs = tiny_documents({75, 1, 7, 50});
  const TrainerOptions o = options(GetParam(), "cuda");
  expect_same_bytes(run(tiny(), docs, o), run(tiny(), docs, o));
}

TEST_P(OnCudaIn, RecomputeGivesTheSameBytes) {
  const Documents docs = tiny_documents({75, 1, 7, 50});
  TrainerOptions o = options(GetParam(), "cuda");
  const TrainerResult kept = run(tiny(), docs, o);
  o.recompute = true;
  expect_same_bytes(run(tiny(), docs, o), kept);
}

INSTANTIATE_TEST_SUITE_P(Policies,
                         OnCudaIn,
                         testing::Values("float32", "hf-bf16", "fsdp-fp32-islands"),
                         [](const auto& test) {
                           std::string name = test.param;
                           std::erase(name, '-');
                           return name;
                         });

TEST_F(OnCuda, WhatNeedsTheCpuIsRefused) {
  EXPECT_THROW(Trainer(tiny(), options("invariant-f32", "cuda"), parallel::Mesh::single()), Error);
  TrainerOptions steps = options("float32", "cuda");
  steps.optimizer = parallel::OptimizerOptions{};
  EXPECT_THROW(Trainer(tiny(), steps, parallel::Mesh::single()), Error);
}

/// Heads, streams and ranks as wide as the kernels are made for, everything else small; all keys
/// are selected.
model::ModelConfig wide_config() {
  model::ModelConfig c = model::preset_config("tiny");
  c.hidden_size = 4096;
  c.intermediate_size = 256;
  c.moe_intermediate_size = 128;
  c.num_hidden_layers = 3;
  c.mixers = {model::MixerKind::kKda, model::MixerKind::kDsa, model::MixerKind::kKda};
  c.mlps = {model::MlpKind::kDense, model::MlpKind::kMoe, model::MlpKind::kMoe};
  c.indexer_shared = {false, false, false};
  c.linear_num_heads = 3;
  c.linear_head_dim = 128;
  c.kv_lora_rank = 512;
  c.qk_nope_head_dim = 64;
  c.v_head_dim = 64;
  c.index_topk = 512;
  return c;
}

TEST_F(OnCuda, WideModelThroughKernelsIsAsNearToFloat64AsThePlainForms) {
  const std::shared_ptr<const model::WeightSource> source = model::seeded_source(wide_config(), 7);
  const Documents docs = documents_for(source->config(), {90, 1, 0, 140});
  TrainerOptions o = options("float64", "cuda");
  o.trace = "*.gate.experts";
  const TrainerResult truth = run(source, docs, o);
  TrainerOptions kernels = options("fsdp-fp32-islands", "cuda");
  kernels.numerics.set("D68", "replay");
  kernels.replay.resize(3);
  for (const auto& [name, experts] : truth.trace)
    kernels.replay[static_cast<size_t>(name[7] - '0')] = experts;
  TrainerOptions plain = kernels;
  plain.reference_ops = true;
  const TrainerResult a = run(source, docs, kernels), b = run(source, docs, plain);
  const double logits_a = rel_l2(a.logits, truth.logits), logits_b = rel_l2(b.logits, truth.logits);
  std::printf("wide model: logits %.3e, plain %.3e\n", logits_a, logits_b);
  EXPECT_LE(logits_a, 1.25 * logits_b);
  for (const auto& [name, grad] : truth.grads) {
    const double mine = rel_l2(a.grads.at(name), grad), other = rel_l2(b.grads.at(name), grad);
    std::printf("  %.3e  %.3e  %s\n", mine, other, name.c_str());
    // A few numbers, each a sum over all tokens that nearly cancels, are luck in either form.
    EXPECT_LE(mine, (grad.numel() >= 1000 ? 1.25 : 4) * other) << name;
  }
}

/// Arguments of an operator: float64 values and whether they come in act (else acc).
struct Argument {
  Tensor value;
  bool act;
};
using Body = std::function<std::vector<Tensor>(const std::vector<Tensor>&, const Numerics&)>;

Argument seeded(at::IntArrayRef sizes, const std::string& name, double scale, bool act = true) {
  int64_t count = 1;
  for (const int64_t s : sizes) count *= s;
  const Tensor value =
      at::tensor(seeded_uniform(7, name, count)).view(sizes).to(at::kDouble) * scale;
  return {value.to(at::kBFloat16).to(at::kDouble), act};
}

/// Results, then gradients of a fixed weighting of them.
std::vector<Tensor> evaluate(const std::vector<Argument>& arguments,
                             const Numerics& num,
                             const Body& body) {
  std::vector<Tensor> leaves;
  for (const Argument& a : arguments)
    leaves.push_back(a.value.to(at::kCUDA, a.act ? num.act() : num.acc()).requires_grad_(true));
  std::vector<Tensor> out = body(leaves, num);
  Tensor loss = at::zeros({}, at::TensorOptions(at::kDouble).device(at::kCUDA));
  for (size_t i = 0; i < out.size(); ++i) {
    const Argument weight = seeded(out[i].sizes(), "weight" + std::to_string(i), 1);
    loss = loss + (out[i].to(at::kDouble) * weight.value.to(at::kCUDA)).sum();
  }
  for (const Tensor& grad : torch::autograd::grad({loss}, leaves)) out.push_back(grad);
  for (Tensor& t : out) t = t.detach().to(at::kCPU, at::kDouble);
  return out;
}

/// The kernel's errors against float64 are at most 1.25 times the plain form's, or `floor`.
void expect_as_near(const std::string& name,
                    const std::vector<Argument>& arguments,
                    const Numerics& num,
                    const Body& kernel,
                    const Body& plain,
                    double floor) {
  const auto truth = evaluate(arguments, Numerics::policy("float64"), plain);
  const auto a = evaluate(arguments, num, kernel), b = evaluate(arguments, num, plain);
  for (size_t i = 0; i < truth.size(); ++i) {
    const double mine = rel_l2(a[i], truth[i]), other = rel_l2(b[i], truth[i]);
    std::printf("%s %zu of %zu: %.3e, plain %.3e\n", name.c_str(), i, truth.size(), mine, other);
    EXPECT_LE(mine, std::max(1.25 * other, floor)) << name << " " << i;
  }
}

class Kernels : public OnCuda {
 protected:
  void SetUp() override {
    OnCuda::SetUp();
    if (IsSkipped()) return;
    const Tensor x = at::zeros({8, 8}, at::TensorOptions(at::kBFloat16).device(at::kCUDA)),
                 weight = at::zeros({8, 4}, x.options());
    if (!model::conv_silu_kernel(x, weight, std::vector<int64_t>{0, 8}, {}, num))
      GTEST_SKIP() << "built without device kernels, or a GPU of another generation";
  }
  const Numerics num = Numerics::policy("fsdp-fp32-islands");
};

TEST_F(Kernels, Convolution) {
  const std::vector<int64_t> cu = {0, 70, 70, 71, 150};
  expect_as_near(
      "conv",
      {seeded({150, 64}, "x", 1), seeded({64, 4}, "w", 1, false), seeded({4, 3, 64}, "halo", 1)},
      num,
      [&](const auto& in, const Numerics& n) {
        return std::vector{model::conv_silu_kernel(in[0], in[1], cu, in[2], n).value()};
      },
      [&](const auto& in, const Numerics& n) {
        return std::vector{model::conv_silu_reference(in[0], in[1], cu, in[2], n)};
      },
      1e-6);
}

TEST_F(Kernels, Kda) {
  const auto input = [](const std::vector<Tensor>& in) {
    model::KdaInput kda;
    kda.q = in[0];
    kda.k = in[1];
    kda.v = in[2];
    kda.f = in[3];
    kda.beta_logit = in[4];
    kda.a_log = in[5];
    kda.dt_bias = in[6];
    kda.initial_state = in[7];
    kda.cu = {0, 70, 70, 71, 210};
    kda.lower_bound = -5.0;
    return kda;
  };
  const std::vector<int64_t> rows = {210, 3, 128};
  expect_as_near(
      "kda",
      {seeded(rows, "q", 1),
       seeded(rows, "k", 1),
       seeded(rows, "v", 1),
       seeded(rows, "f", 2),
       seeded({210, 3}, "beta", 1),
       seeded({3}, "a", 0.5, false),
       seeded({384}, "dt", 0.5, false),
       seeded({4, 3, 128, 128}, "state", 0.1, false)},
      num,
      [&](const auto& in, const Numerics& n) {
        const model::KdaOutput out = model::kda_chunk_kernel(input(in), n).value();
        return std::vector{out.o, out.final_state};
      },
      [&](const auto& in, const Numerics& n) {
        const model::KdaOutput out = model::kda_chunk_reference(input(in), n);
        return std::vector{out.o, out.final_state};
      },
      1e-2);
}

TEST_F(Kernels, HyperConnections) {
  const model::HcParams params{1e-5, 1e-6, 20};
  expect_as_near(
      "hc in",
      {seeded({37, 4, 4096}, "x", 1),
       seeded({24, 16384}, "fn", 0.02, false),
       seeded({24}, "base", 0.5, false),
       seeded({3}, "scale", 1, false),
       seeded({4096}, "norm", 1, false)},
      num,
      [&](const auto& in, const Numerics& n) {
        const auto out =
            model::hc_pre_kernel(in[0], in[1], in[2], in[3], in[4], params, n, {}).value();
        return std::vector{out.x_normed, out.post, out.comb};
      },
      [&](const auto& in, const Numerics& n) {
        const auto out = model::hc_pre_reference(in[0], in[1], in[2], in[3], in[4], params, n);
        return std::vector{out.x_normed, out.post, out.comb};
      },
      2e-3);
  expect_as_near(
      "hc out",
      {seeded({37, 4096}, "y", 1),
       seeded({37, 4, 4096}, "x", 1),
       seeded({37, 4}, "post", 1, false),
       seeded({37, 4, 4}, "comb", 1, false)},
      num,
      [&](const auto& in, const Numerics& n) {
        return std::vector{model::hc_post_kernel(in[0], in[1], in[2], in[3], n).value()};
      },
      [&](const auto& in, const Numerics& n) {
        return std::vector{model::hc_post_reference(in[0], in[1], in[2], in[3], n)};
      },
      2e-3);
}

TEST_F(Kernels, Experts) {
  const int64_t tokens = 61, slots = 3, experts = 5;
  const Tensor chosen = at::arange(tokens * slots, at::kLong).mul(7).remainder(experts - 1);
  const model::ExpertOrder order =
      model::order_by_expert(chosen.view({tokens, slots}).to(at::kCUDA), experts);
  expect_as_near(
      "gather",
      {seeded({tokens, 72}, "x", 1)},
      num,
      [&](const auto& in, const Numerics&) {
        return std::vector{model::gather_rows_kernel(in[0], order).value()};
      },
      [&](const auto& in, const Numerics&) {
        return std::vector{in[0].index_select(0, order.token)};
      },
      1e-6);
  expect_as_near(
      "combine",
      {seeded({tokens * slots, 72}, "rows", 1), seeded({tokens, slots}, "w", 1, false)},
      num,
      [&](const auto& in, const Numerics& n) {
        return std::vector{model::combine_experts_kernel(in[0], order, in[1], n).value()};
      },
      [&](const auto& in, const Numerics& n) {
        return std::vector{model::combine_experts_reference(in[0], order, in[1], n)};
      },
      1e-6);
  expect_as_near(
      "experts",
      {seeded({tokens * slots, 256}, "rows", 1),
       seeded({experts, 256, 256}, "gate", 0.2),
       seeded({experts, 256, 128}, "down", 0.2)},
      num,
      [&](const auto& in, const Numerics& n) {
        return std::vector{
            model::grouped_experts_kernel(in[0], order.offsets, in[1], in[2], 10.0, n).value()};
      },
      [&](const auto& in, const Numerics& n) {
        return std::vector{
            model::grouped_experts_reference(in[0], order.offsets, in[1], in[2], 10.0, n)};
      },
      1e-6);
}

TEST_F(Kernels, SparseMla) {
  const int64_t tokens = 90, heads = 5, dim = 64, d_v = 32, width = 37;
  Tensor selection = at::arange(tokens * width, at::kLong).mul(29).remainder(tokens + 3).sub(3);
  selection = selection.clamp_min(-1).to(at::kInt).view({tokens, width}).to(at::kCUDA);
  expect_as_near(
      "sparse MLA",
      {seeded({tokens, heads, dim}, "q", 1),
       seeded({tokens, 512}, "latent", 1),
       seeded({heads * (dim + d_v), 512}, "kv", 0.1)},
      num,
      [&](const auto& in, const Numerics& n) {
        return std::vector{
            model::sparse_mla_kernel(in[0], in[1], in[2], selection, d_v, n).value()};
      },
      [&](const auto& in, const Numerics& n) {
        return std::vector{model::sparse_mla_reference(in[0], in[1], in[2], selection, d_v, n)};
      },
      8e-3);
}

}  // namespace
}  // namespace lockstep::tests
