#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <numeric>

#include "golden/compare/limits.hpp"
#include "golden/compare/logits.hpp"
#include "golden/compare/metrics.hpp"
#include "golden/compare/sketch.hpp"
#include "golden/store/golden_case.hpp"
#include "model/base/seeded.hpp"

namespace lockstep::golden {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr uint64_t kUlpWorst = std::numeric_limits<uint64_t>::max();

Tensor f64(std::vector<double> values) { return at::tensor(values, at::kDouble); }
Tensor f32(std::vector<double> values) { return f64(std::move(values)).to(at::kFloat); }

Tensor random(const std::string& name, std::vector<int64_t> shape) {
  const auto values = seeded_uniform(11, name, c10::multiply_integers(shape));
  return at::tensor(values, at::kFloat).to(at::kDouble).reshape(shape);
}

TEST(Ulp, CountsRepresentableStepsAcrossZeroAndIntoInfinity) {
  const float smallest = std::numeric_limits<float>::denorm_min();
  EXPECT_EQ(ulp_distance(1.0, std::nextafter(1.0F, 2.0F), at::kFloat), 1u);
  EXPECT_EQ(ulp_distance(-1.0, -std::nextafter(1.0F, 2.0F), at::kFloat), 1u);
  EXPECT_EQ(ulp_distance(0.0, -0.0, at::kFloat), 0u);
  EXPECT_EQ(ulp_distance(smallest, -smallest, at::kFloat), 2u);
  EXPECT_EQ(ulp_distance(-smallest, 0.0, at::kFloat), 1u);
  EXPECT_EQ(ulp_distance(1.0, -1.0, at::kFloat), 2u * 0x3f800000u);
  EXPECT_EQ(ulp_distance(std::numeric_limits<float>::max(), kInf, at::kFloat), 1u);
  EXPECT_EQ(ulp_distance(1.0, 1.0078125, at::kBFloat16), 1u);
  EXPECT_EQ(ulp_distance(1.0, 1.0009765625, at::kHalf), 1u);
  EXPECT_EQ(ulp_distance(kInf, -kInf, at::kDouble), 2u * 0x7ff0000000000000u);
}

TEST(Ulp, HistogramBinsAreZeroOneTwoThenPowersOfTwo) {
  const std::vector<std::pair<uint64_t, std::string>> bins{{0, "0"},
                                                           {1, "1"},
                                                           {2, "2"},
                                                           {3, "3-4"},
                                                           {4, "3-4"},
                                                           {5, "5-8"},
                                                           {8, "5-8"},
                                                           {9, "9-16"},
                                                           {1024, "513-1024"},
                                                           {1025, "1025-2048"}};
  for (const auto& [ulp, label] : bins) {
    EXPECT_EQ(UlpHistogram::label(UlpHistogram::bin_of(ulp)), label) << ulp;
  }
  EXPECT_EQ(UlpHistogram::bin_of(kUlpWorst), UlpHistogram::kBins - 1);
}

TEST(Compare, EqualTensorsHaveNoErrorAndEmptyOnesToo) {
  for (const Tensor& t : {random("a", {3, 5}), random("a", {0, 5}), at::zeros({4}, at::kDouble)}) {
    const auto c = compare(t, t.clone(), "t");
    EXPECT_TRUE(c.bitwise());
    EXPECT_EQ(c.max_abs + c.mean_abs + c.rel_l2 + c.max_rel, 0.0);
    EXPECT_EQ(c.ulp_max, 0u);
    EXPECT_NEAR(c.cosine, 1.0, 1e-15);
    EXPECT_FALSE(c.first.has_value());
    EXPECT_EQ(c.num_elements, t.numel());
  }
}

TEST(Compare, MetricsFollowTheirDefinitions) {
  const auto c = compare(f64({3.0, 0.0, -4.5}), f64({3.0, 0.0, -4.0}), "t");
  EXPECT_DOUBLE_EQ(c.max_abs, 0.5);
  EXPECT_DOUBLE_EQ(c.mean_abs, 0.5 / 3);
  EXPECT_DOUBLE_EQ(c.rel_l2, 0.5 / 5);
  EXPECT_DOUBLE_EQ(c.max_rel, 0.125);
  EXPECT_DOUBLE_EQ(c.cosine, (9.0 + 18.0) / (5.0 * std::sqrt(9.0 + 20.25)));
  EXPECT_EQ(c.num_different, 1);
  EXPECT_EQ(c.ulp_max, uint64_t{1} << 49);  // 0.5 in steps of 2^-50
  EXPECT_EQ(metric_value(c, "max_rel"), c.max_rel);
  EXPECT_EQ(metric_value(c, "ulp_max"), static_cast<double>(c.ulp_max));
  for (const auto& name : metric_names()) EXPECT_NO_THROW(metric_value(c, name));
  EXPECT_THROW(metric_value(c, "rms"), Error);
  EXPECT_EQ(compare(f64({1.0}), f64({0.0}), "t").rel_l2, kInf);
  EXPECT_EQ(compare(f64({1.0}), f64({0.0}), "t").max_rel, kInf);
  EXPECT_EQ(compare(f64({1.0}), f64({0.0}), "t").cosine, 0.0);
}

TEST(Compare, CountsUlpsInTheCoarserDtype) {
  const double step = std::ldexp(1.0, -23);
  // float64 against float32: the float64 side is rounded first, so half a step vanishes.
  auto c = compare(f64({1.0 + 0.4 * step}), f32({1.0}), "t");
  EXPECT_EQ(c.ulp_dtype, at::kFloat);
  EXPECT_EQ(c.ulp_max, 0u);
  EXPECT_EQ(c.num_different, 1);
  EXPECT_FALSE(c.bitwise());
  EXPECT_NEAR(c.max_abs, 0.4 * step, 1e-15);  // but the error is measured unrounded
  c = compare(f32({1.0}), f64({1.0 + 1.6 * step}), "t");
  EXPECT_EQ(c.ulp_max, 2u);
  c = compare(f32({1.01}), f32({1.0}).to(at::kBFloat16), "t");
  EXPECT_EQ(c.ulp_dtype, at::kBFloat16);
  EXPECT_EQ(c.ulp_max, 1u);
  // Negative zero is no ulp away from zero, and still other bits.
  c = compare(f32({-0.0}), f32({0.0}), "t");
  EXPECT_EQ(c.ulp_max, 0u);
  EXPECT_EQ(c.num_different, 1);
  EXPECT_EQ(c.histogram.count[0], 1);
}

TEST(Compare, BitsAreEqualOnlyWhereDtypesAre) {
  const Tensor wide = random("a", {3, 5}), half = wide.to(at::kHalf);
  auto c = compare(half, wide, "t");
  EXPECT_EQ(c.ulp_max, 0u);  // one is the rounding of the other
  EXPECT_GT(c.num_different, 0);
  EXPECT_FALSE(c.bitwise());
  ASSERT_TRUE(c.first.has_value());
  EXPECT_NE(describe_divergence(*c.first, "t").find("0 ulp of float16"), std::string::npos);
  EXPECT_NE(c.why_not_bitwise().find("float16 against float64"), std::string::npos);
  c = compare(half.to(at::kDouble), half, "t");
  EXPECT_EQ(c.num_different, 0);
  EXPECT_EQ(c.max_abs, 0.0);
  EXPECT_FALSE(c.first.has_value());
  EXPECT_FALSE(c.bitwise());
  EXPECT_EQ(c.why_not_bitwise(), "dtypes differ: float64 against float16, all values equal");
  // Integers as well, and the bits of a NaN.
  EXPECT_FALSE(compare(at::tensor({1, 2}, at::kInt), at::tensor({1, 2}, at::kLong), "i").bitwise());
  c = compare(f64({kNan, 1.0}), f64({-kNan, 1.0}), "t");
  EXPECT_EQ(c.num_different, 0);
  EXPECT_EQ(c.why_not_bitwise(), "only the bits of NaNs differ");
  c = compare(f32({-0.0}), f32({0.0}), "t");
  EXPECT_FALSE(c.bitwise());
  EXPECT_TRUE(c.first.has_value());
}

TEST(Compare, InfinitiesOfBothSidesDoNotHideAnError) {
  auto c = compare(f64({kInf, 1.0, 2.0}), f64({kInf, 1.0, 2.0}), "t");
  EXPECT_NEAR(c.cosine, 1.0, 1e-15);
  c = compare(f64({kInf, 1.0, 2.0}), f64({kInf, 1.0, 1.0}), "t");
  EXPECT_NEAR(c.rel_l2, 1.0 / std::sqrt(2.0), 1e-15);
  EXPECT_NEAR(c.cosine, 3.0 / std::sqrt(10.0), 1e-15);
  EXPECT_EQ(compare(f64({kInf, 1.0}), f64({-kInf, 1.0}), "t").cosine, 0.0);
  const auto bins = error_by_position(
      f64({kInf, 2.0}).reshape({1, 2}), f64({kInf, 1.0}).reshape({1, 2}), {0, 1}, "t");
  EXPECT_EQ(bins[0].rel_l2, 1.0);
}

TEST(Compare, SquaresThatLeaveTheRangeOfFloat64StillCount) {
  for (const double scale : {1e200, 1e-200}) {
    const auto c = compare(f64({3.0 * scale, 4.0 * scale}), f64({3.0 * scale, 5.0 * scale}), "t");
    EXPECT_NEAR(c.rel_l2, 1.0 / std::sqrt(34.0), 1e-15) << scale;
    EXPECT_NEAR(c.cosine, 29.0 / (5.0 * std::sqrt(34.0)), 1e-15) << scale;
  }
}

TEST(Compare, NanInTheSamePlaceIsEqualAndElsewhereADivergence) {
  auto c = compare(f64({kNan, 1.0, 2.0}), f64({kNan, 1.0, 2.0}), "t");
  EXPECT_TRUE(c.bitwise());
  EXPECT_EQ(c.num_nan_equal, 1);
  EXPECT_FALSE(c.first.has_value());
  EXPECT_EQ(c.rel_l2, 0.0);
  for (const auto& [got, want] : {std::pair{f64({1.0, kNan}), f64({1.0, 2.0})},
                                  std::pair{f64({1.0, 2.0}), f64({1.0, kNan})}}) {
    c = compare(got, want, "t", {Threshold::Metric::kAbs, 1e30});
    EXPECT_EQ(c.num_nan_different, 1);
    EXPECT_EQ(c.rel_l2, kInf);
    EXPECT_EQ(c.max_abs, kInf);
    EXPECT_EQ(c.max_rel, kInf);
    EXPECT_EQ(c.cosine, 0.0);
    EXPECT_EQ(c.ulp_max, kUlpWorst);
    ASSERT_TRUE(c.first.has_value());
    EXPECT_EQ(c.first->index, 1);
    EXPECT_NE(describe_divergence(*c.first, "t").find("NaN"), std::string::npos);
  }
}

TEST(Compare, EqualInfinitiesAreEqualAndOthersInfinitelyFar) {
  auto c = compare(f32({kInf, -kInf, 1.0}), f32({kInf, -kInf, 1.0}), "t");
  EXPECT_TRUE(c.bitwise());
  EXPECT_EQ(c.max_abs, 0.0);
  EXPECT_EQ(c.rel_l2, 0.0);
  c = compare(f32({kInf}), f32({3e38}), "t");
  EXPECT_EQ(c.max_abs, kInf);
  EXPECT_EQ(c.rel_l2, kInf);
  EXPECT_FALSE(c.bitwise());
  c = compare(f32({kInf}), f32({-kInf}), "t");
  EXPECT_EQ(c.rel_l2, kInf);
}

TEST(Compare, FirstDivergenceHasCoordinatesValuesBitsAndUlps) {
  Tensor want = at::ones({2, 3, 4}, at::kFloat), got = want.clone();
  got.index_put_({at::tensor(1), at::tensor(0), at::tensor(2)},
                 at::scalar_tensor(std::bit_cast<float>(0x3f800010), at::kFloat));
  got.index_put_({at::tensor(1), at::tensor(2), at::tensor(3)}, at::scalar_tensor(5.0, at::kFloat));
  const auto c = compare(got, want, "layers.2.kda.state");
  ASSERT_TRUE(c.first.has_value());
  EXPECT_EQ(c.first->index, 14);
  EXPECT_EQ(c.first->coordinates, (std::vector<int64_t>{1, 0, 2}));
  EXPECT_EQ(c.first->ulp, 16u);
  EXPECT_EQ(describe_divergence(*c.first, "layers.2.kda.state"),
            "layers.2.kda.state[1,0,2]: got 1.00000191 (0x3f800010) want 1 (0x3f800000), 16 ulp");
  EXPECT_EQ(compare(got, want, "t", {Threshold::Metric::kUlp, 16}).first->index, 23);
  EXPECT_EQ(compare(got, want, "t", {Threshold::Metric::kRel, 1e-5}).first->index, 23);
  EXPECT_EQ(compare(got, want, "t", {Threshold::Metric::kAbs, 1e-6}).first->index, 14);
  EXPECT_FALSE(compare(got, want, "t", {Threshold::Metric::kAbs, 4.0}).first.has_value());
  // A strided tensor is read in its logical order.
  EXPECT_EQ(compare(got.permute({2, 1, 0}), want.permute({2, 1, 0}), "t").first->coordinates,
            (std::vector<int64_t>{2, 0, 1}));
}

TEST(Compare, LargeTensorsAreComparedPieceByPieceWithTheSameResult) {
  const Tensor want = random("large", {700001}), got = want + 1e-9 * random("noise", {700001});
  const auto c = compare(got, want, "t");
  EXPECT_NEAR(c.rel_l2, ((got - want).norm() / want.norm()).item<double>(), 1e-22);
  EXPECT_EQ(c.max_abs, (got - want).abs().max().item<double>());
  EXPECT_EQ(std::accumulate(c.histogram.count.begin(), c.histogram.count.end(), int64_t{0}),
            700001);
  Tensor late = want.clone();
  late[600000] = 7.0;
  EXPECT_EQ(compare(late, want, "t").first->index, 600000);
}

TEST(Compare, ShapeAndDtypeMismatchNameBothTensors) {
  const auto text_of = [](const Tensor& got, const Tensor& want) -> std::string {
    try {
      compare(got, want, "layers.1.mlp");
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kShape);
      return error.what();
    }
    return "";
  };
  const auto shape = text_of(at::zeros({2, 3}), at::zeros({3, 2}, at::kDouble));
  for (const char* part : {"layers.1.mlp", "[2, 3] float32", "[3, 2] float64"}) {
    EXPECT_NE(shape.find(part), std::string::npos) << shape;
  }
  const auto dtype = text_of(at::zeros({2}), at::zeros({2}, at::kInt));
  for (const char* part : {"[2] float32", "[2] int32"}) {
    EXPECT_NE(dtype.find(part), std::string::npos) << dtype;
  }
  EXPECT_NE(text_of(Tensor(), at::zeros({2})), "");
}

