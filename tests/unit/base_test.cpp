// Packing, seeded values, products.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>

#include "model/base/blas.hpp"
#include "model/base/packing.hpp"
#include "model/base/parallel.hpp"
#include "model/base/seeded.hpp"
#include "model/base/torch.hpp"

namespace lockstep::tests {
namespace {

TEST(Packing, WholeRowListsEveryDocument) {
  const Packing p = Packing::of_lengths({3, 0, 1});
  ASSERT_EQ(p.segments().size(), 3U);
  EXPECT_EQ(p.segments()[1].length(), 0);
  EXPECT_EQ(p.local_cu_seqlens(), (std::vector<int64_t>{0, 3, 3, 4}));
  EXPECT_FALSE(p.continues_from_left());
  EXPECT_FALSE(p.continues_to_right());
}

TEST(Packing, ShardKnowsWhereItsFirstDocumentStarted) {
  const Packing p = Packing::of_lengths({5, 0, 4, 1}).shard(3, 8);
  ASSERT_EQ(p.segments().size(), 2U);
  EXPECT_EQ(p.segments()[0].position, 3);
  EXPECT_EQ(p.segments()[0].document, 0);
  EXPECT_EQ(p.segments()[1].document, 2);
  EXPECT_EQ(p.segments()[1].position, 0);
  EXPECT_EQ(p.local_cu_seqlens(), (std::vector<int64_t>{0, 2, 5}));
  EXPECT_TRUE(p.continues_from_left());
  EXPECT_TRUE(p.continues_to_right());
}

TEST(Packing, CutsOnDocumentBoundariesContinueNothing) {
  const Packing p = Packing::of_lengths({5, 4}).shard(5, 9);
  EXPECT_FALSE(p.continues_from_left());
  EXPECT_FALSE(p.continues_to_right());
  const Packing empty = Packing::of_lengths({5, 4}).shard(3, 3);
  EXPECT_TRUE(empty.segments().empty());
  EXPECT_FALSE(empty.continues_from_left());
  EXPECT_FALSE(empty.continues_to_right());
  EXPECT_EQ(empty.local_cu_seqlens(), (std::vector<int64_t>{0}));
}

TEST(Packing, RefusesBoundariesThatDecreaseOrShardsOutside) {
  EXPECT_THROW(Packing::whole({0, 4, 3}), Error);
  EXPECT_THROW(Packing::whole({1, 4}), Error);
  EXPECT_THROW(Packing::whole({}), Error);
  EXPECT_THROW((void)Packing::of_lengths({3}).shard(1, 4), Error);
}

TEST(Seeded, ValuesAreFixedExactAndWellSpread) {
  // Values of the golden generator, which uses the same formula in Python.
  const std::vector<float> v = seeded_uniform(7, "model.norm.weight", 3);
  for (float x : v) {
    EXPECT_GE(x, -1.0F);
    EXPECT_LT(x, 1.0F);
    EXPECT_EQ(x * 0x1p23F, std::floor(x * 0x1p23F));
  }
  EXPECT_EQ(seeded_value(seeded_key(7, "model.norm.weight"), 2), v[2]);
  EXPECT_NE(seeded_uniform(8, "model.norm.weight", 1)[0], v[0]);
  double sum = 0, square = 0;
  for (float x : seeded_uniform(1, "spread", 100000))
    sum += double{x}, square += double{x} * double{x};
  EXPECT_NEAR(sum / 100000, 0, 0.01);
  EXPECT_NEAR(square / 100000, 1.0 / 3, 0.01);
}

TEST(Blas, RowMajorProductsWithEveryTranspositionAndStride) {
  for (const auto& [ta, tb] : {std::pair{Op::kNone, Op::kNone},
                               {Op::kTranspose, Op::kNone},
                               {Op::kNone, Op::kTranspose},
                               {Op::kTranspose, Op::kTranspose}}) {
    const int64_t m = 5, n = 7, k = 3;
    const at::Tensor a =
        at::arange(m * k, at::kDouble)
            .sin()
            .reshape(ta == Op::kNone ? at::IntArrayRef{m, k} : at::IntArrayRef{k, m});
    const at::Tensor b =
        at::arange(n * k, at::kDouble)
            .cos()
            .reshape(tb == Op::kNone ? at::IntArrayRef{k, n} : at::IntArrayRef{n, k});
    at::Tensor c = at::full({m, n + 2}, 9.0, at::kDouble);
    gemm(ta,
         tb,
         m,
         n,
         k,
         2.0,
         a.const_data_ptr<double>(),
         a.size(1),
         b.const_data_ptr<double>(),
         b.size(1),
         0.5,
         c.mutable_data_ptr<double>(),
         n + 2);
    const at::Tensor expected =
        2 * at::matmul(ta == Op::kNone ? a : a.t(), tb == Op::kNone ? b : b.t()) + 4.5;
    EXPECT_TRUE(at::allclose(c.narrow(1, 0, n), expected, 1e-13, 1e-13));
    EXPECT_TRUE(c.narrow(1, n, 2).eq(9.0).all().item<bool>());
  }
}

TEST(Blas, EmptyInnerDimensionScalesByBeta) {
  at::Tensor c = at::ones({2, 2}, at::kFloat);
  gemm(Op::kNone,
       Op::kNone,
       2,
       2,
       0,
       1.0F,
       nullptr,
       1,
       nullptr,
       2,
       0.0F,
       c.mutable_data_ptr<float>(),
       2);
  EXPECT_EQ(c.abs().sum().item<float>(), 0);
}

TEST(ParallelFor, RunsPiecesOnSeveralThreadsAtATime) {
  const int before = num_threads();
  at::set_num_threads(2);
  // Each piece waits for the other to begin, which one thread alone would never see.
  std::atomic<int> begun{0};
  std::atomic<bool> met{true};
  parallel_for(0, 2, 1, [&](int64_t begin, int64_t end) {
    begun += static_cast<int>(end - begin);
    const auto start = std::chrono::steady_clock::now();
    while (begun < 2 && met) {
      if (std::chrono::steady_clock::now() - start > std::chrono::seconds(20)) met = false;
    }
    EXPECT_EQ(end - begin, 1);
  });
  at::set_num_threads(before);
  EXPECT_TRUE(met);
}

TEST(ParallelFor, ExceptionsReachTheCaller) {
  EXPECT_THROW(
      parallel_for(0, 100, 1, [](int64_t, int64_t) { fail(ErrorKind::kInternal, "inside"); }),
      Error);
}

}  // namespace
}  // namespace lockstep::tests
