// Invariant policies on one process: how documents are packed, cut into micro-batches or recomputed
// leaves no trace in logits, loss or gradients, and costs no accuracy.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "harness/trainer/trainer.hpp"
#include "parallel/plan/token_plan.hpp"
#include "tests/support/compare.hpp"
#include "tests/support/tiny_model.hpp"

namespace lockstep::tests {
namespace {

using harness::Documents;
using harness::Trainer;
using harness::TrainerOptions;
using harness::TrainerResult;

TrainerOptions options(std::string_view policy) {
  TrainerOptions o;
  o.numerics = model::Numerics::policy(policy);
  o.grads = true;
  return o;
}

using Texts = std::vector<std::vector<int64_t>>;

Texts some_texts(uint64_t seed = 0) {
  Texts texts;
  for (const int64_t length : {150, 1, 64, 0, 63, 129, 7}) {
    const Documents d = tiny_documents({length}, static_cast<uint64_t>(length) + 5 + 1000 * seed);
    const auto* id = static_cast<const int64_t*>(d.ids.const_data_ptr());
    texts.emplace_back(id, id + length);
  }
  return texts;
}

/// The texts in this order, cut into micro-batches of these sizes.
TrainerResult run(const Texts& texts,
                  const std::vector<size_t>& order,
                  const std::vector<size_t>& sizes,
                  const TrainerOptions& o) {
  std::vector<Documents> batches;
  size_t at = 0;
  for (const size_t size : sizes) {
    Texts batch;
    for (size_t i = 0; i < size; ++i) batch.push_back(texts[order[at++]]);
    batches.push_back(harness::make_documents(batch));
  }
  return Trainer(tiny(), o, parallel::Mesh::single()).run(batches);
}

/// Rows of each text, in the order of the texts.
Tensor by_text(const Tensor& rows, const Texts& texts, const std::vector<size_t>& order) {
  std::vector<Tensor> parts(texts.size());
  int64_t at = 0;
  for (const size_t t : order) {
    const auto length = static_cast<int64_t>(texts[t].size());
    parts[t] = rows.narrow(0, at, length);
    at += length;
  }
  return at::cat(parts);
}

class Packing : public testing::TestWithParam<const char*> {};

TEST_P(Packing, LeavesNoTrace) {
  const Texts texts = some_texts();
  const TrainerOptions o = options(GetParam());
  const std::vector<size_t> natural{0, 1, 2, 3, 4, 5, 6};
  const TrainerResult packed = run(texts, natural, {7}, o);
  ASSERT_GT(packed.loss, 0);
  struct Way {
    std::vector<size_t> order, sizes;
    bool recompute = false;
    int threads = 0;
  };
  for (const Way& way : {Way{natural, {1, 1, 1, 1, 1, 1, 1}},
                         Way{{6, 5, 4, 3, 2, 1, 0}, {7}},
                         Way{{4, 0, 6, 2, 5, 1, 3}, {2, 4, 1}},
                         Way{natural, {7}, true},
                         Way{natural, {3, 4}, false, 1}}) {
    TrainerOptions changed = o;
    changed.recompute = way.recompute;
    const int threads = at::get_num_threads();
    if (way.threads > 0) at::set_num_threads(way.threads);
    const TrainerResult r = run(texts, way.order, way.sizes, changed);
    at::set_num_threads(threads);
    const std::string what = fmt::format("{} micro-batches", way.sizes.size());
    EXPECT_TRUE(same_bytes(by_text(r.logits, texts, way.order), packed.logits)) << what;
    EXPECT_EQ(r.loss, packed.loss) << what;
    ASSERT_EQ(r.grads.size(), packed.grads.size());
    for (const auto& [name, grad] : packed.grads)
      EXPECT_TRUE(same_bytes(r.grads.at(name), grad)) << what << " " << name;
  }
}

/// "model.layers.2.mlp.gate.weight" -> "mlp.gate.weight".
std::string without_layer(const std::string& name) {
  const std::string prefix = "model.layers.";
  return name.starts_with(prefix) ? name.substr(name.find('.', prefix.size()) + 1) : name;
}

TEST_P(Packing, IsAsCloseToFloat64AsThePlainPolicy) {
  const std::vector<size_t> order{0, 1, 2, 3, 4, 5, 6};
  const bool bf16 = std::string(GetParam()) == "invariant-bf16";
  // Some gradients are three numbers, each a sum of tokens that nearly cancel: the ratio of two
  // errors scatters by a factor of 6. Its geometric mean over layers and texts does not.
  std::map<std::string, std::pair<double, int>> log_ratios;
  for (uint64_t seed = 0; seed < 6; ++seed) {
    const Texts texts = some_texts(seed);
    const TrainerResult truth = run(texts, order, {7}, options("float64")),
                        plain =
                            run(texts, order, {7}, options(bf16 ? "fsdp-fp32-islands" : "float32")),
                        got = run(texts, order, {7}, options(GetParam()));
    EXPECT_LE(rel_l2(got.logits, truth.logits), 1.5 * rel_l2(plain.logits, truth.logits));
    EXPECT_NEAR(got.loss, truth.loss, 2 * std::abs(plain.loss - truth.loss) + 1e-6);
    for (const auto& [name, grad] : truth.grads) {
      auto& [sum, count] = log_ratios[without_layer(name)];
      sum += std::log((rel_l2(got.grads.at(name), grad) + 1e-7) /
                      (rel_l2(plain.grads.at(name), grad) + 1e-7));
      ++count;
    }
  }
  for (const auto& [name, ratio] : log_ratios)
    EXPECT_LE(std::exp(ratio.first / ratio.second), 1.5) << name;
}

INSTANTIATE_TEST_SUITE_P(Invariant,
                         Packing,
                         testing::Values("invariant-f32", "invariant-bf16"),
                         [](const auto& param) {
                           return std::string(param.param) == "invariant-f32" ? "F32" : "Bf16";
                         });

TEST(InvariantPolicy, HasItsSwitchesAndLosesItsPropertyWithThem) {
  for (const char* name : {"invariant", "invariant-f32", "invariant-bf16"}) {
    model::Numerics num = model::Numerics::policy(name);
    EXPECT_TRUE(num.invariant()) << name;
    EXPECT_EQ(num.acc(), at::kFloat);
    num.set("D29", "1e-5");
    EXPECT_TRUE(num.invariant()) << "where roundings are does not matter";
    num.set("D63", "library");
    EXPECT_FALSE(num.invariant());
  }
  model::Numerics plain = model::Numerics::policy("float32");
  plain.set("D06", "fixed");
  plain.set("D62", "handover");
  plain.set("D63", "fixed-tiles");
  EXPECT_FALSE(plain.invariant()) << "sums over tokens are ordered there";
}

TEST(InvariantPolicy, CutsRowsAtTheTilesNearestToEven) {
  const auto cuts = [](const std::vector<int64_t>& lengths, int64_t cp) {
    model::Topology topology;
    topology.cp = cp;
    return parallel::plan_tokens(
               topology, parallel::Coordinates{}, lockstep::Packing::of_lengths(lengths), {}, true)
        .cuts;
  };
  EXPECT_EQ(cuts({256}, 2), (std::vector<int64_t>{0, 128, 256}));
  EXPECT_EQ(cuts({200}, 2), (std::vector<int64_t>{0, 128, 200}));
  EXPECT_EQ(cuts({10, 200}, 2), (std::vector<int64_t>{0, 74, 210}));
  EXPECT_EQ(cuts({40}, 4), (std::vector<int64_t>{0, 0, 0, 40, 40}));
  EXPECT_EQ(cuts({}, 2), (std::vector<int64_t>{0, 0, 0}));
}

}  // namespace
}  // namespace lockstep::tests