TEST(Compare, IntegersAreComparedExactly) {
  const int64_t big = int64_t{1} << 60;
  const auto c =
      compare(at::tensor({big + 1, 3L}, at::kLong), at::tensor({big, 3L}, at::kLong), "i");
  EXPECT_EQ(c.ulp_max, 1u);
  EXPECT_EQ(c.num_different, 1);
  EXPECT_EQ(compare(at::tensor({1, 2}, at::kInt), at::tensor({1, 2}, at::kLong), "i").num_different,
            0);
}

TEST(Compare, SelectionsAreComparedAsSets) {
  const Tensor a = at::tensor({0, 1, 5, -1, -1, -1, 2, 3, 4}, at::kInt).reshape({3, 3});
  const Tensor b =
      at::tensor({5, 0, 1, -1, -1, -1, -1, -1, 4, 2, 6, -1}, at::kLong).reshape({3, 4});
  const auto c = compare_sets(a, b, "sel");
  EXPECT_EQ(c.num_rows, 3);
  EXPECT_EQ(c.num_rows_different, 1);
  EXPECT_EQ(c.first_row, 2);
  EXPECT_DOUBLE_EQ(c.mean_overlap, (1.0 + 1.0 + 0.5) / 3.0);
  EXPECT_EQ(c.first, "sel[2]: has {3} too many and lacks {6}");
  EXPECT_THROW(compare_sets(a, b.narrow(0, 0, 2), "sel"), Error);
}

