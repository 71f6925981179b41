// What the NCCL transport does besides moving bytes: communicators that fail, and those that later
// groups take over. Runs over the fake device.
#include <gtest/gtest.h>

#include "tests/rank/world.hpp"
#include "tests/support/fake_device.hpp"

namespace lockstep::tests {
namespace {

std::string error_of(const parallel::Group& group, std::string_view what) {
  Tensor tensor = at::ones({3});
  try {
    group.all_reduce_sum(tensor, what);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kComm);
    return error.what();
  }
  return "no error";
}

TEST(NcclTransport, AFailureOfAPeerEndsTheCommunicatorForGood) {
  if (world().size() == 1) GTEST_SKIP() << "a group of one has no communicator";
  const parallel::Group group = world().split(0, world().rank(), "broken");
  EXPECT_EQ(error_of(group, "sound"), "no error");
  world().barrier("before");
  break_fake_nccl(true);
  const std::string first = error_of(group, "gradients");
  break_fake_nccl(false);
  EXPECT_NE(first.find("group broken rank"), std::string::npos) << first;
  EXPECT_NE(first.find("gradients"), std::string::npos) << first;
  EXPECT_NE(first.find("NCCL communicator failed"), std::string::npos) << first;
  const std::string second = error_of(group, "later");
  EXPECT_NE(second.find("was given up"), std::string::npos) << second;
  EXPECT_NE(second.find("NCCL communicator failed"), std::string::npos) << second;
}

TEST(NcclTransport, AGroupOfTheSameNameAndRanksTakesTheCommunicatorOver) {
  if (world().size() == 1) GTEST_SKIP() << "a group of one has no communicator";
  const auto use = [](const std::string& name) {
    const parallel::Group group = world().split(0, world().rank(), name);
    const int before = fake_nccl_communicators();
    EXPECT_EQ(error_of(group, "use"), "no error");
    return fake_nccl_communicators() - before;
  };
  EXPECT_EQ(use("axis"), 1);
  EXPECT_EQ(use("axis"), 0);
  EXPECT_EQ(use("other axis"), 1);
  const parallel::Group held = world().split(0, world().rank(), "axis");
  EXPECT_EQ(error_of(held, "hold"), "no error");
  EXPECT_EQ(use("axis"), 1) << "two living groups share a communicator";
}

}  // namespace
}  // namespace lockstep::tests
