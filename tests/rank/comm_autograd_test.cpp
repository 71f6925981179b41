// Collectives in the graph against the whole tensors they stand for, forward and backward, with
// contiguous and strided tensors and gradients.
#include <gtest/gtest.h>

#include "parallel/comm/autograd.hpp"
#include "tests/rank/world.hpp"

namespace lockstep::tests {
namespace {

using parallel::GatheredUse;

/// A value every rank can compute for every rank: [rows, 3] float64.
Tensor values(int64_t rank, int64_t rows, double phase = 0) {
  return at::arange(rows * 3, at::kDouble)
      .mul(0.37)
      .add(static_cast<double>(rank) + phase)
      .sin()
      .reshape({rows, 3});
}

Tensor strided(const Tensor& tensor) { return tensor.t().contiguous().t(); }

struct Both {
  Tensor out, grad;
};

/// Value and input gradient of `op` for loss = sum(op(x) w), with x and w in the asked layout.
template <typename Op>
Both differentiate(const Tensor& x, const Tensor& w, bool transposed, const Op& op) {
  const Tensor leaf = (transposed ? strided(x) : x.clone()).detach().requires_grad_(true);
  const Tensor out = op(leaf);
  const Tensor grad = transposed ? strided(w) : w.clone();
  EXPECT_NE(leaf.is_contiguous() && grad.is_contiguous(), transposed);
  out.backward(grad);
  return {out.detach(), leaf.grad()};
}

class Graph : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    for (int64_t r = 0; r < world().size(); ++r) {
      rows_.push_back(2 + r % 2);
      if (r == world().rank()) begin_ = total_;
      total_ += rows_.back();
    }
    mine_ = rows_[static_cast<size_t>(world().rank())];
  }
  /// Sum over ranks of what `value` gives for each, in rank order.
  template <typename Value>
  static Tensor sum(const Value& value) {
    Tensor total = value(0).clone();
    for (int64_t r = 1; r < world().size(); ++r) total.add_(value(r));
    return total;
  }
  std::vector<int64_t> rows_;
  int64_t begin_ = 0, total_ = 0, mine_ = 0;
};

TEST_P(Graph, B52GatheredRowsAddTheirGradients) {
  std::vector<Tensor> parts;
  for (int64_t r = 0; r < world().size(); ++r)
    parts.push_back(values(r, rows_[static_cast<size_t>(r)]));
  const Both got = differentiate(values(world().rank(), mine_),
                                 values(world().rank(), total_, 0.5),
                                 GetParam(),
                                 [&](const Tensor& x) {
                                   return parallel::gather_rows(
                                       world(), x, rows_, GatheredUse::kDiffers, "test");
                                 });
  EXPECT_TRUE(at::equal(got.out, at::cat(parts, 0)));
  EXPECT_TRUE(at::equal(
      got.grad, sum([&](int64_t r) { return values(r, total_, 0.5); }).narrow(0, begin_, mine_)));
}

TEST_P(Graph, B52GatheredRowsOfEqualUseCutTheirGradient) {
  const Tensor w = values(9, total_, 0.5);
  const Both got =
      differentiate(values(world().rank(), mine_), w, GetParam(), [&](const Tensor& x) {
        return parallel::gather_rows(world(), x, rows_, GatheredUse::kReplicated, "test");
      });
  EXPECT_TRUE(at::equal(got.grad, w.narrow(0, begin_, mine_)));
}

TEST_P(Graph, B52ScatteredSumsGatherTheirGradients) {
  std::vector<Tensor> grads;
  for (int64_t r = 0; r < world().size(); ++r)
    grads.push_back(values(r, rows_[static_cast<size_t>(r)], 0.5));
  const Both got = differentiate(
      values(world().rank(), total_),
      values(world().rank(), mine_, 0.5),
      GetParam(),
      [&](const Tensor& x) { return parallel::reduce_scatter_rows(world(), x, rows_, "test"); });
  EXPECT_TRUE(at::equal(
      got.out, sum([&](int64_t r) { return values(r, total_); }).narrow(0, begin_, mine_)));
  EXPECT_TRUE(at::equal(got.grad, at::cat(grads, 0)));
}

TEST_P(Graph, B52SumsPassTheirGradientOn) {
  const Tensor w = values(9, 4, 0.5);
  const Both got = differentiate(values(world().rank(), 4), w, GetParam(), [&](const Tensor& x) {
    return parallel::sum_over_ranks(world(), x, "test");
  });
  EXPECT_TRUE(at::equal(got.out, sum([](int64_t r) { return values(r, 4); })));
  EXPECT_TRUE(at::equal(got.grad, w));
}

TEST_P(Graph, B52SharedTensorsAddTheirGradients) {
  const Tensor x = values(9, 4);
  const Both got =
      differentiate(x, values(world().rank(), 4, 0.5), GetParam(), [&](const Tensor& t) {
        return parallel::share_with_ranks(world(), t, "test");
      });
  EXPECT_TRUE(at::equal(got.out, x));
  EXPECT_TRUE(at::equal(got.grad, sum([](int64_t r) { return values(r, 4, 0.5); })));
}

TEST_P(Graph, B52ExchangedRowsSendTheirGradientsBack) {
  const auto n = static_cast<size_t>(world().size());
  const int64_t me = world().rank(), size = world().size();
  const std::vector<int64_t> two(n, 2);
  const auto block = [&](const Tensor& rows, int64_t r) { return rows.narrow(0, 2 * r, 2); };
  std::vector<Tensor> out, back;
  for (int64_t r = 0; r < size; ++r) {
    out.push_back(block(values(r, 2 * size), me));
    back.push_back(block(values(r, 2 * size, 0.5), me));
  }
  const Both got = differentiate(
      values(me, 2 * size), values(me, 2 * size, 0.5), GetParam(), [&](const Tensor& x) {
        return parallel::exchange_rows(world(), x, two, two, "test");
      });
  EXPECT_TRUE(at::equal(got.out, at::cat(out, 0)));
  EXPECT_TRUE(at::equal(got.grad, at::cat(back, 0)));
}

TEST_P(Graph, B52AGradientSpreadFromOneNumberIsTakenToo) {
  // The gradient of sum() has stride 0.
  const Tensor x = values(world().rank(), mine_).requires_grad_(true);
  parallel::gather_rows(world(), x, rows_, GatheredUse::kDiffers, "test").sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), at::full_like(x, static_cast<double>(world().size()))));
}

INSTANTIATE_TEST_SUITE_P(Layouts, Graph, testing::Bool(), [](const auto& layout) {
  return layout.param ? "Strided" : "Contiguous";
});

}  // namespace
}  // namespace lockstep::tests