TEST(Logits, KlAndTopOneAgreeWithTheirDefinitions) {
  const Tensor want = random("w", {9, 13}) * 3.0, got = want + 0.3 * random("g", {9, 13});
  const auto c = compare_logits(got.to(at::kFloat), want, "logits");
  const Tensor p = at::softmax(want, -1);
  const Tensor kl = (p * (at::log_softmax(want, -1) - at::log_softmax(got, -1))).sum(-1);
  EXPECT_NEAR(c.mean_kl, kl.mean().item<double>(), 1e-7);
  EXPECT_NEAR(c.max_kl, kl.max().item<double>(), 1e-7);
  EXPECT_EQ(c.max_kl_token, kl.argmax().item<int64_t>());
  const double agree = (got.argmax(-1) == want.argmax(-1)).to(at::kDouble).mean().item<double>();
  EXPECT_DOUBLE_EQ(c.top1_agreement, agree);
  // A shift of all logits changes no distribution.
  EXPECT_LT(compare_logits(want + 100.0, want, "logits").max_kl, 1e-13);
  EXPECT_EQ(compare_logits(at::zeros({0, 5}), at::zeros({0, 5}), "logits").num_tokens, 0);
  Tensor bad = want.clone();
  bad[4][2] = kNan;
  const auto broken = compare_logits(bad, want, "logits");
  EXPECT_EQ(broken.mean_kl, kInf);
  EXPECT_EQ(broken.max_kl_token, 4);
  EXPECT_DOUBLE_EQ(broken.top1_agreement, 8.0 / 9.0);
  EXPECT_THROW(compare_logits(want, want.narrow(1, 0, 5), "logits"), Error);
}

