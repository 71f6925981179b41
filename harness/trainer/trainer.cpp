#include "harness/trainer/trainer.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <span>

#include "harness/engine/finite_source.hpp"
#include "harness/engine/memory.hpp"
#include "harness/engine/trace.hpp"
#include "harness/trainer/dtype_audit.hpp"
#include "harness/trainer/parameters.hpp"
#include "harness/trainer/router_load.hpp"
#include "model/base/op_timer.hpp"
#include "model/base/tensor_memory.hpp"
#include "model/layers/decoder.hpp"
#include "model/layers/unit.hpp"
#include "model/ops/head.hpp"
#include "parallel/plan/placement.hpp"
#include "parallel/plan/plan.hpp"

namespace lockstep::harness {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

int64_t num_targets(const Documents& documents) {
  return documents.labels().ge(0).sum().item<int64_t>();
}

/// Mean loss over the targets of all micro-batches and ranks, in float64: one number, whose last
/// digits rounding to float32 would hide. Exact in the invariant policies.
class MeanLoss {
 public:
  MeanLoss(const model::Numerics& num, const parallel::Mesh& mesh, int64_t targets)
      : mesh_(mesh), targets_(static_cast<double>(std::max<int64_t>(targets, 1))) {
    if (num.invariant()) sum_ = ExactSum({1}, "loss");
  }

  /// This rank's log-probabilities of a micro-batch. Collective.
  void add(const Tensor& logprobs) {
    if (sum_.defined()) return add_exactly(logprobs);
    Tensor share = at::full({1}, -logprobs.sum(at::kDouble).item<double>() / targets_, at::kDouble);
    mesh_.tokens().all_reduce_sum(share, "loss");
    mean_ += share.item<double>();
  }

  /// Collective, once.
  double value() {
    if (!sum_.defined()) return mean_;
    Tensor pairs = sum_.pairs();
    mesh_.tokens().all_reduce_sum(pairs, "loss");
    return -pairs.sum().item<double>() / double{kScale} / targets_;
  }

 private:
  /// The sum of 2^28 log-probabilities exceeds what that of gradients may.
  static constexpr float kScale = 1.0F / 4096;

  void add_exactly(const Tensor& logprobs) {
    const Tensor scaled = (logprobs * kScale).contiguous();
    const auto* p = static_cast<const float*>(scaled.const_data_ptr());
    float peak = 0;
    for (int64_t t = 0; t < scaled.numel(); ++t)
      peak = std::max(peak, exact_add(1, p + t, sum_.high(), sum_.low()));
    sum_.note(scaled.numel(), peak);
  }

  const parallel::Mesh& mesh_;
  double targets_;
  double mean_ = 0;
  ExactSum sum_;
};

}  // namespace

struct Trainer::Impl {
  Impl(std::shared_ptr<const model::WeightSource> source_in,
       TrainerOptions options_in,
       const parallel::Mesh& mesh_in)
      : source(std::make_shared<FiniteSource>(std::move(source_in), &non_finite)),
        options(std::move(options_in)),
        mesh(mesh_in),
        config(source->config()),
        audit(config, options.numerics) {
    LOCKSTEP_CHECK(
        !(options.stream_layers && (options.grads || options.optimizer)),
        kConfig,
        "trainer: weights streamed from disk have no gradients; drop --grads or --stream-layers");
    LOCKSTEP_CHECK(!options.numerics.rounds<model::Switch::kExpertGemm>("fp8"),
                   kConfig,
                   "trainer: experts in FP8 (D57) are the inference engine's; set D57 = bf16");
    LOCKSTEP_CHECK(!(options.reference_ops && options.grads && options.numerics.invariant()),
                   kConfig,
                   "trainer: the reference operators have no exact gradients; use a policy that is "
                   "not invariant instead of {}",
                   options.numerics.name());
    LOCKSTEP_CHECK(!options.numerics.invariant() || mesh.tp().size() == 1 ||
                       !(options.grads || options.optimizer),
                   kConfig,
                   "trainer: tensor parallelism has no exact gradients; with policy {} use tp = 1 "
                   "instead of {}",
                   options.numerics.name(),
                   mesh.tp().size());
    const bool on_cpu = options.device.is_cpu();
    LOCKSTEP_CHECK(on_cpu || mesh.all().size() == 1,
                   kConfig,
                   "trainer: a CUDA device serves one rank, the topology has {}; use one of them",
                   mesh.all().size());
    LOCKSTEP_CHECK(on_cpu || !options.numerics.is<model::Switch::kGemmRows>("fixed-tiles"),
                   kConfig,
                   "trainer: products over fixed tiles (D63, policy {}) and exact sums are formed "
                   "on the CPU; use device cpu, or a policy that is not invariant",
                   options.numerics.name());
    LOCKSTEP_CHECK(on_cpu || !options.optimizer,
                   kConfig,
                   "trainer: the optimizer steps on the CPU; use device cpu for training steps");
    audit.load(*source);
    if (options.stream_layers) {
      LOCKSTEP_CHECK(mesh.all().size() == 1,
                     kConfig,
                     "trainer: weights streamed from disk belong to one rank; drop --stream-layers "
                     "or the topology");
      params = std::make_unique<StreamedParameters>(*source, options.numerics, options.device);
    } else {
      parallel::ShardOptions sharding;
      sharding.grads = options.grads || options.optimizer;
      sharding.masters = options.optimizer.has_value();
      sharding.wide = options.numerics.acc();
      sharding.device = options.device;
      sharding.exact = options.numerics.invariant();
      sharding.head_unit = model::head_unit(config.num_hidden_layers);
      auto all = std::make_unique<parallel::ShardedParameters>(
          parallel::parameter_specs(*source, options.numerics, mesh), mesh, sharding);
      sharded = all.get();
      params = std::move(all);
      audit.shards(*sharded);
      if (options.optimizer) {
        optimizer = std::make_unique<parallel::Optimizer>(*sharded, mesh, *options.optimizer);
        audit.optimizer(*sharded, *optimizer);
      }
    }
    watched = audit.watch(*params);
  }

