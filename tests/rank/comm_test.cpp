// Collectives against their definition, for sizes that do not divide, empty ranks, and every dtype
// in use.
#include <gtest/gtest.h>

#include "tests/rank/world.hpp"

namespace lockstep::tests {
namespace {

/// A value every rank can compute for every rank.
Tensor values(int64_t rank, at::IntArrayRef sizes, at::ScalarType dtype) {
  int64_t count = 1;
  for (int64_t s : sizes) count *= s;
  return (at::arange(count, at::kDouble).mul(0.37).add(static_cast<double>(rank)).sin().mul(10))
      .reshape(sizes)
      .to(dtype);
}

class AllReduce : public testing::TestWithParam<std::tuple<int64_t, at::ScalarType>> {};

TEST_P(AllReduce, SumsInRankOrderToTheSameBytesEverywhere) {
  const auto [count, dtype] = GetParam();
  Tensor tensor = values(world().rank(), {count}, dtype);
  const at::ScalarType wide = dtype == at::kBFloat16 ? at::kFloat : dtype;
  Tensor expected = values(0, {count}, dtype).to(wide);
  for (int64_t r = 1; r < world().size(); ++r) expected.add_(values(r, {count}, dtype));
  world().all_reduce_sum(tensor, "test");
  EXPECT_TRUE(at::equal(tensor, expected.to(dtype)));
}

INSTANTIATE_TEST_SUITE_P(
    Sizes,
    AllReduce,
    testing::Combine(testing::Values(0, 1, 5, 64, 1001),
                     testing::Values(at::kDouble, at::kFloat, at::kBFloat16, at::kLong)));

TEST(Collectives, GatherRowsWithUnevenAndEmptyRanks) {
  std::vector<int64_t> rows;
  for (int64_t r = 0; r < world().size(); ++r) rows.push_back((r * 3) % 4);  // 0, 3, 2, 1, 0, ...
  const Tensor local =
      values(world().rank(), {rows[static_cast<size_t>(world().rank())], 2, 3}, at::kFloat);
  const Tensor all = world().all_gather_rows(local, rows, "test");
  std::vector<Tensor> expected;
  for (int64_t r = 0; r < world().size(); ++r)
    expected.push_back(values(r, {rows[static_cast<size_t>(r)], 2, 3}, at::kFloat));
  EXPECT_TRUE(at::equal(all, at::cat(expected, 0)));
}

TEST(Collectives, ReduceScatterRowsIsTheTransposeOfGather) {
  std::vector<int64_t> rows;
  int64_t total = 0, first = 0;
  for (int64_t r = 0; r < world().size(); ++r) {
    if (r == world().rank()) first = total;
    rows.push_back(1 + r % 3);
    total += rows.back();
  }
  const Tensor part =
      world().reduce_scatter_rows(values(world().rank(), {total, 5}, at::kDouble), rows, "test");
  Tensor expected = values(0, {total, 5}, at::kDouble);
  for (int64_t r = 1; r < world().size(); ++r) expected.add_(values(r, {total, 5}, at::kDouble));
  EXPECT_TRUE(
      at::equal(part, expected.narrow(0, first, rows[static_cast<size_t>(world().rank())])));
}

TEST(Collectives, StridedTensorsAreRefusedByName) {
  if (world().size() == 1) GTEST_SKIP() << "a group of one does nothing to refuse";
  Tensor strided = at::zeros({4, 3}).t();
  try {
    world().all_reduce_sum(strided, "router weight");
    FAIL() << "accepted a strided tensor";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kShape);
    EXPECT_NE(std::string(error.what()).find("router weight"), std::string::npos) << error.what();
  }
}

TEST(Collectives, AMissingPeerIsNamedWhenTheDeadlinePasses) {
  if (world().size() == 1) GTEST_SKIP() << "needs a peer";
  const int64_t before = parallel::comm_timeout_ms();
  if (world().rank() == 0) {
    parallel::set_comm_timeout_ms(200);
    Tensor tensor = at::zeros({3});
    try {
      world().recv(tensor, 1, 99, "layer 3 kda state");
      ADD_FAILURE() << "received from a rank that sent nothing";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kComm);
      EXPECT_NE(std::string(error.what()).find("layer 3 kda state"), std::string::npos)
          << error.what();
      EXPECT_NE(std::string(error.what()).find("rank 1"), std::string::npos) << error.what();
    }
    parallel::set_comm_timeout_ms(before);
  }
  world().barrier("test");
}

TEST(Collectives, SplitGroupsCountRanksOfTheirColor) {
  const parallel::Group part = world().split(world().rank() % 2, world().rank(), "parity");
  EXPECT_EQ(part.size(), (world().size() + 1 - world().rank() % 2) / 2);
  EXPECT_EQ(part.rank(), world().rank() / 2);
  Tensor sum = at::full({1}, world().rank(), at::kLong);
  part.all_reduce_sum(sum, "test");
  int64_t expected = 0;
  for (int64_t r = world().rank() % 2; r < world().size(); r += 2) expected += r;
  EXPECT_EQ(sum.item<int64_t>(), expected);
}

}  // namespace
}  // namespace lockstep::tests
