#include "harness/trainer/trainer.hpp"

#include <sys/resource.h>

#include <chrono>
#include <cmath>
#include <limits>

#include "harness/trainer/parameters.hpp"
#include "harness/trainer/trace.hpp"
#include "model/layers/decoder.hpp"
#include "model/ops/head.hpp"
#include "parallel/plan/sequence_plan.hpp"

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
      params = std::make_unique<StreamedParameters>(*source, options.numerics);
    } else {
      auto all = std::make_unique<ResidentParameters>(*source, options.numerics, options.grads);
      resident = all.get();
      params = std::move(all);
    }
  }

  TrainerResult run(const Documents& documents);
  void reduce_grads(TrainerResult& result) const;

  std::shared_ptr<const model::WeightSource> source;
  TrainerOptions options;
  const parallel::Mesh& mesh;
  const model::ModelConfig& config;
  std::unique_ptr<model::ParamView> params;
  ResidentParameters* resident = nullptr;  ///< params, unless streamed
};

void Trainer::Impl::reduce_grads(TrainerResult& result) const {
  for (const auto& [name, leaf] : resident->leaves()) {
    // Every rank reduces every parameter, also those its tokens never touched.
    Tensor grad = leaf.grad().defined() ? leaf.grad().contiguous() : at::zeros_like(leaf.detach());
    mesh.cp().all_reduce_sum(grad, name);
    for (auto& [disk_name, part] : source->disk_tensors(name, grad)) {
      result.grads.emplace(std::move(disk_name), std::move(part));
    }
  }
}

TrainerResult Trainer::Impl::run(const Documents& documents) {
  const int64_t tokens = documents.packing.global_tokens();
  const parallel::Group& cp = mesh.cp();
  const parallel::SequencePlan plan = parallel::plan_sequence(mesh, tokens, options.cp_cuts);
  const int64_t begin = plan.begin, end = plan.end;

  PatternTrace trace(options.trace);
  const at::AutoGradMode grad_mode(options.grads);
  const model::LayerContext ctx{.config = config,
                                .num = options.numerics,
                                .packing = documents.packing.shard(begin, end),
                                .params = *params,
                                .sequence = *plan.seam,
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
  const Tensor local_labels = labels.narrow(0, begin, end - begin);
  const Tensor h =
      model::decoder_forward(ctx, documents.ids.narrow(0, begin, end - begin), decoder);
  const Tensor lm_head = params->get("lm_head.weight");
  const Tensor logprobs =
      options.reference_ops
          ? model::head_logprobs_reference(h, lm_head, local_labels, {}, options.numerics).logprobs
          : model::head_logprobs(h, lm_head, local_labels, {}, options.numerics).logprobs;
  // Divided by the targets of the whole row, so that summing over ranks is all that is left to do,
  // for the loss and for gradients.
  const Tensor loss =
      logprobs.sum().neg().div(static_cast<double>(std::max<int64_t>(result.num_targets, 1)));
  Tensor total = loss.detach().to(at::kDouble).reshape({1}).clone();
  cp.all_reduce_sum(total, "loss");
  result.loss = total.item<double>();
  if (options.logits)
    result.local_logits = model::head_logits(h.detach(), lm_head.detach(), options.numerics);
  result.local_logprobs =
      logprobs.detach().masked_fill(local_labels.lt(0), std::numeric_limits<double>::quiet_NaN());
  result.forward_s = seconds_since(start);

  if (options.grads) {
    start = std::chrono::steady_clock::now();
    resident->zero_grads();
    loss.backward();
    reduce_grads(result);
    result.backward_s = seconds_since(start);
  }

  const auto gather = [&](const Tensor& local, std::string_view what) {
    return cp.all_gather_rows(local.contiguous(), plan.rows(), what);
  };
  result.logprobs = gather(result.local_logprobs, "logprobs");
  if (options.logits) result.logits = gather(result.local_logits, "logits");
  for (const PatternTrace::Named& part : {trace.values(), trace.gradients()}) {
    for (const auto& [name, value] : part) result.trace.emplace_back(name, gather(value, name));
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
