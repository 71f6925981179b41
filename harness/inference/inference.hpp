// The inference engine: the model as a serving engine runs it, over caches, in steps.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "harness/engine/documents.hpp"
#include "harness/inference/forward.hpp"

namespace lockstep::harness {

struct InferenceOptions {
  model::Numerics numerics = model::Numerics::policy("float32");
  int64_t page_size = 64;     ///< tokens of a latent page, >= 1
  int64_t prefill_chunk = 0;  ///< tokens of a document in one prefill step; 0: all of them
  int64_t decode = 0;         ///< the last tokens of each document go through decode steps
  bool logits = true;
  uint64_t shuffle_pages = 0;  ///< seed of the order in which pages and slots are handed out
  std::string trace;           ///< glob over module names; empty: none
  std::function<void(int64_t done, int64_t total, const char* what)> progress;  ///< tokens
};

/// Of the whole row of documents, the same on every rank.
struct InferenceResult {
  Tensor logits;    ///< [T, V] acc; undefined unless asked for
  Tensor logprobs;  ///< [T] of each next token, NaN at a document's last
  double loss = 0;  ///< mean next-token cross entropy; 0 without targets
  int64_t num_targets = 0;
  std::vector<std::pair<std::string, Tensor>> trace;  ///< module name -> [T, ...]
  int64_t steps = 0;
  double seconds = 0;
  int64_t cache_bytes = 0, peak_rss_bytes = 0;
  std::string non_finite;  ///< what is wrong with the weights; empty: nothing
};

class Inference {
 public:
  /// Loads the weights. mesh: tp only. Throws kConfig for options this
  /// engine cannot run, kMesh for another axis than tp, kInput for damaged weights.
  Inference(const std::shared_ptr<const model::WeightSource>& source,
            InferenceOptions options,
            const parallel::Mesh& mesh);
  Inference(const Inference&) = delete;
  Inference& operator=(const Inference&) = delete;
  ~Inference();

  /// All documents at the same time, each a request whose tokens are given. Every step takes one
  /// token of each document that decodes and a chunk of each that prefills. All ranks call it with
  /// the same documents. Throws kInput for ids outside the vocabulary.
  InferenceResult run(const Documents& documents);

  /// Other weights of the same model, see EngineWeights::update.
  void update(const std::shared_ptr<const model::WeightSource>& source,
              const std::set<std::string>& keep = {});
  [[nodiscard]] EngineWeights& weights();
  [[nodiscard]] const EngineWeights& weights() const;

  /// Caches of these sizes for step().
  [[nodiscard]] Caches make_caches(const CacheSizes& sizes) const;
  /// One step; hidden states [T, D] of the batch's rows. The first after an update throws
  /// kInternal, on every rank, when the weights of one are torn or stale.
  Tensor step(const Caches& caches, const Batch& batch, model::TraceSink* trace = nullptr);
  /// Logits [T, V] acc of hidden states, the same on every rank. Collective, like logprob().
  [[nodiscard]] Tensor logits(const Tensor& hidden) const;
  /// Log-probability of `id` after one hidden state [1, D], as the trainer's head computes it.
  [[nodiscard]] double logprob(const Tensor& hidden, int64_t id, double temperature) const;
  [[nodiscard]] const model::ModelConfig& config() const;
  [[nodiscard]] const model::Numerics& numerics() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep::harness
