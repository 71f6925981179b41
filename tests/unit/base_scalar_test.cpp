// Scalar formats: rounding to bfloat16 and tf32, and the vectorisable exponential.
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "model/base/scalar.hpp"
#include "model/base/torch.hpp"

namespace lockstep {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TEST(Scalar, BfloatRoundingEqualsTorchForEverySixteenBitNeighbourhood) {
  std::vector<float> values;
  for (uint32_t high = 0; high < 0x10000; high += 7) {
    for (const uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      values.push_back(std::bit_cast<float>((high << 16) | low));
    }
  }
  for (const float v : values) {
    const c10::BFloat16 want(v);
    if (std::isnan(v)) {
      EXPECT_TRUE(std::isnan(round_bf16(v)));
      EXPECT_EQ(to_bf16(v).bits, 0x7fc0);
      continue;
    }
    ASSERT_EQ(to_bf16(v).bits, want.x) << v;
    ASSERT_EQ(round_bf16(v), static_cast<float>(want)) << v;
    ASSERT_EQ(to_float(to_bf16(v)), static_cast<float>(want)) << v;
  }
}

TEST(Scalar, TensorFloatKeepsTenMantissaBitsAndTiesGoToEven) {
  EXPECT_EQ(round_tf32(1.0f + 0x1p-10f), 1.0f + 0x1p-10f);
  EXPECT_EQ(round_tf32(1.0f + 0x1p-11f), 1.0f);
  EXPECT_EQ(round_tf32(1.0f + 3 * 0x1p-11f), 1.0f + 0x1p-9f);
  EXPECT_EQ(round_tf32(-1.0f - 0x1p-11f - 0x1p-20f), -1.0f - 0x1p-10f);
  EXPECT_EQ(round_tf32(kInf), kInf);
  EXPECT_TRUE(std::isnan(round_tf32(kNan)));
}

TEST(Scalar, FastExponentialIsWithinOneUlpOverTheWholeRange) {
  double worst = 0;
  for (double x = -87.32; x < 88.72; x += 0.00113) {
    const auto f = static_cast<float>(x);
    const double want = std::exp(static_cast<double>(f));
    worst = std::max(worst, std::abs(static_cast<double>(exp_fast(f)) - want) / want);
  }
  EXPECT_LT(worst, 0x1p-23);
  EXPECT_EQ(exp_fast(0.0f), 1.0f);
  EXPECT_EQ(exp_fast(-88.0f), 0.0f);
  EXPECT_EQ(exp_fast(-kInf), 0.0f);
  EXPECT_EQ(exp_fast(88.8f), kInf);
  EXPECT_EQ(exp_fast(kInf), kInf);
  EXPECT_TRUE(std::isnan(exp_fast(kNan)));
  EXPECT_TRUE(std::isnan(exp_fast(-kNan)));
}

TEST(Scalar, DotProductCoversTails) {
  for (const int64_t n : {0, 1, 7, 31, 32, 33, 100}) {
    std::vector<double> a(static_cast<size_t>(n)), b(a.size());
    double want = 0;
    for (size_t i = 0; i < a.size(); ++i) {
      a[i] = static_cast<double>(i) + 1;
      b[i] = 2.0 - static_cast<double>(i % 3);
      want += a[i] * b[i];
    }
    EXPECT_EQ(dot(a.data(), b.data(), n), want) << n;
  }
}

}  // namespace
}  // namespace lockstep