TEST(Logits, MismatchKlGivesTheRecordedNumbers) {
  const Tensor train = f64({-1.0, -2.2, -0.47, kNan}), infer = f64({-1.1, -2.0, -0.5, kNan});
  const auto m = mismatch_kl(train, infer);
  EXPECT_EQ(m.num_tokens, 3);
  EXPECT_NEAR(m.terms[0].item<double>(), 0.0051709181, 2e-10);
  EXPECT_NEAR(m.terms[1].item<double>(), 0.0187307531, 2e-10);
  EXPECT_NEAR(m.terms[2].item<double>(), 0.0004545340, 2e-10);
  EXPECT_NEAR(m.mean, 0.0081187350, 2e-10);
  EXPECT_EQ(m.max_token, 1);
  EXPECT_TRUE(std::isnan(m.terms[3].item<double>()));
  const auto masked = mismatch_kl(train, infer, at::tensor({1, 0, 1, 0}).to(at::kBool));
  EXPECT_EQ(masked.num_tokens, 2);
  EXPECT_NEAR(masked.mean, (0.0051709181 + 0.0004545340) / 2, 2e-10);
  EXPECT_EQ(mismatch_kl(train, train).mean, 0.0);
  EXPECT_EQ(mismatch_kl(f64({kNan}), f64({1.0})).mean, kInf);
  EXPECT_EQ(mismatch_kl(f64({}), f64({})).mean, 0.0);
}

