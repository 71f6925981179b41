// Weights brought from the trainer's shards into the inference engine, over all ranks of a job.
#include "harness/sync/weight_sync.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "harness/inference/inference.hpp"
#include "harness/trainer/trainer.hpp"
#include "parallel/comm/ledger.hpp"
#include "tests/rank/world.hpp"
#include "tests/support/compare.hpp"
#include "tests/support/tiny_model.hpp"

namespace lockstep::tests {
namespace {

using harness::consecutive_ranks;
using harness::OfferedTensor;
using harness::SyncReport;
using harness::SyncSides;
using harness::WeightSync;
using model::Topology;
using testing::HasSubstr;

std::shared_ptr<const model::WeightSource> other() {
  static const std::shared_ptr<const model::WeightSource> source =
      model::seeded_source(model::preset_config("tiny"), 8);
  return source;
}

/// A trainer with the weights of `trained`, and an engine with those of tiny(), on some ranks each.
struct Job {
  Job(const Topology& from,
      int64_t tp,
      std::string_view trainer_policy,
      const model::Numerics& engine_numerics,
      bool apart = false,
      int64_t bucket_bytes = 20000,
      bool masters = false,
      const std::shared_ptr<const model::WeightSource>& trained = other())
      : first(apart ? from.num_ranks() : 0), engine_policy(engine_numerics) {
    const model::Numerics trainer_numerics = model::Numerics::policy(trainer_policy);
    const int64_t own = world().rank();
    trains = own < from.num_ranks();
    serves = own >= first && own < first + tp;
    const parallel::Group side = world().split(own < first ? 0 : 1, own, "side");
    // Apart, each side is a group of its own; else both are all ranks.
    trainer_mesh.emplace(apart && !trains ? parallel::Mesh::single()
                                          : parallel::Mesh::create(side, from));
    engine_mesh.emplace(own < first ? parallel::Mesh::single()
                                    : parallel::Mesh::create(side, {.tp = tp}));
    if (trains) {
      harness::TrainerOptions training;
      training.numerics = trainer_numerics;
      if (masters) training.optimizer = parallel::OptimizerOptions{};
      trainer = std::make_unique<harness::Trainer>(trained, training, *trainer_mesh);
    }
    if (serves) {
      options.numerics = engine_numerics;
      options.prefill_chunk = 13;
      options.decode = 6;
      options.trace = "*.mlp.gate.experts";
      engine = std::make_unique<harness::Inference>(tiny(), options, *engine_mesh);
    }
    sync = std::make_unique<WeightSync>(
        world(),
        SyncSides{tiny()->config(),
                  trainer_numerics,
                  engine_numerics,
                  from,
                  {.tp = tp},
                  consecutive_ranks(0, from.num_ranks()),
                  consecutive_ranks(first, tp)},
        harness::SyncOptions{.bucket_bytes = bucket_bytes, .progress = {}});
  }

  [[nodiscard]] std::vector<OfferedTensor> offer() const {
    return trains ? sync->offer(trainer->shards()) : std::vector<OfferedTensor>{};
  }
  SyncReport run(int64_t version,
                 const std::vector<OfferedTensor>& offered,
                 const std::set<std::string>& keep = {}) const {
    return sync->run(version, offered, serves ? &engine->weights() : nullptr, keep);
  }
  /// Undefined on ranks without an engine.
  [[nodiscard]] Tensor served() const { return serves ? engine->run(docs()).logits : Tensor(); }
  /// What an engine that loads `source` itself answers.
  [[nodiscard]] Tensor loaded(const std::shared_ptr<const model::WeightSource>& source) const {
    return serves ? harness::Inference(source, options, *engine_mesh).run(docs()).logits : Tensor();
  }
  static harness::Documents docs() { return tiny_documents({20, 1, 7}); }

