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
  Tensor numbers = at::arange(count, at::kDouble).mul(0.37).add(static_cast<double>(rank)).sin();
  if (dtype == at::kByte) numbers = numbers.abs();
  return numbers.mul(10).reshape(sizes).to(dtype);
}

const std::vector<at::ScalarType> kDtypes = {
    at::kDouble, at::kFloat, at::kBFloat16, at::kLong, at::kByte};

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

INSTANTIATE_TEST_SUITE_P(Sizes,
                         AllReduce,
                         testing::Combine(testing::Values(0, 1, 5, 64, 1001),
                                          testing::ValuesIn(kDtypes)));

/// 0, 3, 2, 1, 0, ... rows
std::vector<int64_t> uneven_rows() {
  std::vector<int64_t> rows;
  for (int64_t r = 0; r < world().size(); ++r) rows.push_back((r * 3) % 4);
  return rows;
}

Tensor gathered(const std::vector<int64_t>& rows, at::ScalarType dtype) {
  std::vector<Tensor> parts;
  for (int64_t r = 0; r < world().size(); ++r)
    parts.push_back(values(r, {rows[static_cast<size_t>(r)], 2, 3}, dtype));
  return at::cat(parts, 0);
}

Tensor own_rows(const std::vector<int64_t>& rows, at::ScalarType dtype) {
  return values(world().rank(), {rows[static_cast<size_t>(world().rank())], 2, 3}, dtype);
}

TEST(Collectives, GatherRowsWithUnevenAndEmptyRanks) {
  const std::vector<int64_t> rows = uneven_rows();
  for (const at::ScalarType dtype : kDtypes) {
    const Tensor all = world().all_gather_rows(own_rows(rows, dtype), rows, "test");
    EXPECT_TRUE(at::equal(all, gathered(rows, dtype))) << dtype_name(dtype);
  }
}

TEST(Collectives, GathersThatWereStartedCanBeWaitedForInAnyOrder) {
  const std::vector<int64_t> uneven = uneven_rows(),
                             even(static_cast<size_t>(world().size()), int64_t{2});
  parallel::Pending first =
      world().all_gather_rows_start(own_rows(uneven, at::kFloat), uneven, "a");
  parallel::Pending second = world().all_gather_rows_start(own_rows(even, at::kByte), even, "b");
  Tensor one = at::ones({1});
  world().all_reduce_sum(one, "between");
  EXPECT_EQ(one.item<float>(), static_cast<float>(world().size()));
  EXPECT_TRUE(at::equal(second.wait(), gathered(even, at::kByte)));
  EXPECT_TRUE(at::equal(first.wait(), gathered(uneven, at::kFloat)));
}

TEST(Collectives, ExchangedRowsArriveInRankOrderWhateverTheirNumbers) {
  const int64_t me = world().rank(), size = world().size();
  const auto count = [](int64_t from, int64_t to) { return (from + 2 * to) % 3; };
  // Row i from `from` to `to` holds 100 from + 10 to + i.
  const auto rows = [&](int64_t from, int64_t to) {
    return at::arange(count(from, to), at::kLong).add(100 * from + 10 * to);
  };
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kLong}) {
    std::vector<int64_t> send, receive;
    std::vector<Tensor> out, in;
    for (int64_t r = 0; r < size; ++r) {
      send.push_back(count(me, r));
      receive.push_back(count(r, me));
      out.push_back(rows(me, r));
      in.push_back(rows(r, me));
    }
    const auto two = [&](const std::vector<Tensor>& parts) {
      return at::cat(parts).to(dtype).unsqueeze(1).expand({-1, 2}).contiguous();
    };
    EXPECT_TRUE(at::equal(world().all_to_all_rows(two(out), send, receive, "test"), two(in)));
  }
}

TEST(Collectives, EveryRootBroadcastsEveryDtype) {
  for (int64_t root = 0; root < world().size(); ++root) {
    for (const at::ScalarType dtype : kDtypes) {
      Tensor tensor = values(world().rank(), {3, 5}, dtype);
      world().broadcast(tensor, root, "test");
      EXPECT_TRUE(at::equal(tensor, values(root, {3, 5}, dtype))) << root << dtype_name(dtype);
    }
  }
}

TEST(Collectives, MessagesArriveInTheOrderInWhichTheyWereSent) {
  // Along a chain, as recurrent states travel.
  const int64_t me = world().rank(), last = world().size() - 1;
  for (const at::ScalarType dtype : kDtypes) {
    for (int64_t i = 0; i < 2; ++i) {
      Tensor tensor = values(10 + i, {7}, dtype);
      if (me > 0) {
        tensor.zero_();
        world().recv(tensor, me - 1, 5, "test");
      }
      EXPECT_TRUE(at::equal(tensor, values(10 + i, {7}, dtype)));
      if (me < last) world().send(tensor, me + 1, 5, "test");
    }
  }
  world().barrier("test");
}

TEST(Collectives, DeviceMemoryGivesTheBytesThatHostMemoryGives) {
  if (!at::hasCUDA()) GTEST_SKIP() << "the tensor library sees no GPU";
  const int64_t me = world().rank();
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kLong}) {
    Tensor host = values(me, {257}, dtype), device = host.to(at::kCUDA);
    world().all_reduce_sum(host, "host");
    world().all_reduce_sum(device, "device");
    EXPECT_TRUE(device.is_cuda());
    EXPECT_TRUE(at::equal(device.cpu(), host)) << dtype_name(dtype);
    const std::vector<int64_t> rows = uneven_rows();
    const Tensor all = world().all_gather_rows(own_rows(rows, dtype).to(at::kCUDA), rows, "device");
    EXPECT_TRUE(all.is_cuda());
    EXPECT_TRUE(at::equal(all.cpu(), gathered(rows, dtype))) << dtype_name(dtype);
  }
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
  const parallel::Group group = world().split(0, world().rank(), "late");
  const int64_t before = parallel::comm_timeout_ms();
  if (world().rank() == 0) {
    parallel::set_comm_timeout_ms(200);
    Tensor tensor = at::zeros({3});
    try {
      group.recv(tensor, 1, 99, "layer 3 kda state");
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
