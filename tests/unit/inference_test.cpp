// The inference engine against the trainer: whole prefill, chunks, decode, any page size, any order
// of pages, documents together and alone.
#include "harness/inference/inference.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "golden/store/golden_case.hpp"
#include "harness/launch/workload.hpp"
#include "harness/trainer/trainer.hpp"
#include "model/config/config_json.hpp"
#include "tests/support/compare.hpp"
#include "tests/support/tiny_model.hpp"

namespace lockstep::tests {
namespace {

using harness::Documents;
using harness::Inference;
using harness::InferenceOptions;
using harness::InferenceResult;

harness::TrainerResult trained(std::shared_ptr<const model::WeightSource> source,
                               const Documents& docs,
                               const model::Numerics& num,
                               const std::string& trace = "") {
  harness::TrainerOptions o;
  o.numerics = num;
  o.trace = trace;
  return harness::Trainer(std::move(source), o, parallel::Mesh::single()).run(docs);
}

InferenceResult served(std::shared_ptr<const model::WeightSource> source,
                       const Documents& docs,
                       InferenceOptions options) {
  return Inference(std::move(source), std::move(options), parallel::Mesh::single()).run(docs);
}

struct Way {
  int64_t prefill_chunk, decode, page_size;
  uint64_t shuffle;
  [[nodiscard]] InferenceOptions options(const model::Numerics& num) const {
    InferenceOptions o;
    o.numerics = num;
    o.page_size = page_size;
    o.prefill_chunk = prefill_chunk;
    o.decode = decode;
    o.shuffle_pages = shuffle;
    return o;
  }
  [[nodiscard]] std::string text() const {
    return fmt::format(
        "chunk {} decode {} page {} shuffle {}", prefill_chunk, decode, page_size, shuffle);
  }
};

const std::vector<Way>& ways() {
  static const std::vector<Way> all = {{0, 0, 64, 0},
                                       {1, 0, 16, 3},
                                       {7, 0, 1, 5},
                                       {64, 0, 16, 0},
                                       {0, 20, 64, 9},
                                       {7, 20, 16, 4},
                                       {0, 1000, 3, 2}};
  return all;
}

TEST(Inference, EqualsTheTrainerOnEveryGoldenCase) {
  const std::filesystem::path data = std::filesystem::path(LOCKSTEP_SOURCE_DIR) / "golden" / "data";
  const model::Numerics num = model::Numerics::policy("float64");
  for (const char* name : {"tiny",
                           "clamps",
                           "deep",
                           "groups",
                           "kpool1",
                           "kpool16",
                           "one_dsa",
                           "one_kda",
                           "packing",
                           "shared",
                           "shared_carry",
                           "softplus",
                           "sparse",
                           "streams1_conv5",
                           "streams2_conv2",
                           "streams3_conv3"}) {
    const harness::Workload work = harness::golden_workload(golden::open_golden(data, name));
    const harness::TrainerResult want = trained(work.source, work.documents, num);
    for (const Way& way : ways()) {
      const InferenceResult got = served(work.source, work.documents, way.options(num));
      EXPECT_LE(rel_l2(got.logits, want.logits), 1e-10) << name << ' ' << way.text();
      EXPECT_LE(rel_l2(got.logprobs, want.logprobs), 1e-10) << name << ' ' << way.text();
      EXPECT_NEAR(got.loss, want.loss, 1e-10) << name << ' ' << way.text();
      EXPECT_EQ(got.num_targets, want.num_targets);
    }
  }
}

TEST(Inference, AwkwardLengthsAroundPoolsChunksAndPages) {
  const Documents docs =
      tiny_documents({0, 1, 2, 3, 4, 5, 8, 15, 16, 17, 0, 27, 28, 29, 63, 64, 65, 129});
  for (const char* policy : {"float64", "float32"}) {
    const model::Numerics num = model::Numerics::policy(policy);
    const harness::TrainerResult want = trained(tiny(), docs, num);
    for (const Way& way : ways()) {
      const InferenceResult got = served(tiny(), docs, way.options(num));
      EXPECT_LE(rel_l2(got.logits, want.logits), num.act() == at::kDouble ? 1e-11 : 2e-5)
          << policy << ' ' << way.text();
    }
  }
}

TEST(Inference, B48SelectionsDoNotDependOnHowARequestIsCut) {
  const Documents docs = tiny_documents({60, 33, 141});
  const model::Numerics num = model::Numerics::policy("float64");
  const harness::TrainerResult want = trained(tiny(), docs, num, "*");
  for (const Way& way : ways()) {
    InferenceOptions o = way.options(num);
    o.trace = "*";
    const InferenceResult got = served(tiny(), docs, o);
    ASSERT_EQ(got.trace.size(), want.trace.size());
    for (size_t i = 0; i < got.trace.size(); ++i) {
      EXPECT_EQ(got.trace[i].first, want.trace[i].first);
      if (got.trace[i].second.is_floating_point()) {
        EXPECT_LE(rel_l2(got.trace[i].second, want.trace[i].second), 1e-11)
            << way.text() << ' ' << got.trace[i].first;
      } else {
        EXPECT_TRUE(same_bytes(got.trace[i].second, want.trace[i].second))
            << way.text() << ' ' << got.trace[i].first;
      }
    }
  }
}

TEST(Inference, PageSizeAndOrderOfPagesChangeNoByte) {
  const Documents docs = tiny_documents({75, 1, 7, 50, 130});
  const model::Numerics num = model::Numerics::policy("float32");
  const InferenceResult want = served(tiny(), docs, Way{7, 10, 64, 0}.options(num));
  for (const auto& [page, shuffle] :
       {std::pair<int64_t, uint64_t>{1, 0}, {1, 8}, {5, 1}, {16, 2}, {64, 3}, {1000, 4}}) {
    const InferenceResult got = served(tiny(), docs, Way{7, 10, page, shuffle}.options(num));
    EXPECT_TRUE(same_bytes(got.logits, want.logits)) << page << ' ' << shuffle;
  }
}

TEST(Inference, TogetherEqualsEachAlone) {
  const Documents docs = tiny_documents({13, 7, 40, 1, 3, 0, 66});
  const model::Numerics num = model::Numerics::policy("invariant-f32");
  for (const Way& way : {Way{0, 0, 16, 0}, Way{7, 0, 16, 1}, Way{7, 9, 16, 1}}) {
    const InferenceResult together = served(tiny(), docs, way.options(num));
    for (const Segment& s : docs.packing.segments()) {
      if (s.length() == 0) continue;
      const Documents one =
          harness::from_row(docs.ids.narrow(0, s.begin, s.length()).clone(), {0, s.length()});
      const InferenceResult alone = served(tiny(), one, way.options(num));
      EXPECT_TRUE(same_bytes(together.logits.narrow(0, s.begin, s.length()), alone.logits))
          << way.text() << " document " << s.document;
    }
  }
}

TEST(Inference, InTheInvariantPoliciesEveryWayGivesTheTrainersBytes) {
  const Documents docs = tiny_documents({75, 1, 7, 50, 0, 130});
  for (const char* policy : {"invariant-f32", "invariant-bf16"}) {
    const model::Numerics num = model::Numerics::policy(policy);
    const harness::TrainerResult want = trained(tiny(), docs, num);
    for (const Way& way : ways()) {
      const InferenceResult got = served(tiny(), docs, way.options(num));
      EXPECT_TRUE(same_bytes(got.logits, want.logits))
          << policy << ' ' << way.text() << " rel_l2 " << rel_l2(got.logits, want.logits);
      EXPECT_TRUE(same_bytes(got.logprobs, want.logprobs)) << policy << ' ' << way.text();
    }
  }
}

TEST(Inference, Bfloat16PoliciesStayNearTheTrainer) {
  const Documents docs = tiny_documents({75, 1, 7, 50});
  for (const char* policy : {"fsdp-bf16", "fsdp-fp32-islands", "hf-bf16"}) {
    const model::Numerics num = model::Numerics::policy(policy);
    const harness::TrainerResult want = trained(tiny(), docs, num);
    for (const Way& way : {Way{0, 0, 16, 0}, Way{7, 9, 16, 1}}) {
      const InferenceResult got = served(tiny(), docs, way.options(num));
      EXPECT_LE(rel_l2(got.logits, want.logits), 0.1) << policy << ' ' << way.text();
    }
  }
}

TEST(Inference, VllmBf16StaysWithinBfloat16NoiseOfTheTruth) {
  const Documents docs = tiny_documents({75, 1, 7, 50});
  const Tensor truth =
      trained(tiny(), docs, model::Numerics::policy("float64")).logits.to(at::kDouble);
  const double noise =
      rel_l2(trained(tiny(), docs, model::Numerics::policy("fsdp-fp32-islands")).logits, truth);
  const model::Numerics num = model::Numerics::policy("vllm-bf16");
  for (const Way& way : {Way{0, 0, 16, 0}, Way{8, 0, 16, 1}, Way{0, 12, 16, 1}}) {
    const InferenceResult got = served(tiny(), docs, way.options(num));
    EXPECT_LE(rel_l2(got.logits, truth), 3 * noise) << way.text();
    EXPECT_GT(rel_l2(got.logits, truth), 0) << way.text();
  }
}

TEST(Inference, VllmFp8ChangesExpertsAndMlpsAlone) {
  const Documents docs = tiny_documents({40, 7});
  const auto run = [&](std::string_view policy) {
    InferenceOptions o = Way{0, 0, 16, 0}.options(model::Numerics::policy(policy));
    o.trace = "layers.0.self_attn,layers.0.post_attention_layernorm,layers.0.mlp,layers.1.mlp";
    return served(tiny(), docs, o);
  };
  const InferenceResult a = run("vllm-bf16"), b = run("vllm-fp8");
  ASSERT_EQ(b.trace.size(), 4U);
  EXPECT_TRUE(same_bytes(b.trace[1].second, a.trace[1].second));
  const double mlp = rel_l2(b.trace[2].second, a.trace[2].second);
  EXPECT_GT(mlp, 5e-3);
  EXPECT_LE(mlp, 0.1);
  EXPECT_LE(rel_l2(b.trace[3].second, a.trace[3].second), 0.3);
  EXPECT_THROW(trained(tiny(), docs, model::Numerics::policy("vllm-fp8")), Error);
  // In float32 nothing is rounded.
  model::Numerics plain = model::Numerics::policy("float32"), fp8 = plain;
  fp8.set("expert_gemm", "fp8");
  EXPECT_TRUE(same_bytes(served(tiny(), docs, Way{0, 0, 16, 0}.options(fp8)).logits,
                         served(tiny(), docs, Way{0, 0, 16, 0}.options(plain)).logits));
}

TEST(Inference, ChunksThatCutAPoolLoseItOnlyWhereThePolicySaysSo) {
  const Documents docs = tiny_documents({90});
  model::Numerics ring = model::Numerics::policy("float64"), dropped = ring;
  dropped.set("prefill_pool", "dropped");
  const auto logits = [&](const model::Numerics& num, int64_t chunk) {
    return served(tiny(), docs, Way{chunk, 0, 16, 0}.options(num)).logits;
  };
  const Tensor want = logits(ring, 0);
  EXPECT_LE(rel_l2(logits(ring, 7), want), 1e-11);
  EXPECT_LE(rel_l2(logits(dropped, 8), want), 1e-11);
  EXPECT_GT(rel_l2(logits(dropped, 7), want), 1e-6);
}

TEST(Inference, TheShippedFaultsOfCopiesAreSwitches) {
  model::Numerics num = model::Numerics::policy("vllm-bf16");
  const auto stale_after_update = [&] {
    Inference engine(tiny(), Way{0, 0, 16, 0}.options(num), parallel::Mesh::single());
    engine.update(model::seeded_source(model::preset_config("tiny"), 8));
    return engine.weights().stale();
  };
  EXPECT_THAT(stale_after_update(), testing::IsEmpty());
  num.set("merged_conv", "stale");
  EXPECT_THAT(
      stale_after_update(),
      testing::ElementsAre(
          "layers.0.self_attn.conv1d", "layers.1.self_attn.conv1d", "layers.2.self_attn.conv1d"));
  num.set("merged_conv", "live");
  num.set("derived_weights", "stale");
  EXPECT_THAT(stale_after_update(),
              testing::ElementsAre("layers.3.self_attn.indexer.head_weights"));
}

TEST(Inference, NothingIsReadFromASlotOrPageOfAnEarlierRequest) {
  const model::Numerics num = model::Numerics::policy("float32");
  InferenceOptions options = Way{0, 0, 4, 0}.options(num);
  Inference engine(tiny(), options, parallel::Mesh::single());
  const int64_t kpool = engine.config().index_kpool;
  harness::Caches caches = engine.make_caches(harness::cache_sizes(4, kpool, {40}));
  const auto logits_of = [&](uint64_t seed) {
    harness::Sequence sequence;
    EXPECT_TRUE(caches.reserve(sequence, 37));
    const Tensor ids = harness::random_documents({37}, engine.config().vocab_size, 0, seed).ids;
    std::vector<int64_t> tokens(ids.const_data_ptr<int64_t>(), ids.const_data_ptr<int64_t>() + 37);
    std::vector<Tensor> out;
    for (const auto& [begin, end] : {std::pair{0, 1}, {1, 6}, {6, 36}, {36, 37}}) {
      out.push_back(engine.logits(
          engine.step(caches,
                      harness::Batch({{.sequence = &sequence,
                                       .ids = {tokens.begin() + begin, tokens.begin() + end},
                                       .decode = end - begin == 1}},
                                     kpool))));
    }
    caches.release(sequence);
    return at::cat(out);
  };
  const Tensor first = logits_of(1);
  logits_of(2);
  EXPECT_TRUE(same_bytes(logits_of(1), first));
  EXPECT_EQ(caches.pages().free(), caches.pages().count());
  EXPECT_EQ(caches.index_pages().free(), caches.index_pages().count());
  EXPECT_EQ(caches.slots().free(), caches.slots().count());
}

TEST(Inference, B24MemoryThatNobodyWroteHasNoInfluence) {
  const std::vector<int64_t> lengths{1, 3, 4, 5, 60};
  const Tensor ids = tiny_documents(lengths).ids;
  const auto* tokens = ids.const_data_ptr<int64_t>();
  for (const char* policy : {"float32", "vllm-bf16", "hf-bf16", "fsdp-bf16"}) {
    Inference model(
        tiny(), Way{0, 0, 4, 0}.options(model::Numerics::policy(policy)), parallel::Mesh::single());
    const auto run = [&](double fill) {
      harness::CacheSizes sizes = harness::cache_sizes(4, model.config().index_kpool, lengths);
      sizes.shuffle = 3;
      harness::Caches caches = model.make_caches(sizes);
      for (size_t layer = 0; layer < model.config().mixers.size(); ++layer) {
        const auto l = static_cast<int64_t>(layer);
        const auto& kda = caches.kda(l);
        const auto& dsa = caches.dsa(l);
        for (const Tensor* t : {&kda.conv,
                                &kda.state,
                                &kda.boundary,
                                &kda.open,
                                &dsa.latent,
                                &dsa.index,
                                &dsa.ring}) {
          if (!t->defined()) continue;
          t->scalar_type() == at::kByte ? t->fill_(fill == 0 ? 0 : 0x7f) : t->fill_(fill);
        }
      }
      std::vector<harness::Sequence> sequences(lengths.size());
      std::vector<Tensor> out;
      // A chunk of up to 30 tokens, then what is left by decoding.
      for (int64_t step = 0; step < 31; ++step) {
        std::vector<harness::BatchItem> items;
        int64_t first = 0;
        for (size_t i = 0; i < lengths.size(); first += lengths[i++]) {
          const int64_t done = sequences[i].length;
          if (done == lengths[i]) continue;
          EXPECT_TRUE(caches.reserve(sequences[i], lengths[i]));
          const int64_t end = step == 0 ? std::min<int64_t>(30, lengths[i]) : done + 1;
          items.push_back({.sequence = &sequences[i],
                           .ids = {tokens + first + done, tokens + first + end},
                           .decode = step > 0});
        }
        if (items.empty()) break;
        out.push_back(model.logits(
            model.step(caches, harness::Batch(std::move(items), model.config().index_kpool))));
      }
      return at::cat(out);
    };
    const Tensor clean = run(0);
    EXPECT_TRUE(clean.isfinite().all().item<bool>()) << policy;
    EXPECT_TRUE(same_bytes(run(1e30), clean)) << policy;
    EXPECT_TRUE(same_bytes(run(std::numeric_limits<double>::quiet_NaN()), clean)) << policy;
  }
}

TEST(Inference, EveryTensorFollowsAnUpdateAndAStaleOneIsNamed) {
  const Documents docs = tiny_documents({30, 9});
  const model::Numerics num = model::Numerics::policy("float32");
  const std::shared_ptr<const model::WeightSource> other =
      model::seeded_source(model::preset_config("tiny"), 8);
  Inference engine(tiny(), Way{7, 5, 16, 0}.options(num), parallel::Mesh::single());
  EXPECT_THAT(engine.weights().stale(), testing::IsEmpty());
  const InferenceResult before = engine.run(docs);
  engine.update(other);
  EXPECT_EQ(engine.weights().version(), 2);
  EXPECT_THAT(engine.weights().stale(), testing::IsEmpty());
  EXPECT_TRUE(same_bytes(engine.run(docs).logits,
                         served(other, docs, Way{7, 5, 16, 0}.options(num)).logits));
  engine.update(tiny());
  EXPECT_TRUE(same_bytes(engine.run(docs).logits, before.logits));
  for (const harness::EngineTensor& tensor : engine.weights().tensors()) {
    if (!tensor.derived) continue;
    engine.update(other, {tensor.name});
    EXPECT_THAT(engine.weights().stale(), testing::ElementsAre(tensor.name));
    engine.update(tiny());
  }
}

TEST(Inference, B15TheWideCopyOfTheHeadFollowsEveryUpdate) {
  const Documents docs = tiny_documents({30, 9});
  model::Numerics num = model::Numerics::policy("vllm-bf16");
  num.set("head_output", "fp32");
  const InferenceOptions options = Way{7, 5, 16, 0}.options(num);
  for (const bool tied : {false, true}) {
    model::ModelConfig config = model::preset_config("tiny");
    config.tie_word_embeddings = tied;
    const auto weights = [&](uint64_t seed) {
      return std::shared_ptr<const model::WeightSource>(model::seeded_source(config, seed));
    };
    Inference engine(weights(7), options, parallel::Mesh::single());
    const harness::EngineWeights& held = engine.weights();
    EXPECT_EQ(held.at("lm_head").scalar_type(), at::kFloat);
    EXPECT_EQ(held.at("embed_tokens").scalar_type(), at::kBFloat16);
    const void* const storage = held.at("lm_head").const_data_ptr();
    Tensor last = engine.run(docs).logits;
    for (const uint64_t seed : {8, 9}) {
      engine.update(weights(seed));
      const Tensor got = engine.run(docs).logits;
      EXPECT_TRUE(same_bytes(got, served(weights(seed), docs, options).logits)) << tied << seed;
      EXPECT_FALSE(same_bytes(got, last)) << tied << seed;
      last = got;
    }
    EXPECT_EQ(held.at("lm_head").const_data_ptr(), storage) << "a forward may hold the old one";
    // The parameter arrives, the copy is forgotten.
    engine.update(weights(7), {"lm_head"});
    EXPECT_THAT(held.stale(), testing::ElementsAre("lm_head"));
    EXPECT_THROW(engine.run(docs), Error);
  }
}

TEST(Inference, RefusesWhatItCannotRun) {
  InferenceOptions o;
  o.page_size = 0;
  EXPECT_THROW(Inference(tiny(), o, parallel::Mesh::single()), Error);
}

}  // namespace
}  // namespace lockstep::tests
