#include "harness/inference/inference.hpp"

#include <algorithm>
#include <chrono>
#include <limits>
#include <map>

#include "harness/engine/memory.hpp"
#include "harness/engine/trace.hpp"
#include "parallel/plan/plan.hpp"

namespace lockstep::harness {
namespace {

/// Rows of batches put where they belong in the row of all documents.
class RowTrace final : public model::TraceSink {
 public:
  RowTrace(std::string pattern, int64_t rows) : pattern_(std::move(pattern)), total_(rows) {}

  /// Rows of the next step in the whole row, and of the first token of each one's document.
  void set_rows(Tensor rows, Tensor origins) {
    rows_ = std::move(rows);
    origins_ = std::move(origins);
  }
  [[nodiscard]] bool wants(const std::string& name) const override {
    return matches(pattern_, name);
  }
  void record(const std::string& name, const Tensor& value) override {
    const auto [found, fresh] = place_.emplace(name, values_.size());
    if (fresh) {
      std::vector<int64_t> shape = value.sizes().vec();
      shape[0] = total_;
      values_.emplace_back(name, at::zeros(shape, value.options()));
    }
    // Selected keys are entries of the request; -1 stays -1.
    const Tensor whole = name.ends_with(".indexer")
                             ? at::where(value.ge(0), value + origins_.unsqueeze(1), value)
                             : value;
    values_[found->second].second.index_copy_(0, rows_, whole.to(value.scalar_type()));
  }
  [[nodiscard]] std::vector<std::pair<std::string, Tensor>> take() { return std::move(values_); }

 private:
  std::string pattern_;
  int64_t total_;
  Tensor rows_, origins_;
  std::map<std::string, size_t> place_;
  std::vector<std::pair<std::string, Tensor>> values_;
};

/// A document on its way through the engine.
struct Request {
  int64_t begin, length;  ///< rows of the whole row
  int64_t prefill;        ///< tokens that are prefilled, the rest is decoded
  Sequence sequence;
  [[nodiscard]] bool decodes() const { return sequence.length >= prefill; }
  [[nodiscard]] bool done() const { return sequence.length == length; }
};

}  // namespace

struct Inference::Impl {
  Impl(const std::shared_ptr<const model::WeightSource>& source,
       InferenceOptions options_in,
       const parallel::Mesh& mesh_in)
      : options(std::move(options_in)),
        mesh(mesh_in),
        config(source->config()),
        weights(source, options.numerics, mesh),
        plan(config, options.numerics, mesh, Packing::whole({0}), {}) {
    LOCKSTEP_CHECK(mesh.topology().num_ranks() == mesh.topology().tp,
                   kMesh,
                   "inference: runs the tp axis only, got {}; leave the other axes out",
                   model::to_string(mesh.topology()));
    LOCKSTEP_CHECK(
        !options.numerics.rounds<model::Switch::kExpertGemm>("fp8") || mesh.topology().tp == 1,
        kMesh,
        "inference: block scales of FP8 experts (D57) would change with tp = {}; use tp = "
        "1 or D57 = bf16",
        mesh.topology().tp);
    LOCKSTEP_CHECK(options.page_size >= 1 && options.prefill_chunk >= 0 && options.decode >= 0,
                   kConfig,
                   "inference: page size {} must be at least 1, prefill chunk {} and decode {} not "
                   "negative",
                   options.page_size,
                   options.prefill_chunk,
                   options.decode);
  }

  [[nodiscard]] int64_t kda_heads() const {
    for (size_t layer = 0; layer < config.mixers.size(); ++layer) {
      if (config.mixers[layer] == model::MixerKind::kKda)
        return weights.at(fmt::format("layers.{}.self_attn.A_log", layer)).size(0);
    }
    return config.linear_num_heads;
  }

  [[nodiscard]] Tensor logits(const Tensor& h) const {
    return engine_logits(
        h, weights.at("lm_head"), weights.vocabulary(), options.numerics, plan.seams().tensor);
  }
  [[nodiscard]] Tensor logprobs(const Tensor& h,
                                const Tensor& labels,
                                const model::HeadOptions& head) const {
    return engine_logprobs(h,
                           weights.at("lm_head"),
                           weights.vocabulary(),
                           labels,
                           head,
                           options.numerics,
                           plan.seams().tensor);
  }