TEST(Logits, MismatchKlTermKeepsItsDigitsNearZero) {
  EXPECT_EQ(mismatch_kl_term(0.0), 0.0);
  for (double l : {1e-12, -1e-9, 3e-5, -0.0299, 0.0301, -0.5, 4.0}) {
    const long double x = l;
    long double exact = 0, power = x;
    for (int n = 2; n < 60; ++n) exact += power *= x / n;
    EXPECT_NEAR(mismatch_kl_term(l) / static_cast<double>(exact), 1.0, 1e-13) << l;
  }
}

TEST(Positions, ErrorsAreBinnedByThePlaceInTheirDocument) {
  const std::vector<int64_t> cu{0, 5, 5, 6, 14};
  const Tensor want = at::ones({14, 2}, at::kDouble);
  Tensor got = want.clone();
  got[3][1] = 1.5;    // document 0, position 3
  got[13][0] = 0.75;  // document 3, position 7
  const auto bins = error_by_position(got, want, cu, "x");
  ASSERT_EQ(bins.size(), 4u);
  const std::vector<int64_t> first{0, 1, 2, 4}, last{0, 1, 3, 7}, tokens{3, 2, 4, 5};
  const std::vector<double> max_abs{0.0, 0.0, 0.5, 0.25};
  const std::vector<double> rel{0.0, 0.0, 0.5 / std::sqrt(8.0), 0.25 / std::sqrt(10.0)};
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(bins[i].first, first[i]);
    EXPECT_EQ(bins[i].last, last[i]);
    EXPECT_EQ(bins[i].num_tokens, tokens[i]);
    EXPECT_DOUBLE_EQ(bins[i].max_abs, max_abs[i]);
    EXPECT_DOUBLE_EQ(bins[i].rel_l2, rel[i]);
  }
  EXPECT_TRUE(error_by_position(at::ones({0, 2}), at::ones({0, 2}), {0, 0}, "x").empty());
  EXPECT_THROW(error_by_position(got, want, {0, 13}, "x"), Error);
}

