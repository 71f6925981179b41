// The record of what was communicated: its bytes, and the first call that ranks do not share.
#include "parallel/comm/ledger.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "parallel/comm/group_impl.hpp"
#include "tests/rank/world.hpp"

namespace lockstep::tests {
namespace {

using parallel::CommOp;
using parallel::LedgerTotals;

LedgerTotals total_of(const std::string& name) {
  for (const LedgerTotals& sum : parallel::ledger_totals()) {
    if (sum.group == name) return sum;
  }
  return {};
}

TEST(CommLedger, BytesOfAGroupAreWhatItsCallsMove) {
  if (world().size() == 1) GTEST_SKIP() << "a group of one sends nothing";
  const int64_t n = world().size(), me = world().rank();
  const parallel::Group group = world().split(0, me, "bytes");
  std::vector<int64_t> rows(static_cast<size_t>(n), 3);
  const Tensor mine = at::ones({3, 5});  // 60 bytes
  (void)group.all_gather_rows(mine, rows, "gather");
  (void)group.reduce_scatter_rows(at::ones({3 * n, 5}), rows, "scatter");
  (void)group.all_to_all_rows(at::ones({3 * n, 5}), rows, rows, "exchange");
  Tensor sum = at::ones({n * 7}, at::kDouble);
  group.all_reduce_sum(sum, "sum");
  group.barrier("end");
  const LedgerTotals total = total_of("bytes");
  EXPECT_EQ(total.calls, 5);
  EXPECT_EQ(total.size, n);
  // Three calls of 60 bytes to every other rank; the sum is cut in n, sent around twice.
  EXPECT_EQ(total.bytes_sent, (n - 1) * (3 * 60 + 2 * 7 * 8));
  EXPECT_EQ(total.bytes_received, total.bytes_sent);
  // One element is summed by the last rank, which gets the others' and sends them the sum.
  Tensor one = at::ones({1}, at::kDouble);
  group.all_reduce_sum(one, "one");
  EXPECT_EQ(total_of("bytes").bytes_sent - total.bytes_sent, 8 * (me == n - 1 ? n - 1 : 1));
  EXPECT_NE(parallel::ledger_table().find("bytes"), std::string::npos);
}

TEST(CommLedger, TimeInCallsIsThatOfWaitingForTheSlowest) {
  if (world().size() == 1) GTEST_SKIP() << "a group of one waits for nobody";
  const parallel::Group group = world().split(0, world().rank(), "slow peer");
  group.barrier("ready");
  const double before = total_of("slow peer").seconds;
  if (world().rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(200));
  group.barrier("slow");
  const double waited = total_of("slow peer").seconds - before;
  if (world().rank() != 0) {
    EXPECT_GE(waited, 0.1);
  }
  EXPECT_LE(waited, 60);
}

TEST(CommLedger, B42LedgersOfRanksThatMakeTheSameCallsAreEqual) {
  const parallel::Group group = world().split(0, world().rank(), "same");
  for (int i = 0; i < 100; ++i) group.barrier("again");
  EXPECT_FALSE(parallel::compare_ledgers(group).has_value());
}

TEST(CommLedger, B42TheFirstCallThatRanksDoNotShareIsFound) {
  if (world().size() == 1) GTEST_SKIP() << "needs a peer";
  const parallel::Group group = world().split(0, world().rank(), "parted");
  parallel::Ledger& ledger = group.impl().ledger;
  const bool other = world().rank() == 1;
  ledger.record(CommOp::kAllGather, "keys", 8, 8, 1);
  if (!other) ledger.record(CommOp::kAllReduce, "norm", 8, 8, 1);
  ledger.record(CommOp::kBarrier, "end", 0, 0, 1);
  const auto difference = parallel::compare_ledgers(group);
  ASSERT_TRUE(difference.has_value());
  EXPECT_EQ(difference->rank, 1);
  EXPECT_EQ(difference->sequence, 2);
  EXPECT_EQ(difference->calls[0], "call 2, all-reduce of norm");
  EXPECT_EQ(difference->calls[1], "call 2, barrier of end");
}

TEST(CommLedger, CallsOfAnotherSizeDiffer) {
  if (world().size() == 1) GTEST_SKIP() << "needs a peer";
  const parallel::Group group = world().split(0, world().rank(), "sizes");
  group.impl().ledger.record(CommOp::kAllGather, "keys", 8, 8, world().rank() == 1 ? 2 : 1);
  EXPECT_TRUE(parallel::compare_ledgers(group).has_value());
}

TEST(CommLedger, MessagesThatNobodyReceivedAreFound) {
  if (world().size() == 1) GTEST_SKIP() << "needs a peer";
  const parallel::Group group = world().split(0, world().rank(), "messages");
  if (world().rank() == 0) group.impl().ledger.record(CommOp::kSend, "state", 8, 0, 1, 1);
  const auto difference = parallel::compare_ledgers(group);
  ASSERT_TRUE(difference.has_value());
  EXPECT_NE(difference->text.find("rank 0 sent 1 messages to rank 1, which received 0"),
            std::string::npos)
      << difference->text;
}

TEST(CommLedger, B42ADelayedRankIsWaitedFor) {
  Tensor one = at::ones({1});
  if (world().rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(700));
  world().all_reduce_sum(one, "delayed");
  EXPECT_EQ(one.item<float>(), static_cast<float>(world().size()));
}

}  // namespace
}  // namespace lockstep::tests
