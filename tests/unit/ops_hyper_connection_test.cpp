// Hyper-connections: numbers worked out by hand, the fast form against autograd of the plain one,
// every switch, and what must not change a byte.
#include "model/ops/hyper_connection.hpp"
#include "tests/unit/ops_test_support.hpp"

namespace lockstep::model {
namespace {

using namespace test;

constexpr HcParams kParams{1e-5, 1e-6, 20};

/// x, fn, base, scale, norm_weight for one shape, in the dtypes a policy wants.
std::vector<Tensor> pre_inputs(
    int64_t T, int64_t n, int64_t D, const Numerics& num, double fn_std = 0.05) {
  const int64_t P = (2 + n) * n;
  return {random("x", {T, n, D}).to(num.act()),
          random("fn", {P, n * D}, fn_std).to(num.acc()),
          random("base", {P}, 0.5).to(num.acc()),
          (random("scale", {3}, 0.2) + 1.0).to(num.acc()),
          (random("weight", {D}, 0.1) + 1.0).to(num.acc())};
}

std::vector<Tensor> post_inputs(int64_t T, int64_t n, int64_t D, const Numerics& num) {
  return {random("y", {T, D}).to(num.act()),
          random("x", {T, n, D}).to(num.act()),
          at::sigmoid(random("post", {T, n})).mul(2).to(num.acc()),
          at::softmax(random("comb", {T, n, n}), 2).to(num.acc())};
}

using PreForm = std::function<HcPre(const Tensor&,
                                    const Tensor&,
                                    const Tensor&,
                                    const Tensor&,
                                    const Tensor&,
                                    const HcParams&,
                                    const Numerics&,
                                    const Tensor&)>;
using PostForm = decltype(&hc_post);

TensorFunction pre_with(PreForm form, const Numerics& num, const Tensor& unrounded = {}) {
  return [form, num, unrounded](const std::vector<Tensor>& in) {
    const HcPre r = form(in[0], in[1], in[2], in[3], in[4], kParams, num, unrounded);
    return std::vector<Tensor>{r.x_normed, r.post, r.comb};
  };
}

TensorFunction post_with(PostForm form, const Numerics& num) {
  return [form, num](const std::vector<Tensor>& in) {
    return std::vector<Tensor>{form(in[0], in[1], in[2], in[3], num)};
  };
}

// --- known numbers -------------------------------------------------------------------------------

struct Forms {
  PreForm pre;
  PostForm post;
};

void expect_known_numbers(const Forms& forms) {
  const Numerics num = Numerics::policy("float64");
  const Tensor x = sine({1, 4, 2}, 0.7), y = sine({1, 2}, 1.1);
  const Tensor scale = at::tensor({0.5, 0.6, 0.7}, at::kDouble);
  const Tensor ones = at::ones({2}, at::kDouble);
  const HcPre r = forms.pre(x, sine({24, 8}, 0.3), sine({24}, 0.5), scale, ones, kParams, num, {});
  const Tensor post =
      at::tensor({1.3499044436, 0.2981234732, 1.8167894208, 0.1174381839}, at::kDouble);
  EXPECT_LE(max_abs(r.post[0], post), 2e-10);
  const Tensor first =
      at::tensor({0.0870980384, 0.2498335342, 0.0001391808, 0.6629311782}, at::kDouble);
  const Tensor last =
      at::tensor({0.1531502950, 0.4633491775, 0.3587500144, 0.0247478274}, at::kDouble);
  EXPECT_LE(max_abs(r.comb[0][0], first), 2e-10);
  EXPECT_LE(max_abs(r.comb[0][3], last), 2e-10);
  const Tensor pre =
      at::tensor({0.4967295031, 0.9344362279, 0.2337305038, 0.9102008198}, at::kDouble);
  const Tensor u = at::tensor({0.1503981221, 0.0242337624}, at::kDouble);
  EXPECT_LE(max_abs((pre.unsqueeze(1) * x[0]).sum(0), u), 2e-10);
  const Tensor normed = u / (u.square().mean() + 1e-5).sqrt();
  EXPECT_LE(max_abs(r.x_normed[0], normed), 2e-9);
  const Tensor mixed = forms.post(y, x, r.post, r.comb, num);
  const Tensor want = at::tensor({1.0794649033,
                                  0.6541934401,
                                  0.0419701092,
                                  0.1148658108,
                                  1.8199958035,
                                  1.4571162233,
                                  0.4252932031,
                                  0.4876624564},
                                 at::kDouble);
  EXPECT_LE(max_abs(mixed.flatten(), want), 2e-10);
}

TEST(HyperConnection, PlainFormGivesTheKnownNumbers) {
  expect_known_numbers({hc_pre_reference, hc_post_reference});
}

TEST(HyperConnection, FastFormGivesTheKnownNumbers) { expect_known_numbers({hc_pre, hc_post}); }

// --- fast against plain --------------------------------------------------------------------------

struct Size {
  int64_t T, n, D;
};
const std::vector<Size> kSizes = {{0, 4, 8},
                                  {1, 4, 2},
                                  {3, 1, 5},
                                  {17, 2, 33},
                                  {65, 4, 24},
                                  {300, 4, 40},
                                  {130, 3, 7},
                                  {5, 5, 16}};

TEST(HyperConnection, FastPreEqualsAutogradOfThePlainFormInFloat64) {
  const Numerics num = Numerics::policy("float64");
  for (const Size& s : kSizes) {
    const auto inputs = pre_inputs(s.T, s.n, s.D, num, 0.3);
    expect_close(evaluate(pre_with(hc_pre, num), inputs),
                 evaluate(pre_with(hc_pre_reference, num), inputs),
                 1e-14,
                 1e-13,
                 fmt::format("T {} n {} D {} ", s.T, s.n, s.D));
  }
}

TEST(HyperConnection, FastPostEqualsAutogradOfThePlainFormInFloat64) {
  for (const char* order : {"library", "post-first"}) {
    const Numerics num = with("float64", {{"D10", order}});
    for (const Size& s : kSizes) {
      const auto inputs = post_inputs(s.T, s.n, s.D, num);
      expect_close(evaluate(post_with(hc_post, num), inputs),
                   evaluate(post_with(hc_post_reference, num), inputs),
                   1e-14,
                   1e-14,
                   fmt::format("{} T {} n {} D {} ", order, s.T, s.n, s.D));
    }
  }
}

using Switches = std::vector<std::pair<std::string, std::string>>;
const std::vector<Switches> kPreSwitches = {
    {},
    {{"D04", "project-then-norm"}},
    {{"D05", "tf32"}},
    {{"D05", "bf16x3"}},
    {{"D05", "tf32-above-32"}, {"D04", "project-then-norm"}},
    {{"D05", "bf16x3"}, {"D04", "project-then-norm"}, {"D06", "by-tokens"}},
    {{"D06", "fixed"}},
    {{"D06", "by-tokens"}},
    {{"D12", "unrounded"}},
    {{"D11", "1"}},
    {{"D11", "2"}, {"D12", "unrounded"}},
    {{"D01", "bf16"}, {"D02", "bf16"}, {"D13", "bf16"}},
    {{"D63", "fixed-tiles"}},
};

TEST(HyperConnection, FastPreEqualsThePlainFormForEverySwitchInEveryWidth) {
  for (const char* policy : {"float64", "float32", "hf-bf16", "fsdp-bf16", "fsdp-fp32-islands"}) {
    for (const Switches& switches : kPreSwitches) {
      const Numerics num = with(policy, switches);
      const bool wide = num.width() == Width::kFloat64, bf16 = num.is_bf16();
      for (const Size& s : {Size{77, 4, 24}, Size{20, 2, 70}}) {
        const auto inputs = pre_inputs(s.T, s.n, s.D, num);
        const Evaluated fast = evaluate(pre_with(hc_pre, num), inputs);
        const Evaluated plain = evaluate(pre_with(hc_pre_reference, num), inputs);
        // In bf16 an fp32 difference in the last bits flips roundings of single elements.
        expect_close(fast,
                     plain,
                     wide   ? 1e-14
                     : bf16 ? 1e-3
                            : 2e-6,
                     wide   ? 1e-13
                     : bf16 ? 4e-3
                            : 1e-5,
                     num.name() + fmt::format(" T {} ", s.T));
        EXPECT_LE(rel_l2(fast.outputs[1], plain.outputs[1]), wide ? 1e-14 : 2e-6) << num.name();
        EXPECT_LE(rel_l2(fast.outputs[2], plain.outputs[2]), wide ? 1e-14 : 5e-6) << num.name();
      }
    }
  }
}

TEST(HyperConnection, FastPostEqualsThePlainFormForEverySwitchInBfloat16) {
  for (const char* coefficients : {"bf16", "fp32"}) {
    for (const char* roundings : {"3", "1"}) {
      for (const char* order : {"library", "post-first"}) {
        const Numerics num =
            with("hf-bf16", {{"D08", coefficients}, {"D09", roundings}, {"D10", order}});
        for (const Size& s : {Size{77, 4, 24}, Size{20, 2, 70}}) {
          const auto inputs = post_inputs(s.T, s.n, s.D, num);
          expect_close(evaluate(post_with(hc_post, num), inputs),
                       evaluate(post_with(hc_post_reference, num), inputs),
                       5e-4,
                       1e-3,
                       num.name());
        }
      }
    }
  }
}

TEST(HyperConnection, EachSwitchChangesTheResultItIsNamedFor) {
  const auto run = [](const Switches& switches) {
    Switches all = {{"D01", "fp32"}, {"D06", "one"}};
    all.insert(all.end(), switches.begin(), switches.end());
    const Numerics num = with("hf-bf16", all);
    const auto in = pre_inputs(40, 4, 48, num);
    return pre_with(hc_pre, num)(in);
  };
  const auto base = run({});
  for (const Switches& changed : std::vector<Switches>{{{"D01", "bf16"}},
                                                       {{"D02", "bf16"}},
                                                       {{"D04", "project-then-norm"}},
                                                       {{"D05", "tf32"}},
                                                       {{"D05", "bf16x3"}},
                                                       {{"D06", "fixed"}}}) {
    EXPECT_FALSE(same_bytes(run(changed)[2], base[2])) << changed[0].first;
  }
  for (const Switches& changed :
       std::vector<Switches>{{{"D11", "1"}}, {{"D12", "unrounded"}}, {{"D13", "bf16"}}}) {
    const auto got = run(changed);
    EXPECT_TRUE(same_bytes(got[2], base[2])) << changed[0].first;
    EXPECT_FALSE(same_bytes(got[0], base[0])) << changed[0].first;
  }
}

TEST(HyperConnection, TensorFloatProjectionIsATenthOfAPercentOffAndThreeTermsAreNot) {
  const Numerics exact = Numerics::policy("float64");
  auto inputs = pre_inputs(64, 4, 64, Numerics::policy("hf-bf16"));
  std::vector<Tensor> wide;
  for (const Tensor& t : inputs) wide.push_back(t.to(at::kDouble));
  const Tensor want = pre_with(hc_pre_reference, exact)(wide)[2];
  const auto error = [&](const char* operands) {
    const Numerics num = with("hf-bf16", {{"D01", "fp32"}, {"D05", operands}});
    return rel_l2(pre_with(hc_pre, num)(inputs)[2], want);
  };
  EXPECT_GT(error("tf32"), 1e-5);
  EXPECT_LT(error("tf32"), 1e-3);
  EXPECT_LT(error("bf16x3"), 2e-6);
  EXPECT_LT(error("fp32"), 2e-6);
}

TEST(HyperConnection, SlicesFollowTheDocumentedRule) {
  const Numerics by_tokens = with("hf-bf16", {{"D06", "by-tokens"}});
  EXPECT_EQ(hc_projection_slices(1, 16384, by_tokens), 8);
  EXPECT_EQ(hc_projection_slices(32, 16384, by_tokens), 8);
  EXPECT_EQ(hc_projection_slices(33, 16384, by_tokens), 64);
  EXPECT_EQ(hc_projection_slices(1024, 16384, by_tokens), 8);
  EXPECT_EQ(hc_projection_slices(100000, 16384, by_tokens), 1);
  EXPECT_EQ(hc_projection_slices(5, 64, with("hf-bf16", {{"D06", "fixed"}})), 8);
  EXPECT_EQ(hc_projection_slices(5, 64, with("hf-bf16", {{"D06", "one"}})), 1);
}

// --- streams before their rounding ---------------------------------------------------------------

TEST(HyperConnection, UnroundedStreamsFeedOnlyProjectionAndStatistic) {
  const Numerics num =
      with("hf-bf16", {{"D07", "unrounded-upto-32"}, {"D09", "1"}, {"D08", "fp32"}});
  EXPECT_TRUE(hc_wants_unrounded(32, num));
  EXPECT_FALSE(hc_wants_unrounded(33, num));
  EXPECT_FALSE(hc_wants_unrounded(3, Numerics::policy("hf-bf16")));
  EXPECT_FALSE(hc_wants_unrounded(3, with("float32", {{"D07", "unrounded"}})));
  const auto mix = post_inputs(20, 4, 24, num);
  const Tensor unrounded = hc_post_unrounded(mix[0], mix[1], mix[2], mix[3], num);
  EXPECT_EQ(unrounded.scalar_type(), at::kFloat);
  const Tensor stored = hc_post(mix[0], mix[1], mix[2], mix[3], num);
  EXPECT_TRUE(same_bytes(unrounded.to(at::kBFloat16), stored));
  auto inputs = pre_inputs(20, 4, 24, num);
  inputs[0] = stored;
  const Evaluated fast = evaluate(pre_with(hc_pre, num, unrounded), inputs);
  expect_close(
      fast, evaluate(pre_with(hc_pre_reference, num, unrounded), inputs), 1e-3, 4e-3, "unrounded");
  EXPECT_FALSE(same_bytes(fast.outputs[2], pre_with(hc_pre, num)(inputs)[2]));
  // Given exactly the stored values, nothing changes.
  const auto same = pre_with(hc_pre, num, stored.to(at::kFloat))(inputs);
  EXPECT_TRUE(same_bytes(same[2], pre_with(hc_pre, num)(inputs)[2]));
}

// --- precision of the mixing weights (B11) -------------------------------------------------------

TEST(HyperConnection, B11MixingWeightsStayInFloat32OnBfloat16Streams) {
  const Numerics exact = Numerics::policy("float64");
  for (const char* policy : {"hf-bf16", "fsdp-fp32-islands"}) {
    const Numerics num = with(policy, {{"D01", "fp32"}, {"D02", "fp32"}});
    for (const double fn_std : {0.02, 0.05}) {
      const auto inputs = pre_inputs(4096, 4, 96, num, fn_std);
      std::vector<Tensor> wide;
      for (const Tensor& t : inputs) wide.push_back(t.to(at::kDouble));
      const auto want = pre_with(hc_pre_reference, exact)(wide);
      for (const bool fused : {true, false}) {
        const auto got = pre_with(fused ? PreForm(hc_pre) : PreForm(hc_pre_reference), num)(inputs);
        const double post = rel_l2(got[1], want[1]), comb = rel_l2(got[2], want[2]);
        const double rows = rel_l2(got[2].sum(2), want[2].sum(2)),
                     columns = rel_l2(got[2].sum(1), want[2].sum(1));
        RecordProperty(fmt::format("{}_{}_{}_post", policy, fn_std, fused ? "fused" : "plain"),
                       fmt::format("{:.2e}", post));
        RecordProperty(fmt::format("{}_{}_{}_comb", policy, fn_std, fused ? "fused" : "plain"),
                       fmt::format("{:.2e}", comb));
        EXPECT_LE(post, 2e-5) << policy;
        EXPECT_LE(comb, 2e-5) << policy;
        EXPECT_LE(rows, 2e-5) << policy;
        EXPECT_LE(columns, 2e-5) << policy;
        EXPECT_LE((got[2].to(at::kDouble).sum(1) - 1).abs().max().item<double>(), 3e-6);
      }
    }
  }
}

TEST(HyperConnection, StatisticRunsOverAllStreamsAtRealWidth) {
  const Numerics num = Numerics::policy("float32");
  auto inputs = pre_inputs(3, 4, 4096, num, 0.02);
  // One loud stream: a statistic over 4096 instead of 16384 values would double the logits.
  inputs[0].select(1, 2).mul_(30);
  std::vector<Tensor> wide;
  for (const Tensor& t : inputs) wide.push_back(t.to(at::kDouble));
  const Numerics exact = Numerics::policy("float64");
  const Evaluated want = evaluate(pre_with(hc_pre_reference, exact), wide);
  const Evaluated got = evaluate(pre_with(hc_pre, num), inputs);
  for (size_t i = 0; i < 3; ++i) EXPECT_LE(rel_l2(got.outputs[i], want.outputs[i]), 1e-5) << i;
  for (size_t i = 0; i < 5; ++i) EXPECT_LE(rel_l2(got.gradients[i], want.gradients[i]), 1e-4) << i;
}

// --- the final mean ------------------------------------------------------------------------------

TEST(HyperConnection, FinalMeanRoundsOnceOrAfterEveryAddition) {
  for (const char* policy : {"float64", "float32", "hf-bf16"}) {
    for (const char* form : {"fp32", "sequential"}) {
      const Numerics num = with(policy, {{"D58", form}});
      for (const Size& s : {Size{0, 4, 8}, Size{70, 4, 33}, Size{3, 1, 5}, Size{9, 3, 16}}) {
        const std::vector<Tensor> inputs = {random("x", {s.T, s.n, s.D}).to(num.act())};
        const auto fast = [&](const auto& in) { return std::vector<Tensor>{hc_mean(in[0], num)}; };
        const auto plain = [&](const auto& in) {
          return std::vector<Tensor>{hc_mean_reference(in[0], num)};
        };
        const double bound = num.width() == Width::kFloat64 ? 1e-15 : num.is_bf16() ? 1e-3 : 1e-7;
        expect_close(evaluate(fast, inputs), evaluate(plain, inputs), bound, bound, num.name());
      }
    }
  }
  const Tensor x = at::tensor({1.0, 0.00390625, 0.00390625, 0.0}, at::kDouble)
                       .reshape({1, 4, 1})
                       .to(at::kBFloat16);
  EXPECT_EQ(hc_mean(x, with("hf-bf16", {{"D58", "sequential"}})).item<double>(), 0.25);
  EXPECT_EQ(hc_mean(x, with("hf-bf16", {{"D58", "fp32"}})).item<double>(), 0.251953125);
}

// --- what must not change a byte -----------------------------------------------------------------

TEST(HyperConnection, ResultsDependNeitherOnThreadsNorOnTheCall) {
  for (const char* policy : {"float64", "float32", "hf-bf16"}) {
    const Numerics num = Numerics::policy(policy);
    const auto pre = pre_inputs(1000, 4, 48, num);
    const auto post = post_inputs(1000, 4, 48, num);
    const auto run = [&] { return evaluate(pre_with(hc_pre, num), pre); };
    const auto run_post = [&] { return evaluate(post_with(hc_post, num), post); };
    const Evaluated many = run(), many_post = run_post();
    expect_same(many, run(), "twice");
    expect_same(many, on_one_thread(run), "one thread");
    expect_same(many_post, on_one_thread(run_post), "one thread, post");
  }
}

TEST(HyperConnection, WithFixedTilesATokenDoesNotSeeItsNeighbours) {
  const Numerics num = with("float32", {{"D63", "fixed-tiles"}, {"D06", "fixed"}});
  const auto all = pre_inputs(200, 4, 64, num);
  const auto whole = pre_with(hc_pre, num)(all);
  for (const auto& [begin, end] : std::vector<std::pair<int64_t, int64_t>>{
           {0, 1}, {3, 131}, {64, 128}, {128, 131}, {192, 200}}) {
    auto part = all;
    part[0] = all[0].slice(0, begin, end).contiguous();
    const auto alone = pre_with(hc_pre, num)(part);
    for (size_t i = 0; i < 3; ++i)
      EXPECT_TRUE(same_bytes(alone[i], whole[i].slice(0, begin, end))) << begin;
  }
}

TEST(HyperConnection, B53WrongArgumentsAreNamed) {
  const Numerics num = Numerics::policy("float32");
  const auto refuse = [&](size_t which, const Tensor& wrong, const std::string& name) {
    auto in = pre_inputs(3, 4, 8, num);
    in[which] = wrong;
    for (const PreForm& form : {PreForm(hc_pre), PreForm(hc_pre_reference)}) {
      try {
        pre_with(form, num)(in);
        FAIL() << name << " was accepted";
      } catch (const Error& e) {
        EXPECT_EQ(e.kind(), ErrorKind::kShape);
        EXPECT_NE(std::string(e.what()).find(name), std::string::npos) << e.what();
      }
    }
  };
  refuse(0, at::zeros({3, 4, 8}, at::kDouble), "x");
  refuse(0, at::zeros({3, 32}), "x");
  refuse(1, at::zeros({24, 8}), "fn");
  refuse(2, at::zeros({4}), "base");
  refuse(3, at::zeros({24}), "scale");
  refuse(4, at::zeros({8}, at::kLong), "norm_weight");
  const auto in = pre_inputs(3, 4, 8, num);
  EXPECT_THROW(hc_pre(in[0], in[1], in[2], in[3], in[4], {1e-5, 1e-6, 0}, num), Error);
  const auto mix = post_inputs(3, 4, 8, num);
  EXPECT_THROW(hc_post(mix[0], mix[1], mix[2].t(), mix[3], num), Error);
  EXPECT_THROW(hc_post(mix[1], mix[1], mix[2], mix[3], num), Error);
}

TEST(HyperConnection, AnUnusedOutputGivesNoGradientOfItsOwn) {
  const Numerics num = Numerics::policy("float64");
  const auto inputs = pre_inputs(9, 4, 8, num);
  for (const size_t used : {0u, 1u, 2u}) {
    const auto only = [used](const TensorFunction& f) {
      return [f, used](const std::vector<Tensor>& in) { return std::vector<Tensor>{f(in)[used]}; };
    };
    const Evaluated fast = evaluate(only(pre_with(hc_pre, num)), inputs);
    const Evaluated plain = evaluate(only(pre_with(hc_pre_reference, num)), inputs);
    for (size_t i = 0; i < fast.gradients.size(); ++i) {
      if (!plain.gradients[i].defined()) {
        EXPECT_EQ(fast.gradients[i].abs().max().item<double>(), 0) << used << i;
      } else {
        EXPECT_LE(rel_l2(fast.gradients[i], plain.gradients[i]), 1e-13) << used << i;
      }
    }
  }
}

}  // namespace
}  // namespace lockstep::model