TEST(Sketch, EstimatesTheErrorAndFindsTheToken) {
  const Tensor want = random("w", {40, 6, 50});
  for (auto form : {SketchForm::kTensor, SketchForm::kTokens}) {
    const Tensor stored = make_sketch("layers.0", want, form);
    const auto same = compare_sketch(want.clone(), stored, {40, 6, 50}, form, "layers.0");
    EXPECT_EQ(same.worst(), 0.0);
    EXPECT_TRUE(same.rows.bitwise());

    const Tensor noisy = want + 1e-6 * random("n", {40, 6, 50});
    const double truth = compare(noisy, want, "t").rel_l2;
    const auto c = compare_sketch(noisy, stored, {40, 6, 50}, form, "layers.0");
    EXPECT_LT(c.rel_l2, truth * sketch_slack(c.num_projections));
    EXPECT_GT(c.rel_l2, truth / sketch_slack(c.num_projections));

    Tensor one = want.clone();
    one[17][3][49] += 1e-9;
    const auto found = compare_sketch(one, stored, {40, 6, 50}, form, "layers.0");
    EXPECT_GT(found.rel_l2, 1e-13);
    EXPECT_EQ(found.first_token(1e-13), form == SketchForm::kTokens ? 17 : -1);
    one[17][3][49] = kNan;
    EXPECT_EQ(compare_sketch(one, stored, {40, 6, 50}, form, "layers.0").worst(), kInf);

    const auto rows = sketch_rows("layers.0", 40);
    Tensor kept = want.clone();
    kept[rows.back()][2][7] += 0.5;
    const auto located = compare_sketch(kept, stored, {40, 6, 50}, form, "layers.0");
    ASSERT_TRUE(located.rows.first.has_value());
    EXPECT_EQ(located.rows.first->coordinates, (std::vector<int64_t>{rows.back(), 2, 7}));
    EXPECT_THROW(compare_sketch(want, stored, {40, 300}, form, "layers.0"), Error);
    EXPECT_THROW(compare_sketch(want, stored.narrow(0, 0, 50), {40, 6, 50}, form, "x"), Error);
  }
  EXPECT_EQ(sketch_rows("x", 1), (std::vector<int64_t>{0}));
}

