// Output head: log-probabilities in chunks and panels against the plain form.
#include "model/ops/head.hpp"
#include "tests/unit/ops_test_support.hpp"

namespace lockstep::model {
namespace {

using namespace test;

Tensor some_labels(int64_t T, int64_t V) {
  Tensor labels = at::empty({T}, at::kLong);
  for (int64_t t = 0; t < T; ++t) {
    labels.data_ptr<int64_t>()[t] = t % 5 == 3 ? -1 : (t * 7919) % V;
  }
  return labels;
}

std::vector<Tensor> head_inputs(int64_t T, int64_t D, int64_t V, const Numerics& num) {
  return {random("h", {T, D}).to(num.act()), random("w", {V, D}, 0.3).to(num.act())};
}

using HeadForm = std::function<HeadOutput(
    const Tensor&, const Tensor&, const Tensor&, const HeadOptions&, const Numerics&)>;

TensorFunction head_with(HeadForm form,
                         const Tensor& labels,
                         const HeadOptions& options,
                         const Numerics& num) {
  return [=](const std::vector<Tensor>& in) {
    const HeadOutput out = form(in[0], in[1], labels, options, num);
    return options.entropy ? std::vector<Tensor>{out.logprobs, out.entropy}
                           : std::vector<Tensor>{out.logprobs};
  };
}

TEST(Head, FastFormEqualsAutogradOfThePlainFormInFloat64) {
  const Numerics num = Numerics::policy("float64");
  for (const auto& [T, V] : std::vector<std::pair<int64_t, int64_t>>{
           {0, 9}, {1, 1}, {1, 131}, {70, 131}, {300, 4097}, {5, 9000}}) {
    for (const int64_t chunk : {1024, 64, 3}) {
      const auto inputs = head_inputs(T, 12, V, num);
      const HeadOptions options{.temperature = 0.7, .entropy = true, .token_chunk = chunk};
      const Tensor labels = some_labels(T, V);
      expect_close(evaluate(head_with(head_logprobs, labels, options, num), inputs),
                   evaluate(head_with(head_logprobs_reference, labels, options, num), inputs),
                   1e-14,
                   1e-13,
                   fmt::format("T {} V {} chunk {} ", T, V, chunk));
    }
  }
}

TEST(Head, FastFormEqualsThePlainFormForEverySwitch) {
  for (const char* policy : {"float32", "hf-bf16"}) {
    for (const char* output : {"bf16", "fp32"}) {
      for (const char* temperature : {"multiply", "divide", "raw"}) {
        for (const char* tiles : {"library", "fixed-tiles"}) {
          const Numerics num =
              with(policy, {{"D59", output}, {"D60", temperature}, {"D63", tiles}});
          const auto inputs = head_inputs(131, 24, 300, num);
          const HeadOptions options{.temperature = 1.3, .entropy = true, .token_chunk = 50};
          const Tensor labels = some_labels(131, 300);
          const Evaluated fast = evaluate(head_with(head_logprobs, labels, options, num), inputs);
          const Evaluated plain =
              evaluate(head_with(head_logprobs_reference, labels, options, num), inputs);
          expect_close(
              fast, plain, num.is_bf16() ? 2e-4 : 1e-6, num.is_bf16() ? 4e-3 : 3e-6, num.name());
        }
      }
    }
  }
}

TEST(Head, TemperatureScalesLogitsUnlessRaw) {
  const Numerics num = Numerics::policy("float64");
  const auto in = head_inputs(9, 6, 20, num);
  const Tensor labels = some_labels(9, 20), z = at::matmul(in[0], in[1].t());
  const Tensor want =
      at::log_softmax(z / 2, 1).gather(1, labels.clamp_min(0).unsqueeze(1)).squeeze(1);
  const HeadOptions options{.temperature = 2.0};
  const Tensor got = head_logprobs(in[0], in[1], labels, options, num).logprobs;
  EXPECT_LE(max_abs(got, want.masked_fill(labels < 0, 0)), 1e-14);
  const Numerics raw = with("float64", {{"D60", "raw"}});
  const Tensor untouched = head_logprobs(in[0], in[1], labels, options, raw).logprobs;
  EXPECT_TRUE(same_bytes(untouched, head_logprobs(in[0], in[1], labels, {}, num).logprobs));
}

TEST(Head, TokensWithoutLabelGiveZeroAndNoGradient) {
  const Numerics num = Numerics::policy("float32");
  const auto inputs = head_inputs(140, 8, 30, num);
  const Tensor none = at::full({140}, -1, at::kLong);
  const Evaluated r = evaluate(head_with(head_logprobs, none, {}, num), inputs);
  EXPECT_EQ(r.outputs[0].abs().max().item<float>(), 0);
  for (const Tensor& g : r.gradients) EXPECT_EQ(g.abs().max().item<float>(), 0);
}

TEST(Head, UniformLogitsGiveMinusLogVocabularyAndFullEntropy) {
  for (const char* policy : {"float64", "float32", "hf-bf16"}) {
    const Numerics num = Numerics::policy(policy);
    const HeadOutput r = head_logprobs(at::zeros({3, 4}, num.act()),
                                       at::ones({5000, 4}, num.act()),
                                       some_labels(3, 5000),
                                       {.entropy = true},
                                       num);
    EXPECT_NEAR(r.logprobs[0].item<double>(), -std::log(5000.0), 2e-6);
    EXPECT_NEAR(r.entropy[2].item<double>(), std::log(5000.0), 2e-6);
  }
}

TEST(Head, LargeLogitsNeitherOverflowNorVanish) {
  const Numerics num = Numerics::policy("float32");
  const Tensor h = at::full({1, 1}, 300.0f), w = at::tensor({1.0f, -1.0f, 0.5f}).reshape({3, 1});
  const HeadOutput r = head_logprobs(h, w, at::zeros({1}, at::kLong), {.entropy = true}, num);
  EXPECT_EQ(r.logprobs.item<float>(), 0.0f);
  EXPECT_EQ(r.entropy.item<float>(), 0.0f);
}

TEST(Head, AllLogitsAreRoundedWhereThePolicySaysSo) {
  for (const char* output : {"bf16", "fp32"}) {
    const Numerics num = with("hf-bf16", {{"D59", output}});
    const auto in = head_inputs(7, 16, 50, num);
    const Tensor z = head_logits(in[0], in[1], num);
    EXPECT_EQ(z.scalar_type(), at::kFloat);
    const Tensor exact = at::matmul(in[0].to(at::kDouble), in[1].to(at::kDouble).t());
    EXPECT_EQ(same_bytes(z, z.to(at::kBFloat16).to(at::kFloat)), std::string(output) == "bf16");
    EXPECT_LE(rel_l2(z, exact), std::string(output) == "bf16" ? 4e-3 : 1e-6);
  }
}

TEST(Head, ResultsDependNeitherOnThreadsNorOnTheCall) {
  for (const char* policy : {"float64", "float32", "hf-bf16"}) {
    const Numerics num = Numerics::policy(policy);
    const auto inputs = head_inputs(333, 48, 700, num);
    const HeadOptions options{.temperature = 0.9, .entropy = true, .token_chunk = 200};
    const auto run = [&] {
      return evaluate(head_with(head_logprobs, some_labels(333, 700), options, num), inputs);
    };
    const Evaluated many = run();
    expect_same(many, run(), "twice");
    expect_same(many, on_one_thread(run), "one thread");
  }
}

TEST(Head, WithFixedTilesALogprobDoesNotSeeItsNeighbours) {
  const Numerics num = with("float32", {{"D63", "fixed-tiles"}});
  const auto in = head_inputs(150, 96, 5000, num);
  const Tensor labels = some_labels(150, 5000);
  const Tensor whole = head_logprobs(in[0], in[1], labels, {}, num).logprobs;
  for (const int64_t t : {0, 64, 101, 149}) {
    const Tensor alone =
        head_logprobs(in[0].slice(0, t, t + 1), in[1], labels.slice(0, t, t + 1), {}, num).logprobs;
    EXPECT_TRUE(same_bytes(alone, whole.slice(0, t, t + 1))) << t;
  }
}

TEST(Head, WrongArgumentsAreNamed) {
  const Numerics num = Numerics::policy("float32");
  const Tensor h = at::zeros({2, 4}), w = at::zeros({9, 4});
  EXPECT_THROW(head_logprobs(h, w, at::full({2}, 9, at::kLong), {}, num), Error);
  EXPECT_THROW(head_logprobs(h, w, at::full({2}, -2, at::kLong), {}, num), Error);
  EXPECT_THROW(head_logprobs(h, w, at::zeros({3}, at::kLong), {}, num), Error);
  EXPECT_THROW(head_logprobs(h, at::zeros({9, 5}), at::zeros({2}, at::kLong), {}, num), Error);
  EXPECT_THROW(head_logprobs(h, w, at::zeros({2}, at::kLong), {.temperature = 0}, num), Error);
  EXPECT_THROW(head_logits(h, at::zeros({9, 5}), num), Error);
}

}  // namespace
}  // namespace lockstep::model
