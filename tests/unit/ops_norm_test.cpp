#include <ATen/Parallel.h>
#include <gmock/gmock.h>

#include <functional>

#include "model/ops/norm.hpp"
#include "tests/unit/ops_kda_support.hpp"

namespace lockstep::model {
namespace {

using namespace test;

struct NormResult {
  Tensor y, dx, dgate, dw;
};

using Plain = std::function<Tensor(const Tensor&, const Tensor&, double, const Numerics&)>;
using Gated =
    std::function<Tensor(const Tensor&, const Tensor&, const Tensor&, double, const Numerics&)>;

NormResult run(
    const Plain& f, const Tensor& x, const Tensor& w, const Tensor& dy, const Numerics& num) {
  const Tensor xl = leaf(x, num.act()), wl = leaf(w, num.acc());
  const Tensor y = f(xl, wl, 1e-5, num);
  y.backward(dy.to(num.act()));
  return {y.detach(), xl.grad(), Tensor(), wl.grad()};
}

NormResult run(const Gated& f,
               const Tensor& o,
               const Tensor& gate,
               const Tensor& w,
               const Tensor& dy,
               const Numerics& num) {
  const Tensor ol = leaf(o, num.act()), gl = leaf(gate, num.act()), wl = leaf(w, num.acc());
  const Tensor y = f(ol, gl, wl, 1e-5, num);
  y.backward(dy.to(num.act()));
  return {y.detach(), ol.grad(), gl.grad(), wl.grad()};
}

void expect_same(const NormResult& got, const NormResult& want, double bound) {
  EXPECT_CLOSE(got.y, want.y, bound);
  EXPECT_CLOSE(got.dx, want.dx, bound);
  if (want.dgate.defined()) {
    EXPECT_CLOSE(got.dgate, want.dgate, bound);
  }
  EXPECT_CLOSE(got.dw, want.dw, bound);
}

TEST(Norm, FastEqualsReferenceInEveryWidth) {
  for (const auto& [rows, dim] : std::vector<std::pair<int64_t, int64_t>>{
           {0, 8}, {1, 2}, {3, 20}, {64, 16}, {65, 37}, {200, 128}}) {
    const Tensor x = seeded({rows, dim}, "x", 3), w = seeded({dim}, "w") + 1;
    const Tensor dy = seeded({rows, dim}, "dy");
    for (const auto& [policy, bound] : std::vector<std::pair<std::string, double>>{
             {"float64", 1e-14}, {"float32", 1e-6}, {"hf-bf16", 5e-4}, {"fsdp-bf16", 5e-4}}) {
      SCOPED_TRACE(fmt::format("{} rows {} dim {}", policy, rows, dim));
      const Numerics num = Numerics::policy(policy);
      expect_same(run(rms_norm, x, w, dy, num), run(rms_norm_reference, x, w, dy, num), bound);
    }
  }
}

TEST(Norm, GatedFastEqualsReferenceInEveryWidth) {
  for (const auto& [tokens, heads, dim] :
       std::vector<std::tuple<int64_t, int64_t, int64_t>>{{0, 2, 16}, {1, 3, 20}, {130, 5, 64}}) {
    const Tensor o = seeded({tokens, heads, dim}, "o", 2), w = seeded({dim}, "w") + 1;
    const Tensor gate = seeded({tokens, heads, dim}, "gate", 6);
    const Tensor dy = seeded({tokens, heads, dim}, "dy");
    for (const auto& [policy, bound] : std::vector<std::pair<std::string, double>>{
             {"float64", 1e-14}, {"float32", 1e-6}, {"hf-bf16", 5e-4}}) {
      SCOPED_TRACE(fmt::format("{} tokens {} dim {}", policy, tokens, dim));
      const Numerics num = Numerics::policy(policy);
      expect_same(run(gated_rms_norm, o, gate, w, dy, num),
                  run(gated_rms_norm_reference, o, gate, w, dy, num),
                  bound);
    }
  }
}

TEST(Norm, OneAndTwoRoundingsDifferInAQuarterOfTheElements) {
  Numerics two = Numerics::policy("hf-bf16"), one = two;
  one.set("D11", "1");
  const Tensor x = seeded({64, 256}, "x", 3).to(at::kBFloat16);
  const Tensor w = (seeded({256}, "w", 0.5) + 1).to(at::kBFloat16);
  const Tensor a = rms_norm(x, w, 1e-5, one), b = rms_norm(x, w, 1e-5, two);
  const double share = a.ne(b).to(at::kDouble).mean().item<double>();
  EXPECT_GT(share, 0.15);
  EXPECT_LT(share, 0.35);
  EXPECT_LT(rel_l2(a, b), 4e-3);
}

TEST(Norm, EachSwitchChangesTheBytes) {
  const Tensor x = seeded({8, 256}, "x", 0.01).to(at::kBFloat16);
  const Tensor w = seeded({256}, "w", 0.5).to(at::kFloat) + 1;
  Numerics load = Numerics::policy("hf-bf16"), rounded = load;
  rounded.set("D13", "bf16");
  EXPECT_FALSE(same_bytes(rms_norm(x, w, 1e-5, load), rms_norm(x, w, 1e-5, rounded)));
  EXPECT_TRUE(
      same_bytes(rms_norm(x, w, 1e-5, rounded), rms_norm(x, w.to(at::kBFloat16), 1e-5, load)));
  Numerics fixed = load;
  fixed.set("D29", "1e-5");
  const Tensor o = x.view({8, 2, 128}), wv = w.slice(0, 0, 128);
  EXPECT_FALSE(
      same_bytes(gated_rms_norm(o, o, wv, 1e-3, load), gated_rms_norm(o, o, wv, 1e-3, fixed)));
  EXPECT_TRUE(
      same_bytes(gated_rms_norm(o, o, wv, 1e-5, load), gated_rms_norm(o, o, wv, 1e-3, fixed)));
}

TEST(Norm, BytesDoNotDependOnThreadsCallsOrOtherRows) {
  const Numerics num = Numerics::policy("float32");
  const Tensor x = seeded({300, 96}, "x").to(at::kFloat), w = seeded({96}, "w").to(at::kFloat);
  const Tensor dy = seeded({300, 96}, "dy").to(at::kFloat);
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const NormResult one = run(rms_norm, x, w, dy, num);
  at::set_num_threads(2);
  const NormResult two = run(rms_norm, x, w, dy, num);
  at::set_num_threads(threads);
  EXPECT_TRUE(same_bytes(one.y, two.y) && same_bytes(one.dx, two.dx) && same_bytes(one.dw, two.dw));
  const Tensor row = rms_norm(x.slice(0, 171, 172), w, 1e-5, num);
  EXPECT_TRUE(same_bytes(row, one.y.slice(0, 171, 172)));
}

TEST(Norm, WrongArgumentsAreNamed) {
  const Numerics num = Numerics::policy("float32");
  const Tensor x = at::ones({2, 8}), w = at::ones({8});
  const auto message = [](auto&& f) -> std::string {
    try {
      f();
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kShape);
      return e.what();
    }
    return "nothing was thrown";
  };
  EXPECT_THAT(message([&] { rms_norm(x, at::ones({7}), 1e-5, num); }),
              testing::HasSubstr("weight: expected shape [8], got [7] float32"));
  EXPECT_THAT(message([&] { rms_norm(x.to(at::kDouble), w, 1e-5, num); }),
              testing::HasSubstr("x: expected dtype float32"));
  EXPECT_THAT(message([&] {
                gated_rms_norm(x, at::ones({2, 4}), w, 1e-5, num);
              }),
              testing::HasSubstr("gate: expected shape [2, 8]"));
}

}  // namespace
}  // namespace lockstep::model
