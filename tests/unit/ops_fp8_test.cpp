// e4m3fn codes, row scales and the Walsh-Hadamard rotation, each in its plain and its fast form.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

#include "model/base/seeded.hpp"
#include "model/ops/fp8.hpp"

namespace lockstep::model {
namespace {

Tensor seeded(std::string_view name, at::IntArrayRef sizes, at::ScalarType dtype) {
  const int64_t n = std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  return at::tensor(seeded_uniform(7, name, n)).reshape(sizes).to(dtype);
}

/// x_i = bf16(sin(0.37 (i+1)) * (i mod 5 + 1)).
Tensor golden_row() {
  std::vector<float> x;
  for (int i = 0; i < 128; ++i) {
    x.push_back(static_cast<float>(std::sin(0.37 * (i + 1)) * (i % 5 + 1)));
  }
  return at::tensor(x).to(at::kBFloat16);
}

TEST(Fp8, RoundsToNearestEvenAndClampsLikeTheRecordedValues) {
  const std::vector<std::pair<float, int>> cases = {{17.0F, 0x58},
                                                    {19.0F, 0x5a},
                                                    {20.5F, 0x5a},
                                                    {248.0F, 0x78},
                                                    {447.9F, 0x7e},
                                                    {std::ldexp(1.0F, -10), 0x00},
                                                    {3 * std::ldexp(1.0F, -10), 0x02},
                                                    {-0.00830078125F, 0x84},
                                                    {1e9F, 0x7e},
                                                    {-INFINITY, 0xfe},
                                                    {NAN, 0x7f}};
  for (const auto& [x, byte] : cases) EXPECT_EQ(e4m3_encode(x), byte) << x;
  EXPECT_EQ(e4m3_decode(0x84), -0.0078125F);
  EXPECT_EQ(e4m3_decode(0x7e), 448.0F);
}

TEST(Fp8, EveryCodeDecodesToTheLibrarysValueAndEncodesBack) {
  const Tensor bytes = at::arange(256, at::kLong).to(at::kByte);
  const Tensor values = bytes.view(at::kFloat8_e4m3fn).to(at::kFloat);
  for (int64_t i = 0; i < 256; ++i) {
    const float want = values[i].item<float>(), got = e4m3_decode(static_cast<uint8_t>(i));
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(got));
      continue;
    }
    EXPECT_EQ(got, want) << i;
    EXPECT_EQ(e4m3_encode(got), i);
  }
}

TEST(Fp8, EncodesEveryBfloat16AsTheLibraryDoesAfterClamping) {
  const Tensor bits = at::arange(65536, at::kInt).to(at::kShort);
  const Tensor x = bits.view(at::kBFloat16).to(at::kFloat);
  const Tensor want = x.clamp(-448, 448).to(at::kFloat8_e4m3fn).view(at::kByte).to(at::kInt);
  for (int64_t i = 0; i < 65536; ++i) {
    const float v = x.const_data_ptr<float>()[i];
    if (std::isnan(v)) continue;
    ASSERT_EQ(e4m3_encode(v), want.const_data_ptr<int>()[i]) << v;
    ASSERT_EQ(std::bit_cast<uint32_t>(e4m3_round(v)),
              std::bit_cast<uint32_t>(e4m3_decode(e4m3_encode(v))))
        << v;
  }
}

TEST(Fp8, HadamardAndQuantisationGiveTheRecordedBytes) {
  const std::vector<int> first = {0x63,
                                  0x4c,
                                  0xce,
                                  0x59,
                                  0x51,
                                  0xd8,
                                  0xd9,
                                  0xd1,
                                  0x71,
                                  0xed,
                                  0xf3,
                                  0xca,
                                  0xfe,
                                  0xe1,
                                  0xe4,
                                  0x61};
  const Tensor x = golden_row();
  EXPECT_EQ(x[3].item<float>(), 3.984375F);
  for (const bool reference : {false, true}) {
    const Tensor h = reference ? hadamard_reference(x) : hadamard(x);
    EXPECT_EQ(h[0].item<float>(), 1.359375F);
    EXPECT_EQ(h[1].item<float>(), 0.1884765625F);
    EXPECT_EQ(h[2].item<float>(), -0.220703125F);
    EXPECT_EQ(h[3].item<float>(), 0.57421875F);
    EXPECT_EQ(h.abs().max().item<float>(), 13.6875F);
    const Fp8Rows rows =
        reference ? quantise_rows_reference(h, Fp8Scale::kPow2) : quantise_rows(h, Fp8Scale::kPow2);
    EXPECT_EQ(rows.scale.item<float>(), 0.03125F);
    for (size_t i = 0; i < first.size(); ++i) {
      EXPECT_EQ(rows.bytes[static_cast<int64_t>(i)].item<int>(), first[i]);
    }
    EXPECT_EQ(rows.bytes.to(at::kLong).sum().item<int64_t>(), 19989);
    EXPECT_EQ((dequantise_rows(rows) / rows.scale).sum().item<float>(), 122.1484375F);
  }
}

