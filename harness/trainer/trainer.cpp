#include "harness/trainer/trainer.hpp"

#include <sys/resource.h>

#include <chrono>
#include <cmath>
#include <limits>

#include "harness/trainer/parameters.hpp"
#include "harness/trainer/trace.hpp"
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

int64_t peak_rss_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;
}

}  // namespace

struct Trainer::Impl {
  Impl(std::shared_ptr<const model::WeightSource> source_in,
       TrainerOptions options_in,
       const parallel::Mesh& mesh_in)
      : source(std::move(source_in)),
        options(std::move(options_in)),
        mesh(mesh_in),
        config(source->config()) {
    LOCKSTEP_CHECK(
        !(options.stream_layers && options.grads),
        kConfig,
        "trainer: weights streamed from disk have no gradients; drop --grads or --stream-layers");
    if (options.stream_layers) {
      LOCKSTEP_CHECK(mesh.all().size() == 1,
                     kConfig,
                     "trainer: weights streamed from disk belong to one rank; drop --stream-layers "
                     "or the topology");
      params = std::make_unique<StreamedParameters>(*source, options.numerics);
    } else {
      parallel::ShardOptions sharding;
      sharding.grads = options.grads;
      sharding.wide = options.numerics.acc();
      sharding.head_unit = model::head_unit(config.num_hidden_layers);
      auto all = std::make_unique<parallel::ShardedParameters>(
          parallel::parameter_specs(*source, options.numerics, mesh), mesh, sharding);
      sharded = all.get();
      params = std::move(all);
    }
  }

  TrainerResult run(const Documents& documents);
  void collect_grads(TrainerResult& result) const;

  std::shared_ptr<const model::WeightSource> source;
  TrainerOptions options;
  const parallel::Mesh& mesh;
  const model::ModelConfig& config;
  std::unique_ptr<model::ParamView> params;
  parallel::ShardedParameters* sharded = nullptr;  ///< params, unless streamed
};

void Trainer::Impl::collect_grads(TrainerResult& result) const {
  for (const parallel::Shard& shard : sharded->shards()) {
    if (!shard.spec.trainable) continue;
    const Tensor mine =
        shard.grad.defined() ? shard.grad : at::zeros(shard.value.sizes(), options.numerics.acc());
    const Tensor grad =
        parallel::gather_whole(*sharded, shard, mine, config, options.numerics, mesh);
    for (auto& [disk_name, part] : source->disk_tensors(shard.spec.name, grad)) {
      result.grads.emplace(std::move(disk_name), std::move(part));
    }
  }
}

TrainerResult Trainer::Impl::run(const Documents& documents) {
  const parallel::ParallelPlan plan(
      config, options.numerics, mesh, documents.packing, options.cp_cuts);
  const parallel::TokenPlan& tokens = plan.tokens();
  const int64_t begin = tokens.begin, count = tokens.end - tokens.begin;

  PatternTrace trace(options.trace);
  const at::AutoGradMode grad_mode(options.grads);
  const model::LayerContext ctx{.config = config,
                                .num = options.numerics,
                                .packing = tokens.packing,
                                .params = *params,
                                .seams = plan.seams(),
                                .trace = options.trace.empty() ? nullptr : &trace,
                                .reference = options.reference_ops};
  const model::DecoderOptions decoder{.recompute = options.recompute,
                                      .progress = [&](int64_t done, int64_t total) {
                                        if (options.progress)
                                          options.progress(done, total, "forward");
                                      }};

  TrainerResult result;
  result.local_begin = begin;
  auto start = std::chrono::steady_clock::now();
  const Tensor labels = documents.labels();
  result.num_targets = labels.ge(0).sum().item<int64_t>();
  const Tensor local_labels = labels.narrow(0, begin, count);
  const Tensor x = model::decoder_layers(ctx, documents.ids.narrow(0, begin, count), decoder);
  const auto head = [&](const model::LayerContext& inner, const Tensor& streams) {
    const Tensor h = model::finish(inner, streams);
    const Tensor lm_head = inner.params.get("lm_head.weight");
    if (options.logits)
      result.local_logits = model::head_logits(h.detach(), lm_head.detach(), options.numerics);
    return options.reference_ops
               ? model::head_logprobs_reference(h, lm_head, local_labels, {}, options.numerics)
                     .logprobs
               : model::head_logprobs(h, lm_head, local_labels, {}, options.numerics).logprobs;
  };
  const Tensor logprobs =
      model::run_unit(ctx, model::head_unit(config.num_hidden_layers), x, false, head);
  // Divided by the targets of the whole batch, so that summing over ranks is all that is left to
  // do, for the loss and for gradients.
  const Tensor loss =
      logprobs.sum().neg().div(static_cast<double>(std::max<int64_t>(result.num_targets, 1)));
  Tensor total = loss.detach().to(at::kDouble).reshape({1}).clone();
  mesh.tokens().all_reduce_sum(total, "loss");
  result.loss = total.item<double>();
  result.local_logprobs =
      logprobs.detach().masked_fill(local_labels.lt(0), std::numeric_limits<double>::quiet_NaN());
  result.forward_s = seconds_since(start);

  if (options.grads) {
    start = std::chrono::steady_clock::now();
    sharded->zero_grads();
    loss.backward();
    result.backward_s = seconds_since(start);
    collect_grads(result);
  }

  const auto gather = [&](const Tensor& local, std::string_view what) {
    return mesh.tokens().all_gather_rows(local.contiguous(), tokens.rows, what);
  };
  result.logprobs = gather(result.local_logprobs, "logprobs");
  if (options.logits) result.logits = gather(result.local_logits, "logits");
  for (const PatternTrace::Named& part : {trace.values(), trace.gradients()}) {
    for (const auto& [name, value] : part) {
      // Selected keys are rows of this rank's row of documents; -1 stays -1.
      const Tensor in_batch = name.ends_with(".indexer") && tokens.row_begin > 0
                                  ? at::where(value.ge(0), value + tokens.row_begin, value)
                                  : value;
      result.trace.emplace_back(name, gather(in_batch, name));
    }
  }
  result.peak_rss_bytes = peak_rss_bytes();
  return result;
}

Trainer::Trainer(std::shared_ptr<const model::WeightSource> source,
                 TrainerOptions options,
                 const parallel::Mesh& mesh)
    : impl_(std::make_unique<Impl>(std::move(source), std::move(options), mesh)) {}

Trainer::~Trainer() = default;

TrainerResult Trainer::run(const Documents& documents) { return impl_->run(documents); }

}  // namespace lockstep::harness