TEST(Sketch, KnowsThatAnErrorInFewRowsIsSeenByFewProjections) {
  const int64_t rows = 150, width = 40;
  const Tensor want = random("w", {rows, width});
  const Tensor stored = make_sketch("layers.0", want, SketchForm::kTokens);
  int outside_all = 0;
  double fewest = kInf, most = 0.0;
  for (int trial = 0; trial < 200; ++trial) {
    Tensor got = want.clone();
    for (const int64_t row : {3, 77, 140}) {
      got[row] += 1e-3 * random(fmt::format("error {} {}", trial, row), {width});
    }
    const double truth = compare(got, want, "t").rel_l2;
    const auto c = compare_sketch(got, stored, {rows, width}, SketchForm::kTokens, "layers.0");
    const double count = static_cast<double>(c.num_projections);
    fewest = std::min(fewest, count);
    most = std::max(most, count);
    EXPECT_LT(c.rel_l2, truth * sketch_slack(c.num_projections)) << trial;
    outside_all += c.rel_l2 > truth * sketch_slack(2 * rows) ? 1 : 0;
  }
  EXPECT_GE(fewest, 2.0);
  EXPECT_LE(most, 10.0);
  EXPECT_GT(outside_all, 10) << "what counting all 300 projections would call too large";

  // Evenly spread errors keep all of them, up to the estimate's own scatter.
  const Tensor even = want + 1e-6 * random("n", {rows, width});
  const auto c = compare_sketch(even, stored, {rows, width}, SketchForm::kTokens, "layers.0");
  EXPECT_GT(c.num_projections, 220);
}

TEST(Sketch, IsTheOneTheGeneratorWrites) {
  // Numbers from golden/make/sketch.py for the same seeded tensor.
  const auto u = seeded_uniform(5, "sketch-check", 37 * 29);
  const Tensor x = at::tensor(u, at::kFloat).reshape({37, 29});
  const std::vector<double> tensor{19.209257660559924,
                                   1.3663777552982594,
                                   -8.867461420824805,
                                   37.53623169855369,
                                   -0.17015516757965088,
                                   -0.500114917755127};
  const std::vector<double> tokens{19.209257660559924,
                                   -3.8423682928861314,
                                   -2.829374647227234,
                                   -4.229421239172071,
                                   -0.17015516757965088,
                                   -0.500114917755127};
  for (auto form : {SketchForm::kTensor, SketchForm::kTokens}) {
    const Tensor s = make_sketch("check", x, form);
    const auto& want = form == SketchForm::kTensor ? tensor : tokens;
    EXPECT_EQ(s.numel(), form == SketchForm::kTensor ? 123 : 133);
    size_t i = 0;
    for (int64_t place :
         {int64_t{0}, int64_t{1}, int64_t{2}, int64_t{64}, s.numel() - 29, s.numel() - 1}) {
      EXPECT_NEAR(s[place].item<double>(), want[i++], 1e-12) << place;
    }
  }
  EXPECT_EQ(sketch_rows("check", 37), (std::vector<int64_t>{23, 34}));
}

