// The whole tiny model on one process: packing, recompute, cutting the stack, plain against fast
// operators.
#include "harness/trainer/trainer.hpp"

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "harness/engine/trace.hpp"
#include "model/config/config_json.hpp"
#include "model/layers/decoder.hpp"
#include "tests/support/compare.hpp"
#include "tests/support/leaf_parameters.hpp"
#include "tests/support/tiny_model.hpp"

namespace lockstep::tests {
namespace {

using harness::Documents;
using harness::Trainer;
using harness::TrainerOptions;
using harness::TrainerResult;

TrainerOptions options(std::string_view policy, bool grads = true) {
  TrainerOptions o;
  o.numerics = model::Numerics::policy(policy);
  o.grads = grads;
  return o;
}

TrainerResult run(const Documents& docs, const TrainerOptions& o) {
  return Trainer(tiny(), o, parallel::Mesh::single()).run(docs);
}

/// Document d of a packed row as a row of its own.
Documents alone(const Documents& docs, int64_t d) {
  const Segment& s = docs.packing.segments()[static_cast<size_t>(d)];
  return harness::from_row(docs.ids.narrow(0, s.begin, s.length()).clone(), {0, s.length()});
}

TEST(Trainer, FastOperatorsEqualPlainOnesInFloat64) {
  const Documents docs = tiny_documents({75, 1, 7, 50});
  TrainerOptions plain = options("float64");
  plain.reference_ops = true;
  const TrainerResult a = run(docs, options("float64")), b = run(docs, plain);
  EXPECT_LE(rel_l2(a.logits, b.logits), 1e-12);
  EXPECT_GT(rel_l2(a.logits, b.logits), 0)
      << "two code paths that agree to the bit are one code path";
  const auto [distance, name] = worst(a.grads, b.grads);
  EXPECT_LE(distance, 1e-11) << name;
}

TEST(Trainer, B07PackedDocumentsEqualEachAlone) {
  const Documents docs = tiny_documents({13, 7, 40, 1, 3, 0, 66});
  for (const auto& [policy, rows] : {std::pair{"float64", "library"},
                                     std::pair{"float32", "fixed-tiles"},
                                     std::pair{"hf-bf16", "fixed-tiles"},
                                     std::pair{"fsdp-bf16", "fixed-tiles"}}) {
    TrainerOptions o = options(policy, false);
    o.numerics.set("gemm_rows", rows);
    const TrainerResult packed = run(docs, o);
    for (int64_t d = 0; d < docs.packing.num_documents(); ++d) {
      const Segment& s = docs.packing.segments()[static_cast<size_t>(d)];
      if (s.length() == 0) continue;
      const Tensor single = run(alone(docs, d), o).logits;
      const Tensor part = packed.logits.narrow(0, s.begin, s.length());
      // With rows computed in fixed tiles nothing depends on a row's neighbours. The library may
      // choose another kernel for another number of rows.
      if (std::string_view(rows) == "fixed-tiles") {
        EXPECT_TRUE(same_bytes(part, single))
            << policy << " document " << d << " rel_l2 " << rel_l2(part, single);
      } else {
        EXPECT_LE(rel_l2(part, single), 1e-13) << policy << " document " << d;
      }
    }
  }
}

TEST(Trainer, B07GradientsOfAPackAreTheWeightedSumOfTheDocuments) {
  const Documents docs = tiny_documents({13, 7, 40, 1, 3});
  const TrainerResult packed = run(docs, options("float64"));
  Named sum;
  for (int64_t d = 0; d < docs.packing.num_documents(); ++d) {
    const TrainerResult single = run(alone(docs, d), options("float64"));
    const double weight =
        static_cast<double>(single.num_targets) / static_cast<double>(packed.num_targets);
    for (const auto& [name, grad] : single.grads) {
      if (!sum.contains(name)) sum[name] = at::zeros_like(grad);
      sum[name] += grad * weight;
    }
  }
  const auto [distance, name] = worst(packed.grads, sum);
  EXPECT_LE(distance, 1e-11) << name;
}

TEST(Trainer, B07ATokenOfTheFirstDocumentDoesNotTouchLaterOnes) {
  const Documents docs = tiny_documents({13, 7, 40, 1, 3});
  Documents other = docs;
  other.ids = docs.ids.clone();
  other.ids[5] = (docs.ids[5].item<int64_t>() + 1) % 100 + 1;
  for (const char* policy : {"float32", "hf-bf16", "fsdp-fp32-islands"}) {
    TrainerOptions o = options(policy, false);
    // An expert's other rows may change with the token. A BLAS may round a row differently beside
    // more rows, and does on some processors; with fixed tiles there is nothing left to differ.
    o.numerics.set("D63", "fixed-tiles");
    o.numerics.set("D06", "fixed");
    const TrainerResult a = run(docs, o), b = run(other, o);
    EXPECT_FALSE(same_bytes(a.logits.narrow(0, 0, 13), b.logits.narrow(0, 0, 13))) << policy;
    EXPECT_TRUE(same_bytes(a.logits.narrow(0, 13, 51), b.logits.narrow(0, 13, 51))) << policy;
  }
}

TEST(Trainer, B05PaddingHasNoInfluence) {
  const std::vector<int64_t> cu{0, 4, 7};
  const Tensor ids = at::tensor({5, 9, 3, 8, 20, 30, 40, 1, 1, 1}, at::kLong),
               other = at::tensor({5, 9, 3, 8, 20, 30, 40, 77, 0, 6}, at::kLong);
  const TrainerResult a = run(harness::from_row(ids, cu), options("float32")),
                      b = run(harness::from_row(other, cu), options("float32"));
  EXPECT_EQ(a.logits.size(0), 7);
  EXPECT_TRUE(same_bytes(a.logits, b.logits));
  for (const auto& [name, grad] : a.grads) EXPECT_TRUE(same_bytes(grad, b.grads.at(name))) << name;
}

TEST(Trainer, RecomputeGivesBitwiseTheSameGradients) {
  for (const char* policy : {"float32", "hf-bf16", "fsdp-fp32-islands"}) {
    const Documents docs = tiny_documents({40, 0, 1, 21});
    TrainerOptions again = options(policy);
    again.recompute = true;
    const TrainerResult a = run(docs, options(policy)), b = run(docs, again);
    EXPECT_TRUE(same_bytes(a.logits, b.logits)) << policy;
    EXPECT_EQ(a.loss, b.loss) << policy;
    for (const auto& [name, grad] : a.grads)
      EXPECT_TRUE(same_bytes(grad, b.grads.at(name))) << policy << ' ' << name;
  }
}

TEST(Trainer, TwoRunsGiveTheSameBytesOnAnyNumberOfThreads) {
  const Documents docs = tiny_documents({70, 5});
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const TrainerResult one = run(docs, options("float32"));
  at::set_num_threads(2);
  const TrainerResult two = run(docs, options("float32"));
  at::set_num_threads(threads);
  EXPECT_LE(rel_l2(one.logits, two.logits), 1e-6);
  const TrainerResult again = run(docs, options("float32"));
  const TrainerResult third = run(docs, options("float32"));
  EXPECT_TRUE(same_bytes(again.logits, third.logits));
  for (const auto& [name, grad] : again.grads)
    EXPECT_TRUE(same_bytes(grad, third.grads.at(name))) << name;
}

TEST(Trainer, DocumentsWithoutTargetsHaveZeroLossAndGradients) {
  for (const std::vector<int64_t>& lengths : {std::vector<int64_t>{}, {0}, {1}, {1, 0, 1}}) {
    const TrainerResult r = run(tiny_documents(lengths), options("float32"));
    EXPECT_EQ(r.loss, 0);
    EXPECT_EQ(r.num_targets, 0);
    EXPECT_FALSE(r.grads.empty());
    for (const auto& [name, grad] : r.grads) EXPECT_EQ(grad.abs().sum().item<double>(), 0) << name;
    EXPECT_TRUE(r.logprobs.isnan().all().item<bool>());
  }
}

TEST(Trainer, PaddingTokenRowOfTheEmbeddingGetsNoGradientAndFrozenTensorsAreAbsent) {
  const int64_t pad = tiny()->config().pad_token_id.value();
  Documents docs = tiny_documents({20});
  docs.ids[3] = pad;
  const TrainerResult r = run(docs, options("float64"));
  EXPECT_EQ(r.grads.at("model.embed_tokens.weight")[pad].abs().sum().item<double>(), 0);
  EXPECT_GT(r.grads.at("model.embed_tokens.weight").abs().sum().item<double>(), 0);
  for (const auto& [name, grad] : r.grads) {
    EXPECT_EQ(name.find("indexer"), std::string::npos) << name;
    EXPECT_EQ(name.find("e_score_correction_bias"), std::string::npos) << name;
  }
}

TEST(Trainer, GradientsAgreeWithFiniteDifferencesOfTheLoss) {
  // One check that depends on no autograd at all: move the final norm's weight along its gradient.
  const Documents docs = tiny_documents({30, 11});
  const TrainerResult r = run(docs, options("float64"));
  const model::ModelConfig& config = tiny()->config();
  const auto loss_at = [&](double step) {
    std::map<std::string, Tensor> weights;
    for (const std::string& name : tiny()->names())
      weights[name] = tiny()->load(name).to(at::kDouble);
    weights["norm.weight"] = weights["norm.weight"] + step * r.grads.at("model.norm.weight");
    weights["layers.1.self_attn.A_log"] =
        weights["layers.1.self_attn.A_log"] + step * r.grads.at("model.layers.1.self_attn.A_log");
    weights["layers.0.attn_hc.fn"] =
        weights["layers.0.attn_hc.fn"] + step * r.grads.at("model.layers.0.hc_attn_fn");
    return Trainer(model::memory_source(config, weights),
                   options("float64", false),
                   parallel::Mesh::single())
        .run(docs)
        .loss;
  };
  double expected = 0;
  for (const char* name :
       {"model.norm.weight", "model.layers.1.self_attn.A_log", "model.layers.0.hc_attn_fn"}) {
    expected += r.grads.at(name).square().sum().item<double>();
  }
  const double eps = 1e-5;
  const double slope = (loss_at(eps) - loss_at(-eps)) / (2 * eps);
  EXPECT_NEAR(slope / expected, 1, 1e-6);
}

TEST(Trainer, B56CuttingTheStackGivesTheBytesOfOneRun) {
  const model::Numerics num = model::Numerics::policy("fsdp-bf16");
  LeafParameters params(*tiny(), num, false);
  const Documents docs = tiny_documents({30, 0, 9});
  const model::LayerContext ctx{.config = tiny()->config(),
                                .num = num,
                                .packing = docs.packing,
                                .params = params,
                                .seams = model::Seams::local()};
  const at::NoGradGuard no_grad;
  const int64_t layers = tiny()->config().num_hidden_layers;
  Tensor selection;
  const Tensor whole =
      model::run_layers(ctx, 0, layers, model::embed_streams(ctx, docs.ids), selection, {});
  for (int64_t cut = 1; cut < layers; ++cut) {
    Tensor carried;
    const Tensor first =
        model::run_layers(ctx, 0, cut, model::embed_streams(ctx, docs.ids), carried, {});
    EXPECT_TRUE(same_bytes(model::run_layers(ctx, cut, layers, first, carried, {}), whole))
        << "cut before layer " << cut;
  }
}

TEST(Trainer, TraceReturnsNamedActivationsAndTheirGradients) {
  TrainerOptions o = options("float64");
  o.trace = "layers.*.self_attn,layers.2,norm";
  const TrainerResult r = run(tiny_documents({12}), o);
  std::vector<std::string> names;
  for (const auto& [name, value] : r.trace) names.push_back(name);
  EXPECT_EQ(names,
            (std::vector<std::string>{"layers.0.self_attn",
                                      "layers.1.self_attn",
                                      "layers.2.self_attn",
                                      "layers.2",
                                      "layers.3.self_attn",
                                      "norm",
                                      "grad:layers.0.self_attn",
                                      "grad:layers.1.self_attn",
                                      "grad:layers.2.self_attn",
                                      "grad:layers.2",
                                      "grad:layers.3.self_attn",
                                      "grad:norm"}));
  for (const auto& [name, value] : r.trace) {
    EXPECT_EQ(value.size(0), 12) << name;
    EXPECT_GT(value.abs().sum().item<double>(), 0) << name;
  }
}

/// What layers.N.mlp.gate.experts of a run gave, by layer.
std::vector<Tensor> choice_of(const TrainerResult& result) {
  std::vector<Tensor> choice(static_cast<size_t>(tiny()->config().num_hidden_layers));
  for (size_t layer = 0; layer < choice.size(); ++layer) {
    for (const auto& [name, value] : result.trace)
      if (name == fmt::format("layers.{}.mlp.gate.experts", layer)) choice[layer] = value;
  }
  return choice;
}

TrainerOptions replaying(std::string_view policy, std::vector<Tensor> choice) {
  TrainerOptions o = options(policy);
  o.numerics.set("D68", "replay");
  o.replay = std::move(choice);
  o.trace = "*.experts";
  return o;
}

TEST(Trainer, ReplayedExpertsAreTaken) {
  const Documents docs = tiny_documents({40, 0, 1, 21});
  TrainerOptions own = options("hf-bf16");
  own.trace = "*.experts";
  const TrainerResult free = run(docs, own);
  const TrainerResult same = run(docs, replaying("hf-bf16", choice_of(free)));
  EXPECT_TRUE(same_bytes(free.logits, same.logits));
  for (const auto& [name, grad] : free.grads)
    EXPECT_TRUE(same_bytes(grad, same.grads.at(name))) << name;

  // Every choice moved by one expert: the run takes it and gives something else.
  std::vector<Tensor> moved = choice_of(free);
  for (Tensor& experts : moved) {
    if (experts.defined())
      experts = std::get<0>(experts.add(1).remainder(tiny()->config().n_routed_experts).sort(1));
  }
  TrainerOptions again = replaying("hf-bf16", moved);
  const TrainerResult other = run(docs, again);
  const std::vector<Tensor> taken = choice_of(other);
  for (size_t layer = 0; layer < moved.size(); ++layer) {
    ASSERT_EQ(taken[layer].defined(), moved[layer].defined());
    if (!moved[layer].defined()) continue;
    EXPECT_TRUE(same_bytes(taken[layer], moved[layer])) << layer;
  }
  EXPECT_GT(rel_l2(other.logits, free.logits), 1e-2);
  // Backward runs the layers again, with the same experts.
  again.recompute = true;
  const TrainerResult recomputed = run(docs, again);
  for (const auto& [name, grad] : other.grads)
    EXPECT_TRUE(same_bytes(grad, recomputed.grads.at(name))) << name;

  // Micro-batches take their rows one after the other.
  TrainerOptions two = replaying("float64", moved);
  two.trace.clear();
  const std::vector<Documents> parts = {alone(docs, 0), alone(docs, 2), alone(docs, 3)};
  const TrainerResult split = Trainer(tiny(), two, parallel::Mesh::single()).run(parts);
  const TrainerResult whole = run(docs, two);
  EXPECT_LE(rel_l2(split.logits, whole.logits), 1e-13);
  const auto [distance, name] = worst(split.grads, whole.grads);
  EXPECT_LE(distance, 1e-11) << name;
}

TEST(Trainer, AReplayThatDoesNotFitIsRefused) {
  const Documents docs = tiny_documents({12, 5});
  TrainerOptions own = options("float32", false);
  own.trace = "*.experts";
  const std::vector<Tensor> choice = choice_of(run(docs, own));
  EXPECT_THROW((void)run(tiny_documents({12, 6}), replaying("float32", choice)), Error);
  std::vector<Tensor> fewer = choice;
  fewer.pop_back();
  EXPECT_THROW((void)run(docs, replaying("float32", fewer)), Error);
  std::vector<Tensor> hole = choice;
  hole.back() = Tensor();
  EXPECT_THROW((void)run(docs, replaying("float32", hole)), Error);
  EXPECT_THROW((void)run(docs, replaying("float32", {})), Error);
  TrainerOptions unasked = replaying("float32", choice);
  unasked.numerics.set("D68", "own");
  EXPECT_THROW((void)run(docs, unasked), Error);
}

TEST(Trace, GlobMatching) {
  EXPECT_TRUE(harness::matches("*", ""));
  EXPECT_TRUE(harness::matches("layers.*.mlp", "layers.12.mlp"));
  EXPECT_FALSE(harness::matches("layers.*.mlp", "layers.12.mlp.experts"));
  EXPECT_TRUE(harness::matches("a,b?", "bc"));
  EXPECT_FALSE(harness::matches("", "a"));
}

TEST(Trainer, IdsOutsideTheVocabularyAreRefusedByPosition) {
  Documents docs = tiny_documents({5});
  docs.ids[3] = tiny()->config().vocab_size;
  try {
    run(docs, options("float32", false));
    FAIL() << "accepted an id outside the vocabulary";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInput);
    EXPECT_NE(std::string(error.what()).find("3"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace lockstep::tests
