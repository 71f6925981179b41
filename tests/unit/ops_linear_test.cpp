// Products with weights and the embedding.
#include "model/ops/linear.hpp"
#include "tests/unit/ops_test_support.hpp"

namespace lockstep::model {
namespace {

using namespace test;

TEST(Linear, EqualsAutogradOfMatmulInEveryPolicy) {
  struct Size {
    int64_t R, K, N;
  };
  for (const char* policy : {"float64", "float32", "hf-bf16"}) {
    for (const char* tiles : {"library", "fixed-tiles"}) {
      const Numerics num = with(policy, {{"D63", tiles}});
      for (const Size& s :
           {Size{0, 5, 3}, Size{1, 1, 1}, Size{7, 33, 1}, Size{65, 40, 129}, Size{600, 24, 40}}) {
        for (const at::ScalarType dtype : {num.act(), num.acc()}) {
          const std::vector<Tensor> inputs = {random("x", {s.R, s.K}).to(num.act()),
                                              random("w", {s.N, s.K}).to(dtype)};
          const auto run = [&](auto form) {
            return
                [&, form](const auto& in) { return std::vector<Tensor>{form(in[0], in[1], num)}; };
          };
          const double bound = num.width() == Width::kFloat64 ? 1e-14 : num.is_bf16() ? 5e-4 : 1e-6;
          expect_close(evaluate(run(&linear), inputs),
                       evaluate(run(&linear_reference), inputs),
                       bound,
                       bound,
                       fmt::format("{} {}x{}x{} ", num.name(), s.R, s.K, s.N));
        }
      }
    }
  }
}

TEST(Linear, KeepsLeadingDimensionsAndTakesTransposedInputs) {
  const Numerics num = Numerics::policy("float64");
  const Tensor w = random("w", {5, 4}), x = random("x", {4, 3, 2});
  const Tensor x_t = x.permute({2, 1, 0}), w_t = random("wt", {4, 5}).t();
  EXPECT_EQ(linear(x_t, w, num).sizes(), at::IntArrayRef({2, 3, 5}));
  EXPECT_LE(max_abs(linear(x_t, w_t, num), at::matmul(x_t, w_t.t())), 1e-14);
  EXPECT_EQ(linear(at::zeros({4}, at::kDouble), w, num).sizes(), at::IntArrayRef({5}));
}

TEST(Linear, B47Float32ProductsKeepAllMantissaBits) {
  const Numerics num = Numerics::policy("float32");
  for (const int64_t rows : {1, 3, 64, 300}) {
    for (const int64_t width : {1, 16, 256}) {
      Tensor x = at::zeros({rows, width}), w = at::zeros({width, width});
      x.select(1, 0).fill_(1.0f + 0x1p-12f);
      w.select(1, 0).fill_(1.0f);
      for (const char* tiles : {"library", "fixed-tiles"}) {
        const Tensor y = linear(x, w, with("float32", {{"D63", tiles}}));
        EXPECT_EQ(y.min().item<float>(), 1.000244140625f) << rows << " " << width;
        EXPECT_EQ(y.max().item<float>(), 1.000244140625f) << rows << " " << width;
      }
      EXPECT_EQ(linear_acc(x, w, num).max().item<float>(), 1.000244140625f);
      EXPECT_EQ(linear_reference(x, w, num).max().item<float>(), 1.000244140625f);
    }
  }
}

TEST(Linear, Bfloat16AccumulatesInFloat32AndRoundsOnce) {
  const Numerics num = Numerics::policy("hf-bf16");
  // 256 + 1 + 1: a bf16 accumulator would stay at 256.
  const Tensor x = at::tensor({256.0, 1.0, 1.0}, at::kDouble).reshape({1, 3}).to(at::kBFloat16);
  const Tensor w = at::ones({1, 3}, at::kBFloat16);
  EXPECT_EQ(linear(x, w, num).item<double>(), 258.0);
  EXPECT_EQ(linear_acc(x, w, num).scalar_type(), at::kFloat);
  // dW over 1000 rows of gradient 1: the bf16 sum would stop at 256.
  Tensor weight = at::zeros({1, 1}, at::kBFloat16);
  const Evaluated r =
      evaluate([&](const auto& in) { return std::vector<Tensor>{linear(in[0], in[1], num).sum()}; },
               {at::ones({1000, 1}, at::kBFloat16), weight});
  const double seed = random("seed0", {}).to(at::kBFloat16).template item<double>();
  EXPECT_NEAR(r.gradients[1].item<double>(), 1000 * seed, std::abs(1000 * seed) * 0.004);
}

TEST(Linear, WithFixedTilesARowDoesNotSeeItsNeighbours) {
  for (const char* policy : {"float32", "float64", "hf-bf16"}) {
    const Numerics num = with(policy, {{"D63", "fixed-tiles"}});
    const Tensor x = random("x", {200, 300}).to(num.act()),
                 w = random("w", {333, 300}).to(num.act());
    const Tensor whole = linear(x, w, num);
    for (const int64_t row : {0, 1, 63, 64, 127, 150, 199}) {
      const Tensor alone = linear(x.slice(0, row, row + 1), w, num);
      EXPECT_TRUE(same_bytes(alone, whole.slice(0, row, row + 1))) << policy << row;
    }
  }
}

TEST(Linear, ResultsDependNeitherOnThreadsNorOnTheCall) {
  for (const char* policy : {"float64", "float32", "hf-bf16"}) {
    const Numerics num = Numerics::policy(policy);
    for (const int64_t rows : {1, 5, 100, 1500}) {
      const std::vector<Tensor> inputs = {random("x", {rows, 200}).to(num.act()),
                                          random("w", {96, 200}).to(num.act())};
      const auto run = [&] {
        return evaluate(
            [&](const auto& in) { return std::vector<Tensor>{linear(in[0], in[1], num)}; }, inputs);
      };
      const Evaluated many = run();
      expect_same(many, run(), "twice");
      expect_same(many, on_one_thread(run), "one thread");
    }
  }
}

TEST(Linear, WrongArgumentsAreNamed) {
  const Numerics num = Numerics::policy("hf-bf16");
  const Tensor x = at::zeros({2, 4}, at::kBFloat16), w = at::zeros({3, 4}, at::kBFloat16);
  EXPECT_NO_THROW(linear(x, w, num));
  EXPECT_THROW(linear(x.to(at::kFloat), w, num), Error);
  EXPECT_THROW(linear(x, w.to(at::kDouble), num), Error);
  EXPECT_THROW(linear(x, at::zeros({3, 5}, at::kBFloat16), num), Error);
  EXPECT_THROW(linear(x, at::zeros({4}, at::kBFloat16), num), Error);
  EXPECT_THROW(linear_acc(at::zeros({2, 4}, at::kLong), w, num), Error);
}

TEST(Embedding, EqualsIndexingAndSumsRepeatedTokens) {
  for (const char* policy : {"float64", "float32", "hf-bf16"}) {
    const Numerics num = Numerics::policy(policy);
    for (const int64_t T : {0, 1, 500}) {
      Tensor ids = at::empty({T}, at::kLong);
      for (int64_t t = 0; t < T; ++t) ids.data_ptr<int64_t>()[t] = (t * t) % 13;
      for (const at::ScalarType dtype : {num.act(), num.acc()}) {
        const std::vector<Tensor> inputs = {random("w", {13, 70}).to(dtype)};
        const Evaluated fast = evaluate(
            [&](const auto& in) { return std::vector<Tensor>{embedding(ids, in[0], -1, num)}; },
            inputs);
        const Evaluated plain = evaluate(
            [&](const auto& in) {
              const Tensor w = in[0].to(num.acc());
              return std::vector<Tensor>{w.index_select(0, ids).to(num.act())};
            },
            inputs);
        expect_close(fast, plain, 0, num.width() == Width::kFloat64 ? 1e-14 : 1e-3, policy);
      }
    }
  }
}

TEST(Embedding, PaddingRowIsReadButGetsNoGradient) {
  const Numerics num = Numerics::policy("float32");
  const Tensor ids = at::tensor({2, 0, 2, 1}, at::kLong);
  const std::vector<Tensor> inputs = {random("w", {4, 6}).to(at::kFloat)};
  const auto run = [&](int64_t pad) {
    return evaluate(
        [&](const auto& in) { return std::vector<Tensor>{embedding(ids, in[0], pad, num)}; },
        inputs);
  };
  const Evaluated with_pad = run(2), without = run(-1);
  EXPECT_TRUE(same_bytes(with_pad.outputs[0], without.outputs[0]));
  EXPECT_TRUE(same_bytes(with_pad.outputs[0][0], inputs[0][2]));
  EXPECT_EQ(with_pad.gradients[0][2].abs().max().item<float>(), 0);
  EXPECT_GT(without.gradients[0][2].abs().max().item<float>(), 0);
  EXPECT_TRUE(same_bytes(with_pad.gradients[0][1], without.gradients[0][1]));
}

TEST(Embedding, IdsOutsideTheVocabularyAreRefusedWithTheirPosition) {
  const Numerics num = Numerics::policy("float32");
  for (const int64_t bad : {-1, 4, 1000000}) {
    try {
      embedding(at::tensor({int64_t{0}, bad}, at::kLong), at::zeros({4, 2}), -1, num);
      FAIL() << bad << " was accepted";
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kInput);
      EXPECT_NE(std::string(e.what()).find("token 1 has id " + std::to_string(bad)),
                std::string::npos)
          << e.what();
    }
  }
  EXPECT_THROW(embedding(at::zeros({2}, at::kInt), at::zeros({4, 2}), -1, num), Error);
  EXPECT_THROW(embedding(at::zeros({2}, at::kLong), at::zeros({4, 2}), 4, num), Error);
}

}  // namespace
}  // namespace lockstep::model
