// Exact sums: the order of the addends leaves no trace, the error is bounded, and what would leave
// the range is refused.
#include "model/base/exact_sum.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "model/base/seeded.hpp"
#include "model/ops/exact_rows.hpp"
#include "tests/support/compare.hpp"

namespace lockstep::tests {
namespace {

/// Numbers of very different magnitudes and both signs, [count, n].
Tensor addends(int64_t count, int64_t n) {
  const Tensor sign = at::tensor(seeded_uniform(3, "sign", count * n)).to(at::kDouble);
  const Tensor magnitude = at::tensor(seeded_uniform(3, "size", count * n)).to(at::kDouble);
  return (sign * at::exp2(magnitude * 20)).reshape({count, n}).to(at::kFloat);
}

Tensor value_in_order(const Tensor& rows, const Tensor& order) {
  const ExactSum sum({rows.size(1)}, "rows");
  for (int64_t i = 0; i < rows.size(0); ++i) sum.add(rows[order[i].item<int64_t>()]);
  return sum.value();
}

Tensor float_sum_in_order(const Tensor& rows, const Tensor& order) {
  Tensor sum = at::zeros({rows.size(1)});
  for (int64_t i = 0; i < rows.size(0); ++i) sum = sum + rows[order[i].item<int64_t>()];
  return sum;
}

TEST(ExactSum, AnyOrderAndGroupingOfAddendsGivesTheSameBytes) {
  const Tensor rows = addends(300, 37) * 1e-4;
  const Tensor forward = at::arange(300, at::kLong), back = forward.flip({0});
  const Tensor one = value_in_order(rows, forward);
  EXPECT_TRUE(same_bytes(one, value_in_order(rows, back)));
  EXPECT_TRUE(same_bytes(one, value_in_order(rows, at::argsort(rows.select(1, 5)))));
  // Split over processes, each with its carry.
  Tensor pairs = at::zeros({2, 37}, at::kDouble);
  for (const auto& [first, last] : {std::pair{200, 300}, {0, 1}, {1, 200}}) {
    const ExactSum part({37}, "part");
    for (int64_t i = first; i < last; ++i) part.add(rows[i]);
    ExactSum::carry(part.pairs());
    pairs = pairs + part.pairs();
  }
  EXPECT_TRUE(same_bytes(one, ExactSum::value_of(pairs, "joined")));
  // An ordinary float32 sum is not like that.
  EXPECT_FALSE(same_bytes(float_sum_in_order(rows, forward), float_sum_in_order(rows, back)));
}

TEST(ExactSum, IsTheFloat64SumRoundedOnce) {
  const Tensor rows = addends(1000, 20) * 1e-4;
  const ExactSum sum({20}, "rows");
  for (int64_t i = 0; i < 1000; ++i) sum.add(rows[i]);
  const Tensor want = rows.to(at::kDouble).sum(0);
  const double step = want.abs().max().item<double>() * std::exp2(-23);
  EXPECT_LE((sum.value().to(at::kDouble) - want).abs().max().item<double>(), step);
  // Numbers of at least 2^-41 lose nothing, smaller ones at most 2^-65 each.
  for (const float x : {1.0F, 0x1.fffffep-41F, -0x1p-41F, 3e-9F, 123.456F}) {
    double high = 0, low = 0;
    exact_add(1, &x, &high, &low);
    EXPECT_EQ(high + low, static_cast<double>(x)) << x;
  }
  for (const float x : {1e-15F, -3.3e-14F, 1e-30F, 0.0F}) {
    double high = 0, low = 0;
    exact_add(1, &x, &high, &low);
    EXPECT_LE(std::abs(high + low - static_cast<double>(x)), std::exp2(-65)) << x;
  }
}

TEST(ExactSum, PartsShareTheSum) {
  const ExactSum sum({5, 3}, "whole");
  EXPECT_TRUE(sum.empty());
  const ExactSum part = sum.rows(1, 2);
  part.add(at::ones({2, 3}));
  part.rows(1, 1).add(at::ones({1, 3}));
  const Tensor want = at::tensor({0.0, 1.0, 2.0, 0.0, 0.0}, at::kFloat);
  EXPECT_TRUE(at::equal(sum.value(), want.unsqueeze(1).expand({5, 3})));
  EXPECT_TRUE(at::equal(part.value(), sum.value().narrow(0, 1, 2)));
}

TEST(ExactSum, RefusesWhatLeavesTheRangeByName) {
  const auto message = [](auto&& call) -> std::string {
    try {
      call();
    } catch (const Error& error) {
      EXPECT_EQ(exit_code(error.kind()), 2);
      return error.what();
    }
    return "";
  };
  const ExactSum sum({1}, "gradient of w");
  sum.add(at::full({1}, 60000.0F));
  EXPECT_NE(message([&] { sum.add(at::full({1}, 6000.0F)); }).find("gradient of w"),
            std::string::npos);
  EXPECT_NE(message([&] {
              ExactSum::value_of(at::full({2, 1}, 600000.0, at::kDouble), "joined w");
            }).find("joined w"),
            std::string::npos);
  // A number that is none stays one.
  const ExactSum nan({1}, "nan");
  nan.add(at::full({1}, std::nan("")).to(at::kFloat));
  EXPECT_TRUE(std::isnan(nan.value().item<float>()));
}

TEST(ExactSum, ManyAddendsAreCarriedInTime) {
  const ExactSum sum({1}, "many");
  const float x = 0x1.fffffep-34F;  // all of it in the low part
  for (int64_t i = 0; i < (int64_t{1} << 22) + 5; ++i)
    sum.note(1, exact_add(1, &x, sum.high(), sum.low()));
  const double want = static_cast<double>(x) * static_cast<double>((int64_t{1} << 22) + 5);
  EXPECT_EQ(sum.value().item<float>(), static_cast<float>(want));
}

TEST(ExactRows, ProductOverBlocksDoesNotDependOnTilesThreadsOrNeighbours) {
  const std::vector<int64_t> bounds{0, 64, 100, 101, 165};
  const Tensor a = at::tensor(seeded_uniform(1, "a", 165 * 101)).reshape({165, 101});
  const Tensor b = at::tensor(seeded_uniform(1, "b", 165 * 203)).reshape({165, 203});
  const auto pointer = [](const Tensor& t) {
    return static_cast<const float*>(t.const_data_ptr());
  };
  const ExactSum whole({101, 203}, "whole"), rows({101, 203}, "rows");
  model::exact_product_parallel(
      101, 203, bounds, pointer(a), 101, pointer(b), 203, {whole.high(), whole.low(), 203});
  std::vector<float> scratch;
  for (int64_t i = 100; i >= 0; --i) {
    for (const int64_t block : {2, 0, 3, 1}) {
      const std::span<const int64_t> one(bounds.data() + block, 2);
      model::exact_product(1,
                           203,
                           one,
                           pointer(a) + i,
                           101,
                           pointer(b),
                           203,
                           {rows.high() + i * 203, rows.low() + i * 203, 203},
                           scratch);
    }
  }
  EXPECT_TRUE(same_bytes(whole.value(), rows.value()));
  EXPECT_LE(rel_l2(whole.value(), at::matmul(a.to(at::kDouble).t(), b.to(at::kDouble))), 2e-7);
}

TEST(ExactRows, RunsConsistOfWholeBlocks) {
  const std::vector<int64_t> bounds{0, 64, 128, 130, 194};
  EXPECT_EQ(model::block_run_end(bounds, 0, 130), 130);
  EXPECT_EQ(model::block_run_end(bounds, 0, 129), 128);
  EXPECT_EQ(model::block_run_end(bounds, 64, 1), 128);
  EXPECT_EQ(model::block_run_end(bounds, 130, 1000), 194);
  EXPECT_EQ(model::blocks_between(bounds, 64, 130), (std::vector<int64_t>{0, 64, 66}));
}

}  // namespace
}  // namespace lockstep::tests
