#include <ATen/Parallel.h>
#include <gmock/gmock.h>

#include <functional>

#include "model/ops/conv.hpp"
#include "tests/unit/ops_kda_support.hpp"

namespace lockstep::model {
namespace {

using namespace test;

struct ConvResult {
  Tensor y, dx, dw, dhalo;
};

using Conv = std::function<Tensor(
    const Tensor&, const Tensor&, std::span<const int64_t>, const Tensor&, const Numerics&)>;

ConvResult run(const Conv& f,
               const Tensor& x,
               const Tensor& w,
               const std::vector<int64_t>& cu,
               const Tensor& halo,
               const Tensor& dy,
               const Numerics& num) {
  const Tensor xl = leaf(x, num.act()), wl = leaf(w, num.acc()), hl = leaf(halo, num.act());
  const Tensor y = f(xl, wl, cu, hl, num);
  y.backward(dy.to(num.act()));
  return {y.detach(), xl.grad(), wl.grad(), halo.defined() ? hl.grad() : Tensor()};
}

void expect_same(const ConvResult& got, const ConvResult& want, double bound) {
  EXPECT_CLOSE(got.y, want.y, bound);
  EXPECT_CLOSE(got.dx, want.dx, bound);
  EXPECT_CLOSE(got.dw, want.dw, bound);
  if (want.dhalo.defined()) {
    EXPECT_CLOSE(got.dhalo, want.dhalo, bound);
  }
}

TEST(Conv, FastEqualsReferenceForAnyWidthAndSegments) {
  const std::vector<int64_t> cu = boundaries({0, 1, 2, 0, 3, 130, 5, 300, 0});
  const int64_t tokens = cu.back(), segments = static_cast<int64_t>(cu.size()) - 1;
  for (const int64_t width : {1, 2, 4, 7}) {
    for (const int64_t channels : {1, 20, 300}) {
      const Tensor x = seeded({tokens, channels}, "x", 2);
      const Tensor w = seeded({channels, width}, "w");
      const Tensor dy = seeded({tokens, channels}, "dy");
      for (const bool with_halo : {false, true}) {
        const Tensor halo =
            with_halo ? seeded({segments, width - 1, channels}, "halo", 2) : Tensor();
        for (const auto& [policy, bound] : std::vector<std::pair<std::string, double>>{
                 {"float64", 1e-14}, {"float32", 1e-6}, {"hf-bf16", 5e-4}, {"fsdp-bf16", 5e-4}}) {
          SCOPED_TRACE(fmt::format("{} W {} C {} halo {}", policy, width, channels, with_halo));
          const Numerics num = Numerics::policy(policy);
          expect_same(run(conv_silu, x, w, cu, halo, dy, num),
                      run(conv_silu_reference, x, w, cu, halo, dy, num),
                      bound);
        }
      }
    }
  }
}

TEST(Conv, SiluFormsAgreeToRounding) {
  const Tensor x = seeded({50, 24}, "x", 4), w = seeded({24, 4}, "w"), dy = seeded({50, 24}, "dy");
  Numerics num = Numerics::policy("float64");
  const ConvResult product = run(conv_silu, x, w, {0, 50}, Tensor(), dy, num);
  num.set("D16", "x/(1+exp(-x))");
  const ConvResult quotient = run(conv_silu, x, w, {0, 50}, Tensor(), dy, num);
  expect_same(quotient, product, 1e-15);
  expect_same(quotient, run(conv_silu_reference, x, w, {0, 50}, Tensor(), dy, num), 1e-14);
}

TEST(Conv, HaloContinuesADocumentBitForBit) {
  const Numerics num = Numerics::policy("float32");
  const Tensor x = seeded({200, 33}, "x").to(at::kFloat), w = seeded({33, 4}, "w").to(at::kFloat);
  const std::vector<int64_t> whole_cu = {0, 200};
  const Tensor whole = conv_silu(x, w, whole_cu, Tensor(), num);
  for (const int64_t cut : {3, 77, 128}) {
    const std::vector<int64_t> cu = {0, 200 - cut};
    const Tensor halo = x.slice(0, cut - 3, cut).unsqueeze(0);
    const Tensor rest = conv_silu(x.slice(0, cut), w, cu, halo, num);
    EXPECT_TRUE(same_bytes(rest, whole.slice(0, cut))) << "cut at " << cut;
  }
}

TEST(Conv, B07PackedDocumentsEqualDocumentsAloneBitForBit) {
  const Numerics num = Numerics::policy("float32");
  const std::vector<int64_t> lengths = {13, 7, 40, 1, 3}, cu = boundaries(lengths);
  const Tensor x = seeded({64, 24}, "x").to(at::kFloat), w = seeded({24, 4}, "w").to(at::kFloat);
  const Tensor dy = seeded({64, 24}, "dy").to(at::kFloat);
  const ConvResult packed = run(conv_silu, x, w, cu, Tensor(), dy, num);
  for (size_t d = 0; d < lengths.size(); ++d) {
    const auto part = [&](const Tensor& t) { return t.slice(0, cu[d], cu[d + 1]); };
    const ConvResult alone = run(conv_silu, part(x), w, {0, lengths[d]}, Tensor(), part(dy), num);
    EXPECT_TRUE(same_bytes(part(packed.y), alone.y) && same_bytes(part(packed.dx), alone.dx));
  }
  Tensor changed = x.clone();
  changed[12] += 1;
  const Tensor y = conv_silu(changed, w, cu, Tensor(), num);
  EXPECT_TRUE(same_bytes(y.slice(0, 13), packed.y.slice(0, 13)));
  EXPECT_FALSE(same_bytes(y.slice(0, 0, 13), packed.y.slice(0, 0, 13)));
}

TEST(Conv, BytesDoNotDependOnThreadsCallsOrLayout) {
  const Numerics num = Numerics::policy("float32");
  const std::vector<int64_t> cu = boundaries({300, 0, 41, 500});
  const Tensor wide = seeded({841, 90}, "x").to(at::kFloat), w = seeded({30, 4}, "w");
  const Tensor x = wide.slice(1, 30, 60), dy = seeded({841, 30}, "dy");
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const ConvResult one = run(conv_silu, x, w, cu, Tensor(), dy, num);
  at::set_num_threads(2);
  const ConvResult two = run(conv_silu, x, w, cu, Tensor(), dy, num);
  at::set_num_threads(threads);
  EXPECT_TRUE(same_bytes(one.y, two.y) && same_bytes(one.dx, two.dx) && same_bytes(one.dw, two.dw));
  const Tensor strided = conv_silu(x, w.to(at::kFloat), cu, Tensor(), num);
  EXPECT_TRUE(same_bytes(strided, one.y));
}

TEST(Conv, WeightRoundingIsASwitch) {
  const Numerics fp32 = Numerics::policy("hf-bf16");
  Numerics bf16 = fp32;
  bf16.set("D14", "bf16");
  const std::vector<int64_t> cu = {0, 40};
  const Tensor x = seeded({40, 16}, "x").to(at::kBFloat16), w = seeded({16, 4}, "w").to(at::kFloat);
  const Tensor exact = conv_silu(x, w, cu, Tensor(), fp32);
  const Tensor rounded = conv_silu(x, w, cu, Tensor(), bf16);
  EXPECT_FALSE(same_bytes(exact, rounded));
  EXPECT_TRUE(same_bytes(rounded, conv_silu(x, w.to(at::kBFloat16), cu, Tensor(), fp32)));
}

TEST(Conv, WrongArgumentsAreNamed) {
  const Numerics num = Numerics::policy("float32");
  const Tensor x = at::ones({5, 8}), w = at::ones({8, 4});
  const std::vector<int64_t> cu = {0, 5};
  const auto message = [&](const Tensor& xs,
                           const Tensor& ws,
                           const std::vector<int64_t>& bounds,
                           const Tensor& halo) -> std::string {
    try {
      conv_silu(xs, ws, bounds, halo, num);
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kShape);
      return e.what();
    }
    return "nothing was thrown";
  };
  EXPECT_THAT(message(x, at::ones({7, 4}), cu, {}), testing::HasSubstr("weight: expected shape"));
  EXPECT_THAT(message(x.to(at::kDouble), w, cu, {}), testing::HasSubstr("x: expected dtype"));
  EXPECT_THAT(message(x, w, {0, 4}, {}), testing::HasSubstr("cu: expected segment boundaries"));
  EXPECT_THAT(message(x, w, {0, 3, 2, 5}, {}), testing::HasSubstr("must not decrease"));
  EXPECT_THAT(message(x, w, cu, at::ones({1, 2, 8})), testing::HasSubstr("halo: expected shape"));
}

}  // namespace
}  // namespace lockstep::model