  /// Forward of this rank's part of a batch. Its share of the batch's loss goes to `mean` and is
  /// returned, differentiable: summed over ranks it is the sum over the batch's targets, divided by
  /// `divisor`.
  Tensor forward(const parallel::ParallelPlan& plan,
                 const Documents& documents,
                 int64_t divisor,
                 model::TraceSink* trace,
                 bool logits,
                 MeanLoss& mean,
                 TrainerResult& result);
  static void backward(const Tensor& loss);
  /// Checks options.replay against the batches; forward() then takes its rows from the first.
  void start_replay(std::span<const Documents> micro_batches);
  TrainerResult run(std::span<const Documents> micro_batches);
  TrainStep train_step(const std::vector<Documents>& micro_batches);
  [[nodiscard]] parallel::TrainingParts parts() const {
    LOCKSTEP_CHECK(sharded != nullptr,
                   kConfig,
                   "trainer: weights streamed from disk have no training state; drop "
                   "--stream-layers");
    LOCKSTEP_CHECK(options.device.is_cpu(),
                   kConfig,
                   "trainer: training state is saved, loaded and offered from the CPU; use device "
                   "cpu");
    return {config, options.numerics, mesh, *sharded, optimizer.get()};
  }
  template <typename PickTensor>
  std::map<std::string, Tensor> whole(bool trainable_only, PickTensor&& pick) const;

  NonFiniteWeights non_finite;
  std::shared_ptr<const model::WeightSource> source;
  TrainerOptions options;
  const parallel::Mesh& mesh;
  const model::ModelConfig& config;
  DtypeAudit audit;
  std::unique_ptr<model::ParamView> params;
  std::unique_ptr<model::ParamView> watched;       ///< params as the audit sees them
  parallel::ShardedParameters* sharded = nullptr;  ///< params, unless streamed
  std::unique_ptr<parallel::Optimizer> optimizer;
  std::vector<Tensor> replayed;  ///< by layer, of the batch at hand: backward may run layers again
  int64_t replay_row = 0;        ///< first row in options.replay of the next batch
};

void Trainer::Impl::backward(const Tensor& loss) {
  const MemoryScope memory(MemoryKind::kActivations);
  loss.backward();
}

template <typename PickTensor>
std::map<std::string, Tensor> Trainer::Impl::whole(bool trainable_only, PickTensor&& pick) const {
  std::map<std::string, Tensor> result;
  for (const parallel::Shard& shard : sharded->shards()) {
    if (trainable_only && !shard.spec.trainable) continue;
    const Tensor value =
        parallel::gather_whole(*sharded, shard, pick(shard), config, options.numerics, mesh).cpu();
    for (auto& [disk_name, part] : source->disk_tensors(shard.spec.name, value))
      result.emplace(std::move(disk_name), std::move(part));
  }
  return result;
}