TEST(Sketch, StoredRowsAreTheRowsTheNameChooses) {
  const auto dir = std::filesystem::path(LOCKSTEP_SOURCE_DIR) / "golden" / "data";
  const GoldenCase golden = open_golden(dir, "tiny");
  const auto norm = golden.activation("norm");
  ASSERT_EQ(norm.kind, StoredKind::kTokens);
  const auto rows = sketch_rows("norm", 213);
  const int64_t begin = 1 + kTokenProjections * 213, width = 96;
  const Tensor head = golden.weights().at("lm_head.weight").to(at::kDouble);
  for (size_t i = 0; i < rows.size(); ++i) {
    const Tensor row = norm.values.narrow(0, begin + static_cast<int64_t>(i) * width, width);
    const Tensor logits = at::mv(head, row);
    EXPECT_LT(compare(logits, golden.logits()[rows[i]], "logits").rel_l2, 1e-14) << rows[i];
    // The generator's projections of that row are ours.
    for (int64_t p = 0; p < kTokenProjections; ++p) {
      double want = 0.0;
      const auto u = seeded_uniform(0, fmt::format("golden-projection/{}", p), width);
      for (int64_t c = 0; c < width; ++c) {
        want +=
            std::sqrt(3.0) * static_cast<double>(u[static_cast<size_t>(c)]) * row[c].item<double>();
      }
      EXPECT_NEAR(norm.values[1 + rows[i] * kTokenProjections + p].item<double>(), want, 1e-12);
    }
  }
}

TEST(Limits, AreDerivedFromTheReferencesOwnErrors) {
  EXPECT_EQ(limit_f64(), 1e-9);
  EXPECT_DOUBLE_EQ(limit_f32({1e-6, 3e-6, 2e-6}), 6e-6);
  EXPECT_DOUBLE_EQ(limit_bf16({1e-2, 2e-2}), 2.5e-2);
  EXPECT_THROW(limit_f32({}), Error);
  EXPECT_NEAR(sketch_slack(64), 1.3536, 1e-4);
  EXPECT_EQ(few_runs_slack(1), 3.0);
  EXPECT_EQ(few_runs_slack(3), 2.4);
  EXPECT_EQ(few_runs_slack(4), 1.75);
  EXPECT_EQ(few_runs_slack(24), 1.75);
  EXPECT_EQ(few_runs_slack(25), 1.4);
  EXPECT_EQ(few_runs_slack(1024), 1.4);
  EXPECT_EQ(few_runs_slack(1025), 1.0);
  EXPECT_THROW((void)few_runs_slack(0), Error);
  // 1 - 0.955^1 = 0.045 and 0.045^2: one tie in one case may be, two in two as well.
  EXPECT_EQ(tied_cases_allowed(0), 0);
  EXPECT_EQ(tied_cases_allowed(1), 1);
  EXPECT_EQ(tied_cases_allowed(2), 2);
  EXPECT_EQ(tied_cases_allowed(19), 5);
  EXPECT_EQ(tied_cases_allowed(57), 8);
  const auto s =
      summarize_ratios({{"a", 1.0, 2.0}, {"b", 3.0, 2.0}, {"c", 0.0, 0.0}, {"d", 1.0, 1.0}});
  EXPECT_EQ(s.num_rows, 3);
  EXPECT_DOUBLE_EQ(s.median, 1.0);
  EXPECT_DOUBLE_EQ(s.worst, 1.5);
  EXPECT_EQ(s.worst_name, "b");
  EXPECT_EQ(summarize_ratios({{"a", 1.0, 0.0}}).worst, kInf);
  EXPECT_EQ(summarize_ratios({{"a", kNan, 1.0}}).worst, kInf);
  EXPECT_EQ(summarize_ratios({}).num_rows, 0);
}

}  // namespace
}  // namespace lockstep::golden