  int64_t first;
  model::Numerics engine_policy;
  bool trains = false, serves = false;
  std::optional<parallel::Mesh> trainer_mesh, engine_mesh;
  harness::InferenceOptions options;
  std::unique_ptr<harness::Trainer> trainer;
  std::unique_ptr<harness::Inference> engine;
  std::unique_ptr<WeightSync> sync;
};

struct Layout {
  Topology from;
  int64_t tp;
  bool apart;
  [[nodiscard]] int64_t ranks() const {
    return apart ? from.num_ranks() + tp : std::max(from.num_ranks(), tp);
  }
};

std::vector<Layout> layouts() {
  std::vector<Layout> all;
  for (const Topology& from : {Topology{},
                               Topology{.fsdp = 2},
                               Topology{.fsdp = 3},
                               Topology{.fsdp = 2, .ep = 2},
                               Topology{.cp = 2},
                               Topology{.dp = 2},
                               Topology{.dp = 3},
                               Topology{.fsdp = 2, .cp = 2, .ep = 2},
                               Topology{.fsdp = 2, .tp = 2},
                               Topology{.fsdp = 4, .ep = 4},
                               Topology{.dp = 2, .fsdp = 3, .ep = 3}}) {
    for (const int64_t tp : {1, 2, 4}) {
      for (const bool apart : {false, true}) all.push_back({from, tp, apart});
    }
  }
  // Each number of ranks takes those that need it.
  std::erase_if(all, [](const Layout& layout) { return layout.ranks() != world().size(); });
  return all;
}

TEST(WeightSync, ServesTheBytesOfTheTrainersCheckpointFromAnyTopologyToAnyTp) {
  for (const Layout& layout : layouts()) {
    SCOPED_TRACE(fmt::format("{} to tp {}{}",
                             model::to_string(layout.from),
                             layout.tp,
                             layout.apart ? ", other ranks" : ""));
    const Job job(
        layout.from, layout.tp, "float64", model::Numerics::policy("float64"), layout.apart);
    const SyncReport report = job.run(2, job.offer());
    if (job.serves) {
      EXPECT_EQ(job.engine->weights().version(), 2);
      EXPECT_THAT(job.engine->weights().stale(), testing::IsEmpty());
      EXPECT_TRUE(same_bytes(job.served(), job.loaded(other())));
    }
    // Every part arrives once, and no rank holds much more than a bucket at a time.
    EXPECT_EQ(report.bytes_received + (job.serves ? report.bytes_copied : 0),
              job.sync->plan().part_bytes(world().rank()));
    EXPECT_LE(report.peak_buffer_bytes, 2 * 20000);
    EXPECT_GT(report.buckets, 10);
  }
}

/// Of the group of weight syncs, so far.
parallel::LedgerTotals in_ledger() {
  for (const parallel::LedgerTotals& totals : parallel::ledger_totals())
    if (totals.group == "weight sync") return totals;
  return {};
}

TEST(WeightSync, BytesOfEveryTopologyAndTpAreThoseOfThePlanAndOfTheLedger) {
  const int64_t n = world().size();
  for (const Layout& layout : layouts()) {
    for (const char* policy : {"float64", "vllm-bf16"}) {
      SCOPED_TRACE(fmt::format("{} to {} of tp {}{}",
                               model::to_string(layout.from),
                               policy,
                               layout.tp,
                               layout.apart ? ", other ranks" : ""));
      const bool bf16 = std::string_view(policy) == "vllm-bf16";
      const Job job(layout.from,
                    layout.tp,
                    bf16 ? "fsdp-fp32-islands" : "float64",
                    model::Numerics::policy(policy),
                    layout.apart);
      const harness::TransferPlan& plan = job.sync->plan();
      const parallel::LedgerTotals before = in_ledger();
      const SyncReport report = job.run(2, job.offer());
      const parallel::LedgerTotals after = in_ledger();
      // Every rank's statement reaches all others: of all of them each receives all but its own.
      int64_t statements = 0;
      for (const int64_t bytes : world().all_gather(report.agreement_bytes, "statements"))
        statements += bytes;
      const int64_t own = n == 1 ? 0 : statements / (n - 1) - report.agreement_bytes;
      // Besides them and the weights: the lengths of the statements, and a barrier.
      EXPECT_EQ(after.bytes_sent - before.bytes_sent,
                plan.bytes_sent(world().rank()) + (n - 1) * (own + 8));
      EXPECT_EQ(after.bytes_received - before.bytes_received,
                plan.bytes_received(world().rank()) + report.agreement_bytes + (n - 1) * 8);
      EXPECT_EQ(after.calls - before.calls,
                n == 1 ? 0 : static_cast<int64_t>(plan.buckets().size()) + 3);
      EXPECT_EQ(report.bytes_received + (job.serves ? report.bytes_copied : 0),
                plan.part_bytes(world().rank()));
    }
  }
}

TEST(WeightSync, KeepsTheDtypesThatTheRulesName) {
  const int64_t tp = std::min<int64_t>(world().size(), 2);
  for (const char* policy : {"vllm-bf16", "vllm-fp8", "invariant-bf16"}) {
    const model::Numerics engine = model::Numerics::policy(policy);
    const bool fp8 = std::string_view(policy) == "vllm-fp8";
    const bool invariant = engine.invariant();
    const Job job(Topology{.fsdp = world().size()},
                  fp8 ? 1 : tp,
                  "fsdp-fp32-islands",
                  engine,
                  false,
                  1 << 14,
                  /*masters=*/true);
    // float32 masters between two bfloat16 numbers.
    std::vector<OfferedTensor> offered = job.offer();
    for (OfferedTensor& tensor : offered) {
      if (tensor.rows.scalar_type() == at::kFloat) tensor.rows = tensor.rows * (1 + 1.0 / 512);
    }
    job.run(2, offered);
    std::map<std::string, Tensor> weights;
    for (size_t i = 0; i < offered.size(); ++i) {
      const parallel::Shard& shard = job.trainer->shards().shards()[i];
      weights[shard.spec.name] = job.trainer->shards().gather(shard, offered[i].rows);
    }
    if (!job.serves) continue;
    for (auto& [name, value] : weights) {
      const auto has = [&, n = std::string_view(name)](std::string_view part) {
        return n.find(part) != std::string_view::npos;
      };
      // SPEC: these keep float32 on the way, all else is rounded once.
      const bool fp32 = has("_hc.") || has("A_log") || has("dt_bias") || has("e_score_correction");
      if (!invariant && !fp32) value = value.to(at::kBFloat16);
    }
    const std::shared_ptr<const model::WeightSource> source =
        model::memory_source(tiny()->config(), weights);
    EXPECT_TRUE(same_bytes(job.served(), job.loaded(source))) << policy;
    // FP8 codes and scales are made by the engine.
    EXPECT_THAT(job.engine->weights().stale(), testing::IsEmpty()) << policy;
    EXPECT_EQ(job.engine->weights().holds("layers.3.mlp.experts.w13.scale"), fp8);
  }
}

TEST(WeightSync, B13TheRouterBiasArrivesAsItIsAndDecidesAsInTheTrainer) {
  // Experts 4 and 5 have equal scores; 9 and 10 always come before them, all others after.
  const std::string gate = "layers.1.mlp.gate.";
  std::map<std::string, Tensor> weights;
  for (const std::string& name : other()->names()) weights[name] = other()->load(name).clone();
  Tensor& router = weights.at(gate + "weight");
  router[5].copy_(router[4]);
  Tensor bias = at::full({12}, -2.0, at::kFloat);
  bias[4] = 0.5;
  bias[5] = 0.5 + 1.0 / 1024;  // 0.5 in bfloat16, and then expert 4 has the lower number
  bias[9] = bias[10] = 3.0;
  weights[gate + "e_score_correction_bias"] = bias;
  const std::shared_ptr<const model::WeightSource> source =
      model::memory_source(tiny()->config(), weights);
  const Job job(Topology{.fsdp = world().size()},
                std::min<int64_t>(world().size(), 2),
                "fsdp-fp32-islands",
                model::Numerics::policy("vllm-bf16"),
                false,
                20000,
                false,
                source);
  job.run(2, job.offer());
  const harness::Documents docs = tiny_documents({256});
  const auto experts = [&](const auto& trace) {
    for (const auto& [name, value] : trace)
      if (name == gate + "experts") return std::get<0>(value.sort(1));
    return Tensor();
  };
  harness::TrainerOptions training;
  training.numerics = model::Numerics::policy("fsdp-fp32-islands");
  training.trace = "*.mlp.gate.experts";
  const Tensor want =
      experts(harness::Trainer(source, training, parallel::Mesh::single()).run(docs).trace);
  EXPECT_TRUE(same_bytes(want, at::tensor({5, 9, 10}, want.options()).expand({256, 3})));
  if (!job.serves) return;
  EXPECT_TRUE(same_bytes(job.engine->weights().at(gate + "e_score_correction_bias"), bias));
  EXPECT_TRUE(same_bytes(experts(job.engine->run(docs).trace), want));
}

/// The message of the error that run() throws.
std::string refusal(const Job& job, int64_t version, const std::vector<OfferedTensor>& offered) {
  try {
    job.run(version, offered);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInput) << error.what();
    return error.what();
  }
  return "accepted";
}

TEST(WeightSync, RefusesOnEveryRankWithTheWholeListAndServesTheOldWeightsOn) {
  const int64_t n = world().size();
  const Job job(
      Topology{.fsdp = n}, std::min<int64_t>(n, 2), "float64", model::Numerics::policy("float64"));
  const Tensor before = job.served();
  // The last rank offers something else than planned.
  const bool wrong = world().rank() == n - 1;
  const std::vector<OfferedTensor> good = job.offer();
  std::vector<OfferedTensor> bad = good;
  const auto find = [&](const std::string& name) {
    return std::find_if(bad.begin(), bad.end(), [&](const auto& t) { return t.name == name; });
  };
  if (wrong) {
    bad.erase(find("layers.0.mlp.down_proj.weight"));
    bad.push_back({"layers.9.extra", at::kDouble, at::ones({3}, at::kDouble)});
    find("norm.weight")->wire = at::kFloat;
    OfferedTensor& shape = *find("layers.0.self_attn.o_proj.weight");
    shape.rows = shape.rows.narrow(1, 0, 5);
  }
  const std::string who = fmt::format("rank {}: ", n - 1);
  const std::string text = refusal(job, 2, bad);
  for (const std::string part : {"offers no layers.0.mlp.down_proj.weight",
                                 "offers layers.9.extra, which the model lacks",
                                 "norm.weight comes as Float instead of Double",
                                 "layers.0.self_attn.o_proj.weight has shape ["})
    EXPECT_THAT(text, HasSubstr(who + part));
  EXPECT_THAT(text, HasSubstr("version 2 refused, version 1 serves on"));
  if (n > 1) {
    EXPECT_THAT(refusal(job, wrong ? 3 : 2, good),
                HasSubstr(who + "offers version 3, another rank 2"));
  }
  EXPECT_THAT(refusal(job, 1, good), HasSubstr("rank 0: serves version 1, not below 1"));
  EXPECT_THAT(refusal(job, 2, wrong ? std::vector<OfferedTensor>{} : good), HasSubstr(who));
  if (job.serves) {
    EXPECT_EQ(job.engine->weights().version(), 1);
    EXPECT_TRUE(same_bytes(job.served(), before));
  }
  // And the good one is taken.
  job.run(2, good);
  if (job.serves) {
    EXPECT_FALSE(same_bytes(job.served(), before));
  }
}

TEST(WeightSync, ACopyThatIsNotRefreshedIsNamedByEveryRankAtTheNextForward) {
  const int64_t n = world().size();
  const std::string conv = "layers.0.self_attn.conv1d",
                    head = "layers.3.self_attn.indexer.head_weights",
                    absorbed = "layers.3.self_attn.w_k";
  model::Numerics num = model::Numerics::policy("vllm-bf16");
  const Job job(Topology{.fsdp = n}, std::min<int64_t>(n, 2), "fsdp-fp32-islands", num);
  int64_t version = 1;
  for (const std::string& name : {conv, head, absorbed}) {
    std::vector<OfferedTensor> changed = job.offer();
    for (OfferedTensor& tensor : changed) tensor.rows = tensor.rows * static_cast<double>(version);
    // One rank of the engine alone forgets it.
    job.run(++version, changed, world().rank() == 0 ? std::set{name} : std::set<std::string>{});
    if (!job.serves) continue;
    for (int again = 0; again < 2; ++again) {
      try {
        (void)job.served();
        ADD_FAILURE() << name << " was not missed";
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kInternal);
        EXPECT_THAT(error.what(), HasSubstr("weights of rank 0"));
        if (world().rank() == 0) {
          EXPECT_THAT(error.what(), HasSubstr(name));
          EXPECT_THAT(error.what(), HasSubstr(fmt::format("last made of version {}", version - 1)));
        }
      }
    }
  }
  job.run(++version, job.offer());
  EXPECT_NO_THROW((void)job.served());
}

TEST(WeightSync, APolicyThatShipsAStaleCopyIsServed) {
  model::Numerics num = model::Numerics::policy("vllm-bf16");
  num.set("merged_conv", "stale");
  const Job job(Topology{.fsdp = world().size()}, 1, "fsdp-fp32-islands", num);
  job.run(2, job.offer());
  if (job.serves) {
    EXPECT_FALSE(same_bytes(job.served(), job.loaded(other())));
  }
}

}  // namespace
}  // namespace lockstep::tests