Tensor Trainer::Impl::forward(const parallel::ParallelPlan& plan,
                              const Documents& documents,
                              int64_t divisor,
                              model::TraceSink* trace,
                              bool logits,
                              MeanLoss& mean,
                              TrainerResult& result) {
  const MemoryScope memory(MemoryKind::kActivations);
  const parallel::TokenPlan& tokens = plan.tokens();
  const int64_t count = tokens.end - tokens.begin;
  replayed.clear();
  for (const Tensor& experts : options.replay) {
    replayed.push_back(experts.defined() ? experts.narrow(0, replay_row + tokens.begin, count)
                                         : Tensor());
  }
  replay_row += documents.packing.global_tokens();
  const model::LayerContext ctx{.config = config,
                                .num = options.numerics,
                                .packing = tokens.packing,
                                .params = *watched,
                                .seams = plan.seams(),
                                .trace = trace,
                                .reference = options.reference_ops,
                                .replay = replayed.empty() ? nullptr : &replayed};
  const model::DecoderOptions decoder{.recompute = options.recompute,
                                      .progress = [&](int64_t done, int64_t total) {
                                        if (options.progress)
                                          options.progress(done, total, "forward");
                                      }};
  const Tensor local_labels = documents.labels().narrow(0, tokens.begin, count);
  const Tensor x =
      model::decoder_layers(ctx, documents.ids.narrow(0, tokens.begin, count), decoder);
  const auto head = [&](const model::LayerContext& inner, const Tensor& streams) {
    const Tensor h = model::finish(inner, streams);
    const Weight lm_head = inner.weight("lm_head.weight");
    if (logits) {
      const OpScope time("logits");
      result.local_logits =
          model::head_logits(h.detach(), lm_head.value.detach(), options.numerics).cpu();
    }
    const OpScope time("head");
    return options.reference_ops
               ? model::head_logprobs_reference(
                     h, lm_head.value, local_labels, {}, options.numerics)
                     .logprobs
               : model::head_logprobs(h, lm_head, local_labels, {}, options.numerics).logprobs;
  };
  const Tensor logprobs =
      model::run_unit(ctx, model::head_unit(config.num_hidden_layers), x, false, head);
  result.local_logprobs = logprobs.detach().cpu().masked_fill(
      local_labels.lt(0), std::numeric_limits<double>::quiet_NaN());
  mean.add(logprobs.detach());
  return logprobs.sum().neg().div(static_cast<double>(std::max<int64_t>(divisor, 1)));
}

void Trainer::Impl::start_replay(std::span<const Documents> micro_batches) {
  replay_row = 0;
  LOCKSTEP_CHECK(
      options.numerics.is<model::Switch::kExpertReplay>("replay") != options.replay.empty(),
      kConfig,
      "trainer: D68 is {}, and {} expert choice was given; set it to replay for a run that "
      "takes the choice of another",
      options.replay.empty() ? "replay" : "own",
      options.replay.empty() ? "no" : "an");
  if (options.replay.empty()) return;
  LOCKSTEP_CHECK(static_cast<int64_t>(options.replay.size()) == config.num_hidden_layers,
                 kInput,
                 "trainer: the replayed expert choice has {} layers, the model {}",
                 options.replay.size(),
                 config.num_hidden_layers);
  int64_t tokens = 0;
  for (const Documents& documents : micro_batches) tokens += documents.packing.global_tokens();
  for (size_t layer = 0; layer < options.replay.size(); ++layer) {
    const Tensor& experts = options.replay[layer];
    const bool routed = config.mlps[layer] == model::MlpKind::kMoe;
    const int64_t rows = experts.defined() ? experts.size(0) : 0, want = routed ? tokens : 0;
    LOCKSTEP_CHECK(
        rows == want && experts.defined() == routed,
        kInput,
        "trainer: the replayed expert choice of layer {} has {} rows instead of {}; take "
        "it from a run of the same documents",
        layer,
        rows,
        want);
  }
}