TEST(Fp8, FastRowsEqualTheReferenceBitForBitAtAwkwardSizes) {
  for (const int64_t rows : {0, 1, 7, 9, 300}) {
    for (const int64_t dim : {1, 2, 64, 128, 256}) {
      const Tensor x = seeded("x", {rows, dim}, at::kBFloat16) * 37;
      const Tensor h = hadamard(x);
      EXPECT_TRUE(at::equal(h, hadamard_reference(x))) << rows << " " << dim;
      for (const Fp8Scale mode : {Fp8Scale::kExact, Fp8Scale::kPow2}) {
        const Fp8Rows fast = quantise_rows(h, mode), plain = quantise_rows_reference(h, mode);
        EXPECT_TRUE(at::equal(fast.bytes, plain.bytes)) << rows << " " << dim;
        EXPECT_TRUE(at::equal(fast.scale, plain.scale)) << rows << " " << dim;
      }
    }
  }
}

TEST(Fp8, HadamardTwiceIsTheIdentityAndKeepsDotProducts) {
  const Tensor x = seeded("x", {33, 128}, at::kBFloat16), y = seeded("y", {33, 128}, at::kBFloat16);
  const Tensor hx = hadamard(x), hy = hadamard(y);
  // Each of the two roundings moves an element by at most 2^-9 of its size.
  EXPECT_LT((hadamard(hx).to(at::kFloat) - x.to(at::kFloat)).abs().max().item<float>(), 0.02F);
  const Tensor dots = (x.to(at::kDouble) * y.to(at::kDouble)).sum(-1);
  const Tensor rotated = (hx.to(at::kDouble) * hy.to(at::kDouble)).sum(-1);
  EXPECT_LT((dots - rotated).abs().max().item<double>(), 0.1);
  // A unit vector spreads evenly, so the transform is not the identity itself.
  Tensor e = at::zeros({128}, at::kFloat);
  e[5] = 1;
  EXPECT_EQ(hadamard(e).abs().min().item<float>(), hadamard(e).abs().max().item<float>());
  // Values representable throughout come back exactly.
  const Tensor z = at::tensor(std::vector<float>{1, 2, 3, -4});
  EXPECT_TRUE(at::equal(hadamard(hadamard(z)).to(at::kFloat), z));
}

TEST(Fp8, PowerOfTwoScaleByReciprocalEqualsDivisionForEveryBfloat16Amax) {
  int64_t count = 0;
  for (uint32_t bits = 0; bits < 0x8000U; ++bits) {
    const auto amax = std::bit_cast<float>(bits << 16);
    if (!(amax >= 1e-4F && amax <= 1e4F)) continue;
    ++count;
    const double exact = static_cast<double>(amax) / 448.0;
    int exponent = 0;
    const double fraction = std::frexp(exact, &exponent);
    const double want = std::ldexp(1.0, fraction == 0.5 ? exponent - 1 : exponent);
    ASSERT_EQ(static_cast<double>(fp8_scale(amax, Fp8Scale::kPow2)), want) << amax;
  }
  EXPECT_EQ(count, 3403);
}

TEST(Fp8, ZeroRowsUseTheFloorAndStayZero) {
  const Fp8Rows rows = quantise_rows(at::zeros({3, 16}, at::kBFloat16), Fp8Scale::kPow2);
  EXPECT_EQ(rows.scale[0].item<float>(), std::ldexp(1.0F, -22));
  EXPECT_EQ(rows.bytes.to(at::kLong).sum().item<int64_t>(), 0);
}

TEST(Fp8, WrongArgumentsAreNamed) {
  EXPECT_THROW(hadamard(at::zeros({2, 24}, at::kFloat)), Error);
  EXPECT_THROW(hadamard(at::zeros({2, 16}, at::kDouble)), Error);
  EXPECT_THROW(quantise_rows(at::zeros({2, 16}, at::kInt), Fp8Scale::kPow2), Error);
}

}  // namespace
}  // namespace lockstep::model
