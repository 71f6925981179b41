#include "model/base/tensor_memory.hpp"

#include <gtest/gtest.h>

#include "model/base/torch.hpp"

namespace lockstep::tests {
namespace {

int64_t now(MemoryKind kind) { return tensor_memory().now[static_cast<size_t>(kind)]; }

TEST(TensorMemory, BytesBelongToTheScopeTheyWereMadeInUntilTheyAreFreed) {
  watch_tensor_memory();
  reset_tensor_memory_peak();
  const int64_t before = now(MemoryKind::kGradients), other = now(MemoryKind::kOther);
  Tensor inner, outer;
  {
    const MemoryScope gradients(MemoryKind::kGradients);
    {
      const MemoryScope exchange(MemoryKind::kExchange);
      inner = at::zeros({1000});
    }
    outer = at::zeros({10, 100}, at::kDouble);
  }
  const Tensor free = at::zeros({7}, at::kByte);
  EXPECT_EQ(now(MemoryKind::kGradients) - before, 8000);
  EXPECT_EQ(now(MemoryKind::kExchange), 4000);
  EXPECT_EQ(now(MemoryKind::kOther) - other, 7);
  const Tensor view = outer.view({-1});
  outer = Tensor();
  EXPECT_EQ(now(MemoryKind::kGradients) - before, 8000) << "a view keeps the memory";
  inner = Tensor();
  EXPECT_EQ(now(MemoryKind::kExchange), 0);
  const MemoryUse use = tensor_memory();
  EXPECT_EQ(use.at_peak[static_cast<size_t>(MemoryKind::kExchange)], 4000);
  EXPECT_GE(use.peak_total, 12007);
}

TEST(TensorMemory, ResizedStorageIsCountedAnew) {
  watch_tensor_memory();
  const int64_t before = now(MemoryKind::kOther);
  Tensor tensor = at::zeros({100});
  tensor.resize_({1000});
  EXPECT_EQ(now(MemoryKind::kOther) - before, 4000);
  tensor = Tensor();
  EXPECT_EQ(now(MemoryKind::kOther), before);
}

TEST(TensorMemory, FreshMemoryHoldsThePattern) {
  watch_tensor_memory();
  fill_new_tensors(0xff);
  const Tensor floats = at::empty({5}), halves = at::empty({5}, at::kBFloat16),
               integers = at::empty({5}, at::kLong);
  fill_new_tensors(std::nullopt);
  EXPECT_TRUE(floats.isnan().all().item<bool>());
  EXPECT_TRUE(halves.isnan().all().item<bool>());
  EXPECT_TRUE(integers.eq(-1).all().item<bool>());
}

}  // namespace
}  // namespace lockstep::tests
