// FP8 products with block scales.
#include <gtest/gtest.h>

#include "model/checkpoint/name_table.hpp"
#include "model/ops/fp8_linear.hpp"
#include "tests/unit/ops_test_support.hpp"

namespace lockstep::model::test {
namespace {

TEST(Fp8Linear, BlocksKeepTheirLargestValueAndTheRestWithinHalfAStep) {
  for (const auto& [n, k] : {std::pair<int64_t, int64_t>{128, 256}, {130, 70}, {1, 129}}) {
    const Tensor w = random("w", {n, k}, 0.02).to(at::kFloat);
    const Fp8Blocks blocks = quantise_blocks(w);
    const Tensor back = dequantise_blocks(blocks);
    EXPECT_LE(rel_l2(back, w), 0.04) << n << ' ' << k;
    // A checkpoint in FP8 is read the same way, but for the rounding to bfloat16.
    EXPECT_TRUE(same_bytes(dequantize_blocks(blocks.bytes.view(at::kFloat8_e4m3fn), blocks.scale),
                           back.to(at::kBFloat16)));
    // Each block's largest value is exactly 448 steps.
    const Tensor corner =
        w.narrow(0, 0, std::min<int64_t>(n, 128)).narrow(1, 0, std::min<int64_t>(k, 128));
    EXPECT_EQ(blocks.scale[0][0].item<float>(), corner.abs().max().item<float>() / 448.0F);
  }
  const Fp8Blocks zero = quantise_blocks(at::zeros({4, 4}));
  EXPECT_EQ(zero.scale.item<float>(), 1e-12F);
  EXPECT_EQ(dequantise_blocks(zero).abs().max().item<float>(), 0);
}

TEST(Fp8Linear, StacksOfExpertsAreQuantisedOneByOne) {
  const Tensor w = random("w", {3, 130, 70}).to(at::kFloat);
  const Fp8Blocks all = quantise_blocks(w);
  for (int64_t e = 0; e < 3; ++e) {
    EXPECT_TRUE(same_bytes(all.bytes[e], quantise_blocks(w[e]).bytes));
    EXPECT_TRUE(same_bytes(all.scale[e], quantise_blocks(w[e]).scale));
  }
  EXPECT_EQ(dequantise_blocks(all).sizes(), w.sizes());
}

TEST(Fp8Linear, EqualsTheDequantisedProductInFloat64) {
  for (const char* policy : {"float32", "fsdp-bf16"}) {
    const Numerics num = Numerics::policy(policy);
    for (const int64_t k : {96, 128, 300}) {
      const Tensor x = random("x", {7, k}).to(num.act());
      const Fp8Blocks w = quantise_blocks(random("w", {150, k}, 0.05));
      EXPECT_LE(rel_l2(linear_fp8(x, w, num), linear_fp8_reference(x, w, num)),
                num.is_bf16() ? 2e-3 : 1e-6)
          << policy << ' ' << k;
      const Tensor exact = at::matmul(x.to(at::kDouble), dequantise_blocks(w).to(at::kDouble).t());
      EXPECT_LE(rel_l2(linear_fp8(x, w, num), exact), 0.05);
      EXPECT_GT(rel_l2(linear_fp8(x, w, num), exact), 1e-3) << "x was not quantised";
    }
  }
  EXPECT_EQ(
      linear_fp8(
          at::zeros({0, 96}), quantise_blocks(random("w", {5, 96})), Numerics::policy("float32"))
          .size(0),
      0);
  EXPECT_THROW(linear_fp8(at::zeros({1, 96}, at::kDouble),
                          quantise_blocks(random("w", {5, 96})),
                          Numerics::policy("float64")),
               Error);
}

}  // namespace
}  // namespace lockstep::model::test
