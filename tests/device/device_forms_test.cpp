// The device forms of the operators, on the CPU: the same tensor functions that a GPU runs.
#include <gtest/gtest.h>

#include "harness/launch/paths.hpp"
#include "harness/runner/golden_verify.hpp"
#include "harness/trainer/trainer.hpp"
#include "model/base/device.hpp"
#include "model/ops/indexer.hpp"
#include "model/ops/take_rows.hpp"
#include "tests/support/compare.hpp"
#include "tests/support/tiny_model.hpp"

namespace lockstep::tests {
namespace {

TEST(DeviceForms, KeepTheLimitsOfTheGoldens) {
  const DeviceFormsOnCpu forms;
  const auto result = harness::verify_goldens({.data = harness::golden_folder(),
                                               .cases = {"tiny", "packing"},
                                               .policies = {},
                                               .device = "cpu"},
                                              [](std::string_view) {});
  EXPECT_EQ(result.rows.size(), 8U);
  EXPECT_TRUE(result.pass()) << result.f64.worst_name << " " << result.f64.worst << ", "
                             << result.f32.worst_name << " " << result.f32.worst << ", "
                             << result.bf16.worst_name << " " << result.bf16.worst;
}

TEST(DeviceForms, EqualTheFastOnesInFloat64) {
  const harness::Documents docs = tiny_documents({75, 1, 7, 0, 50});
  harness::TrainerOptions options;
  options.numerics = model::Numerics::policy("float64");
  options.grads = true;
  const auto run = [&] {
    return harness::Trainer(tiny(), options, parallel::Mesh::single()).run(docs);
  };
  const harness::TrainerResult fast = run();
  const DeviceFormsOnCpu forms;
  const harness::TrainerResult device = run();
  EXPECT_LE(rel_l2(device.logits, fast.logits), 1e-12);
  EXPECT_GT(rel_l2(device.logits, fast.logits), 0)
      << "two code paths that agree to the bit are one code path";
  const auto [distance, name] = worst(device.grads, fast.grads);
  EXPECT_LE(distance, 1e-11) << name;
}

TEST(DeviceForms, RecomputeGivesTheSameBytes) {
  const harness::Documents docs = tiny_documents({75, 1, 7, 50});
  const DeviceFormsOnCpu forms;
  for (const char* policy : {"float32", "hf-bf16", "fsdp-fp32-islands"}) {
    harness::TrainerOptions options;
    options.numerics = model::Numerics::policy(policy);
    options.grads = true;
    const auto run = [&] {
      return harness::Trainer(tiny(), options, parallel::Mesh::single()).run(docs);
    };
    const harness::TrainerResult kept = run();
    options.recompute = true;
    const harness::TrainerResult again = run();
    EXPECT_TRUE(same_bytes(again.logits, kept.logits)) << policy;
    for (const auto& [name, grad] : kept.grads)
      EXPECT_TRUE(same_bytes(again.grads.at(name), grad)) << policy << " " << name;
  }
}

TEST(DeviceForms, SelectionsAreThoseOfThePlainForm) {
  const model::Numerics num = model::Numerics::policy("float32");
  const Packing packing = Packing::of_lengths({37, 0, 3, 1, 66, 4});
  const int64_t tokens = packing.global_tokens();
  for (const int64_t kpool : {1, 4, 5}) {
    for (const bool tail : {true, false}) {
      for (const int64_t topk : {int64_t{0}, 2 * kpool, 100 * kpool}) {
        const model::IndexerParams params{
            .num_heads = 3, .head_dim = 8, .kpool = kpool, .topk = topk, .select_tail = tail};
        const int64_t pools = model::indexer::pool_offsets(packing.cu_seqlens(), kpool).back();
        // Few different values, so that many scores are equal.
        const auto drawn = [](at::IntArrayRef sizes) {
          return at::randint(-1, 2, sizes).to(at::kFloat);
        };
        const Tensor q = drawn({tokens, 3, 8}), weight = drawn({tokens, 3}),
                     pooled = drawn({pools, 8});
        EXPECT_TRUE(at::equal(
            model::indexer::select_keys_on_device(q, weight, pooled, packing, params, num),
            model::select_keys_reference(q, weight, pooled, packing, params, num)))
            << "kpool " << kpool << " topk " << topk << " tail " << tail;
      }
    }
  }
}

TEST(DeviceForms, LoopsOverHostMemoryRefuseOtherTensors) {
  const Tensor elsewhere = at::empty({2}, at::TensorOptions(at::kFloat).device(at::kMeta));
  EXPECT_TRUE(takes_device_form(elsewhere));
  EXPECT_THROW(check_host(elsewhere), Error);
  EXPECT_FALSE(takes_device_form(at::empty({2})));
}

}  // namespace
}  // namespace lockstep::tests
