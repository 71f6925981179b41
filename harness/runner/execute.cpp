#include "harness/runner/execute.hpp"

#include <bit>
#include <chrono>
#include <cmath>

#include "harness/inference/inference.hpp"
#include "harness/trainer/trainer.hpp"
#include "parallel/mesh/layout.hpp"
#include "parallel/plan/placement.hpp"

namespace lockstep::harness {
namespace {

/// FNV-1a over the bytes of tensors, for telling whether ranks agree.
class Digest {
 public:
  void add(const Tensor& tensor) {
    const Tensor flat = tensor.detach().contiguous();
    const auto* bytes = static_cast<const unsigned char*>(flat.const_data_ptr());
    const auto size = static_cast<size_t>(flat.nbytes());
    for (size_t i = 0; i < size; ++i) value_ = (value_ ^ bytes[i]) * 0x100000001B3ULL;
  }
  [[nodiscard]] int64_t value() const { return std::bit_cast<int64_t>(value_); }

 private:
  uint64_t value_ = 0xCBF29CE484222325ULL;
};

void check_agreement(const TrainerResult& result, const parallel::Group& ranks) {
  Digest digest;
  digest.add(at::scalar_tensor(result.loss, at::kDouble));
  for (const auto& [name, grad] : result.grads) digest.add(grad);
  const std::vector<int64_t> all = ranks.all_gather(digest.value(), "agreement of ranks");
  for (size_t r = 1; r < all.size(); ++r) {
    LOCKSTEP_CHECK(all[r] == all[0],
                   kInternal,
                   "run: rank {} and rank 0 hold different bytes of loss or gradients after they "
                   "were reduced; all ranks must agree",
                   r);
  }
}

/// What makes the numbers of a run worthless, the same on every rank. Ranks hold different parts of
/// the weights; the first that found something is believed.
std::vector<std::string> warnings_of(const std::string& text,
                                     double loss,
                                     const parallel::Group& ranks) {
  const std::vector<int64_t> sizes =
      ranks.all_gather(static_cast<int64_t>(text.size()), "warnings");
  for (size_t r = 0; r < sizes.size(); ++r) {
    if (sizes[r] == 0) continue;
    Tensor bytes = at::zeros({sizes[r]}, at::kByte);
    auto* data = reinterpret_cast<char*>(bytes.mutable_data_ptr<uint8_t>());
    if (static_cast<int64_t>(r) == ranks.rank()) text.copy(data, text.size());
    ranks.broadcast(bytes, static_cast<int64_t>(r), "warnings");
    return {std::string(data, static_cast<size_t>(sizes[r]))};
  }
  if (std::isfinite(loss)) return {};
  return {fmt::format(
      "the loss is {} although all weights are finite: an activation overflowed (`lockstep dump "
      "--modules '*'` shows which)",
      loss)};
}

/// What the results of both engines have.
template <typename Result>
RunOutput output_of(Result& result, const parallel::Group& ranks) {
  RunOutput output;
  output.ranks = ranks.size();
  output.peak_bytes = ranks.all_reduce_max(result.peak_rss_bytes, "peak memory");
  output.logits = result.logits;
  output.logprobs = result.logprobs;
  output.loss = result.loss + 0.0;  // no targets: 0, not -0
  output.num_targets = result.num_targets;
  output.trace = std::move(result.trace);
  output.warnings = warnings_of(result.non_finite, result.loss, ranks);
  return output;
}

RunOutput run_inference(const RunSpec& run,
                        const Workload& work,
                        const parallel::Mesh& mesh,
                        const StepCallback& progress) {
  InferenceOptions options;
  options.numerics = numerics_of(run);
  if (run.page_size > 0) options.page_size = run.page_size;
  options.prefill_chunk = run.prefill_chunk;
  options.decode = run.decode;
  options.trace = run.trace;
  options.progress = progress;
  Inference engine(work.source, std::move(options), mesh);
  InferenceResult result = engine.run(work.documents);
  RunOutput output = output_of(result, mesh.all());
  const int64_t rows = work.documents.packing.global_tokens();
  output.rank_rows.assign(static_cast<size_t>(output.ranks), {0, rows});
  output.forward_s = result.seconds;
  return output;
}

RunOutput run_trainer(const RunSpec& run,
                      const Workload& work,
                      const parallel::Mesh& mesh,
                      const StepCallback& progress,
                      const std::vector<Tensor>& replay) {
  TrainerOptions options;
  options.numerics = numerics_of(run);
  options.grads = run.grads;
  options.recompute = run.recompute;
  options.stream_layers = run.stream_layers;
  options.reference_ops = run.reference_ops;
  options.trace = run.trace;
  options.cp_cuts = run.cp_cuts;
  options.replay = replay;
  options.progress = progress;
  Trainer trainer(work.source, std::move(options), mesh);
  TrainerResult result = trainer.run(work.documents);
  const parallel::Group& ranks = mesh.all();
  if (ranks.size() > 1) check_agreement(result, ranks);
  RunOutput output = output_of(result, ranks);
  const int64_t rows = result.local_logprobs.defined() ? result.local_logprobs.size(0) : 0;
  const auto begins = ranks.all_gather(result.local_begin, "rows of ranks");
  const auto counts = ranks.all_gather(rows, "rows of ranks");
  for (size_t r = 0; r < begins.size(); ++r) {
    output.rank_rows.push_back({begins[r], begins[r] + counts[r]});
  }
  output.grads = std::move(result.grads);
  output.forward_s = result.forward_s;
  output.backward_s = result.backward_s;
  return output;
}

}  // namespace

RunOutput execute_run(const RunSpec& run,
                      const Workload& work,
                      const parallel::Mesh& mesh,
                      const StepCallback& progress,
                      const std::vector<Tensor>& replay) {
  const auto start = std::chrono::steady_clock::now();
  RunOutput output = run.engine == "inference" ? run_inference(run, work, mesh, progress)
                                               : run_trainer(run, work, mesh, progress, replay);
  output.cu_seqlens = work.documents.packing.cu_seqlens();
  output.tokens = work.documents.packing.global_tokens();
  output.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return output;
}

void check_topology(const RunSpec& run, const model::ModelConfig& config) {
  (void)parallel::parameter_specs(
      config, numerics_of(run), run.topology, parallel::coordinates(run.topology, 0));
}

std::vector<Tensor> expert_choice(const RunOutput& output, const model::ModelConfig& config) {
  std::vector<Tensor> choice(static_cast<size_t>(config.num_hidden_layers));
  for (size_t layer = 0; layer < choice.size(); ++layer) {
    const std::string name = fmt::format("layers.{}.mlp.gate.experts", layer);
    for (const auto& [traced, experts] : output.trace) {
      if (traced == name) choice[layer] = experts;
    }
  }
  return choice;
}

std::vector<Tensor> replay_from(const std::filesystem::path& folder,
                                const model::WeightSource& source) {
  return folder.empty() ? std::vector<Tensor>{} : expert_choice(load_run(folder), source.config());
}

}  // namespace lockstep::harness