  InferenceOptions options;
  const parallel::Mesh mesh;
  const model::ModelConfig config;
  EngineWeights weights;
  parallel::ParallelPlan plan;
};

Inference::Inference(const std::shared_ptr<const model::WeightSource>& source,
                     InferenceOptions options,
                     const parallel::Mesh& mesh)
    : impl_(std::make_unique<Impl>(source, std::move(options), mesh)) {}

Inference::~Inference() = default;

void Inference::update(const std::shared_ptr<const model::WeightSource>& source,
                       const std::set<std::string>& keep) {
  impl_->weights.update(source, keep);
}

EngineWeights& Inference::weights() { return impl_->weights; }
const EngineWeights& Inference::weights() const { return impl_->weights; }
const model::ModelConfig& Inference::config() const { return impl_->config; }
const model::Numerics& Inference::numerics() const { return impl_->options.numerics; }

Caches Inference::make_caches(const CacheSizes& sizes) const {
  return {impl_->config,
          impl_->options.numerics,
          impl_->kda_heads(),
          replayed_chunk(impl_->options.numerics),
          sizes};
}

Tensor Inference::step(const Caches& caches, const Batch& batch, model::TraceSink* trace) {
  impl_->weights.check();
  return engine_forward({.config = impl_->config,
                         .num = impl_->options.numerics,
                         .weights = impl_->weights,
                         .caches = caches,
                         .tensor = impl_->plan.seams().tensor,
                         .batch = batch,
                         .trace = trace});
}

Tensor Inference::logits(const Tensor& hidden) const {
  const OpScope time("logits");
  return impl_->logits(hidden);
}

double Inference::logprob(const Tensor& hidden, int64_t id, double temperature) const {
  const Tensor label = at::full({1}, id, at::kLong);
  return impl_->logprobs(hidden, label, {.temperature = temperature}).item<double>();
}

InferenceResult Inference::run(const Documents& documents) {
  const auto start = std::chrono::steady_clock::now();
  const at::NoGradGuard no_grad;
  const InferenceOptions& options = impl_->options;
  const model::Numerics& num = options.numerics;
  const int64_t tokens = documents.packing.global_tokens();
  const Tensor labels = documents.labels();
  InferenceResult result;
  result.num_targets = labels.ge(0).sum().item<int64_t>();
  result.logprobs = at::full({tokens}, std::numeric_limits<double>::quiet_NaN(), num.acc());
  if (options.logits) result.logits = at::zeros({tokens, impl_->config.vocab_size}, num.acc());

  std::vector<Request> requests;
  std::vector<int64_t> lengths;
  for (const Segment& document : documents.packing.segments()) {
    if (document.length() == 0) continue;
    lengths.push_back(document.length());
    requests.push_back({.begin = document.begin,
                        .length = document.length(),
                        .prefill = std::max<int64_t>(0, document.length() - options.decode),
                        .sequence = {}});
  }
  CacheSizes sizes = cache_sizes(options.page_size, impl_->config.index_kpool, lengths);
  sizes.shuffle = options.shuffle_pages;
  Caches caches = make_caches(sizes);
  result.cache_bytes = caches.bytes();
  for (Request& request : requests) {
    LOCKSTEP_CHECK(caches.reserve(request.sequence, request.length),
                   kInternal,
                   "inference: {} tokens do not fit caches made for them",
                   request.length);
  }
  RowTrace trace(options.trace, tokens);
  const auto* ids = documents.ids.const_data_ptr<int64_t>();
  double total = 0;
  for (int64_t done = 0; done < tokens;) {
    std::vector<BatchItem> items;
    std::vector<int64_t> rows, origins;
    for (const bool decode : {true, false}) {
      for (Request& request : requests) {
        if (request.done() || request.decodes() != decode) continue;
        const int64_t left = request.prefill - request.sequence.length;
        const int64_t count = decode                       ? 1
                              : options.prefill_chunk == 0 ? left
                                                           : std::min(left, options.prefill_chunk);
        BatchItem item{.sequence = &request.sequence, .ids = {}, .decode = decode};
        for (int64_t i = 0; i < count; ++i) {
          rows.push_back(request.begin + request.sequence.length + i);
          origins.push_back(request.begin);
          item.ids.push_back(ids[rows.back()]);
        }
        items.push_back(std::move(item));
      }
    }
    const Tensor where = at::tensor(rows, at::kLong);
    trace.set_rows(where, at::tensor(origins, at::kLong));
    const Batch batch(std::move(items), impl_->config.index_kpool);
    const Tensor h = step(caches, batch, options.trace.empty() ? nullptr : &trace);
    const Tensor wanted = labels.index_select(0, where);
    if (options.logits) result.logits.index_copy_(0, where, logits(h));
    const Tensor logprobs = timed("head", [&] { return impl_->logprobs(h, wanted, {}); });
    total -= logprobs.sum(at::kDouble).item<double>();
    result.logprobs.index_copy_(
        0, where, logprobs.masked_fill(wanted.lt(0), std::numeric_limits<double>::quiet_NaN()));
    done += batch.rows();
    ++result.steps;
    if (options.progress) options.progress(done, tokens, "tokens");
  }
  result.loss = total / static_cast<double>(std::max<int64_t>(result.num_targets, 1));
  result.trace = trace.take();
  result.non_finite = impl_->weights.non_finite();
  result.peak_rss_bytes = peak_rss_bytes();
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

}  // namespace lockstep::harness