TrainerResult Trainer::Impl::run(std::span<const Documents> micro_batches) {
  LOCKSTEP_CHECK(!micro_batches.empty() && (micro_batches.size() == 1 || options.trace.empty()),
                 kConfig,
                 "trainer: {} micro-batches; there must be one at least, and a trace is of one",
                 micro_batches.size());
  const at::AutoGradMode grad_mode(options.grads);
  TrainerResult result;
  for (const Documents& documents : micro_batches) result.num_targets += num_targets(documents);
  MeanLoss mean(options.numerics, mesh, result.num_targets);
  start_replay(micro_batches);
  if (options.grads) sharded->zero_grads();

  std::vector<Tensor> logits, logprobs, local_logits, local_logprobs;
  for (const Documents& documents : micro_batches) {
    const parallel::ParallelPlan plan(
        config, options.numerics, mesh, documents.packing, options.cp_cuts);
    const parallel::TokenPlan& tokens = plan.tokens();
    PatternTrace trace(options.trace);
    if (&documents == micro_batches.data()) result.local_begin = tokens.begin;
    auto start = std::chrono::steady_clock::now();
    const Tensor loss = forward(plan,
                                documents,
                                result.num_targets,
                                options.trace.empty() ? nullptr : &trace,
                                options.logits,
                                mean,
                                result);
    result.forward_s += seconds_since(start);
    if (options.grads) {
      start = std::chrono::steady_clock::now();
      backward(loss);
      result.backward_s += seconds_since(start);
    }

    const auto gather = [&](const Tensor& local, std::string_view what) {
      return mesh.tokens().all_gather_rows(local.contiguous(), tokens.rows, what);
    };
    local_logprobs.push_back(result.local_logprobs);
    logprobs.push_back(gather(result.local_logprobs, "logprobs"));
    if (options.logits) {
      local_logits.push_back(result.local_logits);
      logits.push_back(gather(result.local_logits, "logits"));
    }
    for (const PatternTrace::Named& part : {trace.values(), trace.gradients()}) {
      for (const auto& [name, value] : part) {
        // Selected keys are rows of this rank's row of documents; -1 stays -1.
        const Tensor here = value.cpu();
        const Tensor in_batch = name.ends_with(".indexer") && tokens.row_begin > 0
                                    ? at::where(here.ge(0), here + tokens.row_begin, here)
                                    : here;
        result.trace.emplace_back(name, gather(in_batch, name));
      }
    }
  }
  result.loss = mean.value();
  const auto join = [](const std::vector<Tensor>& parts) {
    return parts.empty() ? Tensor() : parts.size() == 1 ? parts[0] : at::cat(parts);
  };
  result.logits = join(logits);
  result.logprobs = join(logprobs);
  result.local_logits = join(local_logits);
  result.local_logprobs = join(local_logprobs);
  if (options.grads) {
    const OpScope time("gradients out");
    result.grads = whole(true, [&](const parallel::Shard& shard) {
      return shard.grad.defined() ? shard.grad
                                  : at::zeros(shard.value.sizes(), options.numerics.acc());
    });
  }
  result.non_finite = non_finite.text();
  result.peak_rss_bytes = peak_rss_bytes();
  return result;
}

TrainStep Trainer::Impl::train_step(const std::vector<Documents>& micro_batches) {
  LOCKSTEP_CHECK(optimizer != nullptr,
                 kConfig,
                 "trainer: a step needs an optimizer; set TrainerOptions::optimizer");
  const at::AutoGradMode grad_mode(true);
  TrainStep step;
  for (const Documents& documents : micro_batches) step.num_targets += num_targets(documents);
  const bool balances = options.router_bias_speed > 0;
  RouterLoad load(config);
  MeanLoss mean(options.numerics, mesh, step.num_targets);
  start_replay(micro_batches);
  sharded->zero_grads();
  for (const Documents& documents : micro_batches) {
    const parallel::ParallelPlan plan(config, options.numerics, mesh, documents.packing, {});
    TrainerResult part;
    auto start = std::chrono::steady_clock::now();
    const Tensor loss =
        forward(plan, documents, step.num_targets, balances ? &load : nullptr, false, mean, part);
    step.forward_s += seconds_since(start);
    start = std::chrono::steady_clock::now();
    backward(loss);
    step.backward_s += seconds_since(start);
  }
  step.loss = mean.value();
  const auto start = std::chrono::steady_clock::now();
  step.optimizer = optimizer->step();
  if (balances) {
    Tensor counts = load.counts();
    mesh.tokens().all_reduce_sum(counts, "router load");
    for (parallel::Shard& shard : sharded->shards()) {
      if (const auto layer = RouterLoad::layer_of_bias(shard.spec.name))
        parallel::update_router_bias(shard, counts[*layer], options.router_bias_speed);
    }
  }
  step.optimizer_s = seconds_since(start);
  return step;
}

Trainer::Trainer(std::shared_ptr<const model::WeightSource> source,
                 TrainerOptions options,
                 const parallel::Mesh& mesh)
    : impl_(std::make_unique<Impl>(std::move(source), std::move(options), mesh)) {}

Trainer::~Trainer() = default;

TrainerResult Trainer::run(const Documents& documents) { return impl_->run({&documents, 1}); }

TrainerResult Trainer::run(const std::vector<Documents>& micro_batches) {
  return impl_->run(micro_batches);
}

TrainStep Trainer::train_step(const std::vector<Documents>& micro_batches) {
  return impl_->train_step(micro_batches);
}

std::map<std::string, Tensor> Trainer::weights() const {
  return impl_->whole(false, [](const parallel::Shard& shard) { return shard.value; });
}

const parallel::ShardedParameters& Trainer::shards() const { return impl_->parts().params; }

void Trainer::save(const std::string& folder, std::map<std::string, std::string> values) const {
  const int64_t step = impl_->optimizer ? impl_->optimizer->num_steps() : 0;
  parallel::save_checkpoint(folder, {step, std::move(values)}, impl_->parts());
  impl_->audit.checkpoint(folder);
}

const std::vector<AuditRow>& Trainer::audit() const { return impl_->audit.rows(); }

parallel::TrainingState Trainer::load(const std::string& folder) {
  return parallel::load_checkpoint(folder, impl_->parts());
}

}  // namespace lockstep::harness
