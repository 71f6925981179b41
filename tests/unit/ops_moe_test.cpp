// Router, SwiGLU, grouped experts, and the way there and back.
#include <functional>

#include "model/ops/moe.hpp"
#include "tests/unit/ops_test_support.hpp"

namespace lockstep::model {
namespace {

using namespace test;

const std::vector<const char*> kPolicies = {"float64", "float32", "hf-bf16", "fsdp-bf16"};

using RouteForm = std::function<Routing(const Tensor&,
                                        const Tensor&,
                                        const Tensor&,
                                        const Tensor&,
                                        const RouterParams&,
                                        const Numerics&)>;

struct Bounds {
  double output, gradient;
};
/// Fast against plain: in bf16 a last-bit difference in fp32 flips roundings of single elements.
Bounds bounds(const Numerics& num) {
  switch (num.width()) {
    case Width::kFloat64:
      return {1e-14, 1e-13};
    case Width::kFloat32:
      return {1e-6, 2e-6};
    case Width::kBFloat16:
      break;
  }
  return {1e-3, 4e-3};
}

/// Experts each token goes to: repeatable, uneven, expert `empty` never.
Tensor some_experts(int64_t T, int64_t k, int64_t E, int64_t empty = -1) {
  Tensor ids = at::empty({T, k}, at::kLong);
  for (int64_t t = 0; t < T; ++t) {
    int64_t e = (t * t) % E;
    for (int64_t j = 0; j < k; ++j, ++e) {
      while (e % E == empty) ++e;
      ids.data_ptr<int64_t>()[t * k + j] = e % E;
    }
  }
  return ids;
}

// --- router --------------------------------------------------------------------------------------

TEST(Router, BothFormsGiveTheKnownNumbers) {
  const Numerics num = Numerics::policy("float64");
  const Tensor logits = sine({1, 6}, 1.7), eye = at::eye(6, at::kDouble);
  const Tensor bias = at::tensor({0.0, 0.3, 0.0, -0.2, 0.0, 0.1}, at::kDouble);
  RouterParams params{.top_k = 2, .scaling = 2.5};
  for (const RouteForm& form : {RouteForm(route), RouteForm(route_reference)}) {
    const Routing r = form(logits, eye, bias, {}, params, num);
    EXPECT_EQ(r.experts[0][0].item<int64_t>(), 1);
    EXPECT_EQ(r.experts[0][1].item<int64_t>(), 0);
    EXPECT_NEAR(r.weights[0][0].item<double>(), 0.9359053596, 2e-10);
    EXPECT_NEAR(r.weights[0][1].item<double>(), 1.5640946404, 2e-10);
    const Routing unbiased = form(logits, eye, at::zeros({6}, at::kDouble), {}, params, num);
    EXPECT_EQ(unbiased.experts[0][0].item<int64_t>(), 0);
    EXPECT_EQ(unbiased.experts[0][1].item<int64_t>(), 4);
  }
}

struct RouterCase {
  const char* name;
  RouterParams params;
  bool replay;
  std::vector<std::pair<std::string, std::string>> switches;
};
const std::vector<RouterCase> kRouterCases = {
    {"plain", {.top_k = 3, .scaling = 2.5}, false, {}},
    {"one", {.top_k = 1, .normalise = false}, false, {}},
    {"all", {.top_k = 12}, false, {}},
    {"unnormalised", {.top_k = 3, .normalise = false, .scaling = 1.5}, false, {}},
    {"softmax", {.top_k = 3, .softmax_scoring = true}, false, {}},
    {"groups", {.top_k = 3, .n_group = 4, .topk_group = 2, .scaling = 2.5}, false, {{"D52", "on"}}},
    {"groups of one", {.top_k = 3, .n_group = 12, .topk_group = 5}, false, {{"D52", "on"}}},
    {"groups ignored", {.top_k = 3, .n_group = 4, .topk_group = 2}, false, {{"D52", "ignored"}}},
    {"replay", {.top_k = 3, .scaling = 2.5}, true, {}},
    {"replay softmax", {.top_k = 3, .softmax_scoring = true}, true, {}},
    {"bf16 operands", {.top_k = 3}, false, {{"D47", "bf16-operands"}}},
    {"bf16 logits", {.top_k = 3}, true, {{"D47", "bf16"}}},
    {"bf16 weight and bias", {.top_k = 3}, false, {{"D48", "bf16"}, {"D49", "bf16"}, {"D50", "0"}}},
};

TEST(Router, FastFormEqualsAutogradOfThePlainFormInEveryPolicy) {
  for (const char* policy : kPolicies) {
    for (const RouterCase& c : kRouterCases) {
      const Numerics num = with(policy, c.switches);
      for (const int64_t T : {0, 1, 77}) {
        const std::vector<Tensor> inputs = {random("x", {T, 20}).to(num.act()),
                                            random("gate", {12, 20}, 0.3).to(num.acc())};
        const Tensor bias = random("bias", {12}, 0.2).to(num.acc());
        const Tensor replay = c.replay ? some_experts(T, 3, 12) : Tensor();
        const auto run = [&](auto form) {
          return [&, form](const std::vector<Tensor>& in) {
            const Routing r = form(in[0], in[1], bias, replay, c.params, num);
            return std::vector<Tensor>{r.experts, r.weights};
          };
        };
        const std::string what = fmt::format("{} {} T {} ", policy, c.name, T);
        const Evaluated fast = evaluate(run(&route), inputs),
                        plain = evaluate(run(&route_reference), inputs);
        EXPECT_TRUE(same_bytes(fast.outputs[0], plain.outputs[0])) << what;
        const double bound = num.width() == Width::kFloat64 ? 1e-13 : 4e-3;
        expect_close(fast, plain, num.width() == Width::kFloat64 ? 1e-14 : 1e-6, bound, what);
      }
    }
  }
}

TEST(Router, TiesGoToTheLowerExpertAndTheLowerGroup) {
  const Numerics num = Numerics::policy("float32");
  const Tensor x = at::ones({1, 1}), gate = at::zeros({8, 1}), bias = at::zeros({8});
  for (const RouteForm& form : {RouteForm(route), RouteForm(route_reference)}) {
    const Routing r = form(x, gate, bias, {}, {.top_k = 3}, num);
    EXPECT_TRUE(same_bytes(r.experts[0], at::tensor({0, 1, 2}, at::kLong)));
    const Tensor favoured = at::tensor({0.0f, 0.0f, 0.1f, 0.1f, 0.1f, 0.1f, 0.2f, 0.0f});
    // Groups of two score 1.0, 1.2, 1.2, 1.2: of the tied ones the first two stay.
    const Routing g = form(x, gate, favoured, {}, {.top_k = 3, .n_group = 4, .topk_group = 2}, num);
    EXPECT_TRUE(same_bytes(g.experts[0], at::tensor({2, 3, 4}, at::kLong)));
  }
}

TEST(Router, ReplayTakesTheGivenExpertsEvenIfRepeatedAndKeepsTheirGradient) {
  const Numerics num = Numerics::policy("float64");
  const std::vector<Tensor> inputs = {random("x", {4, 5}), random("gate", {6, 5})};
  const Tensor replay = at::tensor({0, 0, 0, 5, 1, 5, 3, 2, 1, 0, 4, 4}, at::kLong).reshape({4, 3});
  const auto run = [&](auto form) {
    return [&, form](const std::vector<Tensor>& in) {
      const Routing r = form(in[0], in[1], at::zeros({6}, at::kDouble), replay, {.top_k = 3}, num);
      EXPECT_TRUE(same_bytes(r.experts, replay));
      return std::vector<Tensor>{r.weights};
    };
  };
  const Evaluated fast = evaluate(run(&route), inputs);
  expect_close(fast, evaluate(run(&route_reference), inputs), 1e-15, 1e-13, "replay");
  EXPECT_GT(fast.gradients[1].abs().max().item<double>(), 1e-3);
}

TEST(Router, WrongArgumentsAreNamed) {
  const Numerics num = Numerics::policy("float32");
  const Tensor x = at::zeros({3, 4}), gate = at::zeros({6, 4}), bias = at::zeros({6});
  EXPECT_THROW(route(x, gate, bias, {}, {.top_k = 7}, num), Error);
  EXPECT_THROW(route(x, gate, bias, {}, {.top_k = 2, .n_group = 4, .topk_group = 1}, num), Error);
  EXPECT_THROW(route(x, gate, bias, {}, {.top_k = 4, .n_group = 3, .topk_group = 1}, num), Error);
  EXPECT_THROW(route(x, gate, at::zeros({5}), {}, {.top_k = 2}, num), Error);
  EXPECT_THROW(route(x, gate, bias, at::full({3, 2}, 6, at::kLong), {.top_k = 2}, num), Error);
  EXPECT_THROW(route(x, gate, bias, at::zeros({2, 2}, at::kLong), {.top_k = 2}, num), Error);
}

// --- token order and expert order ----------------------------------------------------------------

TEST(ExpertOrder, SortsByExpertThenTokenAndConservesTokens) {
  const Tensor experts = some_experts(41, 3, 7, 4);
  const ExpertOrder order = order_by_expert(experts, 7);
  EXPECT_EQ(order.offsets.front(), 0);
  EXPECT_EQ(order.offsets.back(), 41 * 3);
  EXPECT_EQ(order.offsets[4], order.offsets[5]);
  std::vector<bool> seen(41 * 3, false);
  for (size_t e = 0; e < 7; ++e) {
    for (int64_t r = order.offsets[e]; r < order.offsets[e + 1]; ++r) {
      const int64_t slot = order.slot[r].item<int64_t>(), token = order.token[r].item<int64_t>();
      EXPECT_EQ(slot / 3, token);
      EXPECT_EQ(experts.flatten()[slot].item<int64_t>(), static_cast<int64_t>(e));
      if (r > order.offsets[e]) {
        EXPECT_GT(slot, order.slot[r - 1].item<int64_t>());
      }
      EXPECT_FALSE(seen[static_cast<size_t>(slot)]);
      seen[static_cast<size_t>(slot)] = true;
    }
  }
  EXPECT_EQ(order_by_expert(at::empty({0, 3}, at::kLong), 7).offsets, std::vector<int64_t>(8, 0));
  EXPECT_THROW(order_by_expert(at::full({1, 1}, 7, at::kLong), 7), Error);
}

TEST(ExpertOrder, GatheringAndItsGradientEqualIndexing) {
  for (const char* policy : kPolicies) {
    const Numerics num = Numerics::policy(policy);
    for (const int64_t T : {0, 1, 90}) {
      const ExpertOrder order = order_by_expert(some_experts(T, 3, 7), 7);
      const std::vector<Tensor> inputs = {random("x", {T, 33}).to(num.act())};
      const auto fast = [&](const auto& in) {
        return std::vector<Tensor>{gather_rows(in[0], order, num)};
      };
      const auto plain = [&](const auto& in) {
        return std::vector<Tensor>{in[0].to(num.acc()).index_select(0, order.token).to(num.act())};
      };
      expect_close(
          evaluate(fast, inputs), evaluate(plain, inputs), 0, bounds(num).gradient, policy);
    }
  }
}

TEST(ExpertOrder, CombiningEqualsThePlainFormForEverySwitch) {
  for (const char* policy : {"float64", "float32", "hf-bf16"}) {
    for (const char* weighting : {"per-expert", "at-sum"}) {
      for (const char* sum : {"act-ascending", "unordered", "fp32"}) {
        const Numerics num = with(policy, {{"D54", weighting}, {"D55", sum}});
        for (const int64_t T : {0, 1, 70}) {
          const ExpertOrder order = order_by_expert(some_experts(T, 4, 9), 9);
          const std::vector<Tensor> inputs = {random("rows", {T * 4, 19}).to(num.act()),
                                              random("w", {T, 4}).abs().to(num.acc())};
          const auto run = [&](auto form) {
            return [&, form](const auto& in) {
              return std::vector<Tensor>{form(in[0], order, in[1], num)};
            };
          };
          // The same operations in the same order: equal bits.
          const Evaluated fast = evaluate(run(&combine_experts), inputs);
          const Evaluated plain = evaluate(run(&combine_experts_reference), inputs);
          EXPECT_TRUE(same_bytes(fast.outputs[0], plain.outputs[0])) << num.name();
          expect_close(fast, plain, 0, bounds(num).gradient, num.name());
        }
      }
    }
  }
}

TEST(ExpertOrder, Bfloat16SumRoundsAfterEveryExpertInAscendingId) {
  const Numerics num = Numerics::policy("hf-bf16");
  // Token 0 goes to experts 2, 0, 1 (slots 0, 1, 2).
  const ExpertOrder order = order_by_expert(at::tensor({2, 0, 1}, at::kLong).reshape({1, 3}), 3);
  const Tensor rows =
      at::tensor({1.0, 0.00390625, 0.00390625}, at::kDouble).reshape({3, 1}).to(at::kBFloat16);
  const Tensor ones = at::ones({1, 3});
  // 1 + 2^-8 ties to 1, twice; summed in fp32 it would be 1 + 2^-7.
  EXPECT_EQ(combine_experts(rows, order, ones, num).item<double>(), 1.0);
  EXPECT_EQ(combine_experts(rows, order, ones, with("hf-bf16", {{"D55", "fp32"}})).item<double>(),
            1.0078125);
}

// --- SwiGLU --------------------------------------------------------------------------------------

TEST(Swiglu, BothFormsGiveTheKnownNumbers) {
  const Numerics num = Numerics::policy("float64");
  const Tensor gate = at::tensor({12.0, -12.0, 3.0}, at::kDouble),
               up = at::tensor({-11.0, 2.0, 15.0}, at::kDouble);
  const Tensor want = at::tensor({-99.9954602131, -0.0001474602, 28.5772238047}, at::kDouble);
  EXPECT_LE(max_abs(clamped_swiglu(gate, up, 10.0, num), want), 2e-10);
  EXPECT_LE(max_abs(clamped_swiglu_reference(gate, up, 10.0, num), want), 2e-10);
}

TEST(Swiglu, FastFormEqualsAutogradOfThePlainFormForEverySwitch) {
  for (const char* policy : kPolicies) {
    for (const char* roundings : {"1", "2", "3"}) {
      for (const char* silu : {"x*sigmoid(x)", "x/(1+exp(-x))"}) {
        const Numerics num = with(policy, {{"D53", roundings}, {"D16", silu}});
        for (const std::optional<double> limit :
             {std::optional<double>(2.0), std::optional<double>()}) {
          const std::vector<Tensor> inputs = {random("gate", {37, 11}, 2.5).to(num.act()),
                                              random("up", {37, 11}, 2.5).to(num.act())};
          const auto run = [&](auto form) {
            return [&, form](const auto& in) {
              return std::vector<Tensor>{form(in[0], in[1], limit, num)};
            };
          };
          expect_close(evaluate(run(&clamped_swiglu), inputs),
                       evaluate(run(&clamped_swiglu_reference), inputs),
                       num.is_bf16() ? 5e-4 : bounds(num).output,
                       num.is_bf16() ? 5e-4 : bounds(num).gradient,
                       num.name());
        }
      }
    }
  }
}

TEST(Swiglu, GradientIsZeroOutsideTheClampOnly) {
  const Numerics num = Numerics::policy("float64");
  const std::vector<Tensor> inputs = {at::tensor({10.5, 10.0, -50.0, 1.0, 1.0}, at::kDouble),
                                      at::tensor({1.0, 1.0, 1.0, 10.5, -10.5}, at::kDouble)};
  const Evaluated r = evaluate(
      [&](const auto& in) { return std::vector<Tensor>{clamped_swiglu(in[0], in[1], 10.0, num)}; },
      inputs);
  const auto zero = [&](size_t which, int64_t i) {
    return r.gradients[which][i].template item<double>() == 0;
  };
  EXPECT_TRUE(zero(0, 0));
  EXPECT_FALSE(zero(0, 1));
  EXPECT_FALSE(zero(0, 2));  // no lower clamp on the gate
  EXPECT_FALSE(zero(1, 0));
  EXPECT_TRUE(zero(1, 3));
  EXPECT_TRUE(zero(1, 4));
}

// --- experts -------------------------------------------------------------------------------------

struct ExpertsCase {
  std::vector<int64_t> offsets;
  int64_t D, I;
};
const std::vector<ExpertsCase> kExpertsCases = {
    {{0, 0, 0}, 8, 4},
    {{0, 1, 1, 1}, 8, 5},
    {{0, 3, 3, 90, 91}, 24, 12},
    {{0, 300, 301, 301, 620}, 16, 9},
};

std::vector<Tensor> expert_inputs(const ExpertsCase& c,
                                  const Numerics& num,
                                  at::ScalarType weights) {
  const auto E = static_cast<int64_t>(c.offsets.size()) - 1;
  return {random("rows", {c.offsets.back(), c.D}).to(num.act()),
          random("gate_up", {E, 2 * c.I, c.D}, 0.5).to(weights),
          random("down", {E, c.D, c.I}, 0.5).to(weights)};
}

TEST(Experts, FastFormEqualsAutogradOfThePlainFormInEveryPolicy) {
  for (const char* policy : kPolicies) {
    for (const char* tiles : {"library", "fixed-tiles"}) {
      const Numerics num = with(policy, {{"D63", tiles}});
      for (const ExpertsCase& c : kExpertsCases) {
        for (const at::ScalarType dtype : {num.act(), num.acc()}) {
          const auto inputs = expert_inputs(c, num, dtype);
          const auto run = [&](auto form) {
            return [&, form](const auto& in) {
              return std::vector<Tensor>{form(in[0], c.offsets, in[1], in[2], 1.5, num)};
            };
          };
          const Evaluated fast = evaluate(run(&grouped_experts), inputs);
          const Evaluated plain = evaluate(run(&grouped_experts_reference), inputs);
          expect_close(fast, plain, bounds(num).output, bounds(num).gradient, num.name());
          for (size_t e = 0; e + 1 < c.offsets.size(); ++e) {
            if (c.offsets[e] != c.offsets[e + 1]) continue;
            for (const size_t which : {1u, 2u}) {
              EXPECT_EQ(fast.gradients[which][static_cast<int64_t>(e)].abs().max().item<double>(),
                        0);
            }
          }
        }
      }
    }
  }
}

TEST(Experts, DenseMlpEqualsAutogradOfThePlainFormInEveryPolicy) {
  for (const char* policy : kPolicies) {
    const Numerics num = Numerics::policy(policy);
    for (const int64_t T : {0, 1, 63, 400}) {
      const std::vector<Tensor> inputs = {random("x", {T, 24}).to(num.act()),
                                          random("gate", {40, 24}, 0.5).to(num.act()),
                                          random("up", {40, 24}, 0.5).to(num.act()),
                                          random("down", {24, 40}, 0.5).to(num.act())};
      const auto run = [&](auto form) {
        return [&, form](const auto& in) {
          return std::vector<Tensor>{form(in[0], in[1], in[2], in[3], 2.0, num)};
        };
      };
      expect_close(evaluate(run(&swiglu_mlp), inputs),
                   evaluate(run(&swiglu_mlp_reference), inputs),
                   bounds(num).output,
                   bounds(num).gradient * (num.is_bf16() ? 2 : 1),
                   fmt::format("{} T {} ", policy, T));
    }
  }
}

TEST(Experts, Bfloat16IsAsCloseToFloat64AsThePlainFormIs) {
  const Numerics exact = Numerics::policy("float64");
  for (const char* policy : {"float32", "hf-bf16"}) {
    const Numerics num = Numerics::policy(policy);
    const ExpertsCase c{{0, 100, 164, 200}, 64, 48};
    const auto inputs = expert_inputs(c, num, num.act());
    std::vector<Tensor> wide;
    for (const Tensor& t : inputs) wide.push_back(t.to(at::kDouble));
    const auto run = [&](auto form, const Numerics& n) {
      return [&, form](const auto& in) {
        return std::vector<Tensor>{form(in[0], c.offsets, in[1], in[2], 10.0, n)};
      };
    };
    const Evaluated want = evaluate(run(&grouped_experts_reference, exact), wide);
    const Evaluated fast = evaluate(run(&grouped_experts, num), inputs);
    const Evaluated plain = evaluate(run(&grouped_experts_reference, num), inputs);
    EXPECT_LE(rel_l2(fast.outputs[0], want.outputs[0]),
              1.1 * rel_l2(plain.outputs[0], want.outputs[0]) + 1e-8);
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_LE(rel_l2(fast.gradients[i], want.gradients[i]),
                1.1 * rel_l2(plain.gradients[i], want.gradients[i]) + 1e-8)
          << policy << i;
    }
  }
}

/// Expert e ignores its token's direction: gate and up see only channel 0, which is 1, so that it
/// returns the constant (e + 1) * silu(1) in every channel.
TEST(Experts, Z7ConstantExpertsGiveTheClosedAnswer) {
  for (const char* policy : {"float64", "float32", "hf-bf16"}) {
    const Numerics num = Numerics::policy(policy);
    const int64_t T = 53, E = 5, k = 2, D = 6, I = 3;
    Tensor x = random("x", {T, D});
    x.select(1, 0).fill_(1);
    Tensor gate_up = at::zeros({E, 2 * I, D}, at::kDouble),
           down = at::zeros({E, D, I}, at::kDouble);
    for (int64_t e = 0; e < E; ++e) {
      gate_up[e].select(1, 0).fill_(1);
      down[e].fill_(static_cast<double>(e + 1) / static_cast<double>(I));
    }
    const Tensor ids = some_experts(T, k, E, 3);
    const ExpertOrder order = order_by_expert(ids, E);
    EXPECT_EQ(order.offsets.back(), T * k);
    const Tensor weights = random("w", {T, k}).abs().to(num.acc());
    const Tensor rows = grouped_experts(gather_rows(x.to(num.act()), order, num),
                                        order.offsets,
                                        gate_up.to(num.act()),
                                        down.to(num.act()),
                                        10.0,
                                        num);
    const Tensor y = combine_experts(rows, order, weights, num);
    const double silu = 1 / (1 + std::exp(-1.0));
    const Tensor want = ((ids + 1).to(at::kDouble) * weights.to(at::kDouble)).sum(1, true) * silu;
    const double bound = num.width() == Width::kFloat64 ? 1e-14 : num.is_bf16() ? 1e-2 : 1e-6;
    EXPECT_LE(rel_l2(y, want.expand({T, D})), bound) << policy;
  }
}

TEST(Experts, WrongArgumentsAreNamed) {
  const Numerics num = Numerics::policy("float32");
  const Tensor rows = at::zeros({5, 4}), gate_up = at::zeros({2, 6, 4}),
               down = at::zeros({2, 4, 3});
  EXPECT_NO_THROW(grouped_experts(rows, {0, 2, 5}, gate_up, down, 10.0, num));
  EXPECT_THROW(grouped_experts(rows, {0, 2, 4}, gate_up, down, 10.0, num), Error);
  EXPECT_THROW(grouped_experts(rows, {0, 6, 5}, gate_up, down, 10.0, num), Error);
  EXPECT_THROW(grouped_experts(rows, {0, 5}, gate_up, down, 10.0, num), Error);
  EXPECT_THROW(grouped_experts(rows, {0, 2, 5}, gate_up, at::zeros({2, 3, 4}), 10.0, num), Error);
  EXPECT_THROW(grouped_experts(rows.to(at::kDouble), {0, 2, 5}, gate_up, down, 10.0, num), Error);
  EXPECT_THROW(grouped_experts(rows, {0, 2, 5}, gate_up, down, -1.0, num), Error);
  EXPECT_THROW(swiglu_mlp(rows, at::zeros({3, 4}), at::zeros({3, 4}), at::zeros({3, 4}), 10.0, num),
               Error);
}

// --- what must not change a byte -----------------------------------------------------------------

TEST(Experts, ResultsDependNeitherOnThreadsNorOnTheCall) {
  for (const char* policy : {"float64", "float32", "hf-bf16"}) {
    const Numerics num = Numerics::policy(policy);
    const int64_t T = 333, E = 6, k = 2, D = 96, I = 80;
    const std::vector<Tensor> inputs = {random("x", {T, D}).to(num.act()),
                                        random("gate", {E, D}, 0.3).to(num.acc()),
                                        random("gate_up", {E, 2 * I, D}, 0.2).to(num.act()),
                                        random("down", {E, D, I}, 0.2).to(num.act())};
    const auto layer = [&](const std::vector<Tensor>& in) {
      const Routing r = route(in[0], in[1], at::zeros({E}, num.acc()), {}, {.top_k = k}, num);
      const ExpertOrder order = order_by_expert(r.experts, E);
      const Tensor rows =
          grouped_experts(gather_rows(in[0], order, num), order.offsets, in[2], in[3], 10.0, num);
      const Tensor dense = swiglu_mlp(
          in[0], in[2][0].slice(0, 0, I), in[2][0].slice(0, I, 2 * I), in[3][0], 10.0, num);
      return std::vector<Tensor>{combine_experts(rows, order, r.weights, num), dense};
    };
    const auto run = [&] { return evaluate(layer, inputs); };
    const Evaluated many = run();
    expect_same(many, run(), "twice");
    expect_same(many, on_one_thread(run), "one thread");
  }
}

TEST(Experts, WithFixedTilesARowDoesNotSeeItsNeighbours) {
  const Numerics num = with("float32", {{"D63", "fixed-tiles"}});
  const ExpertsCase c{{0, 150, 151}, 96, 80};
  const auto in = expert_inputs(c, num, at::kFloat);
  const Tensor whole = grouped_experts(in[0], c.offsets, in[1], in[2], 10.0, num);
  for (const int64_t row : {0, 63, 64, 100, 149}) {
    const Tensor alone =
        grouped_experts(in[0].slice(0, row, row + 1), {0, 1, 1}, in[1], in[2], 10.0, num);
    EXPECT_TRUE(same_bytes(alone, whole.slice(0, row, row + 1))) << row;
  }
}

}  // namespace
}  // namespace lockstep::model
