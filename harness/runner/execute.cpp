#include "harness/runner/execute.hpp"

#include <bit>
#include <chrono>
#include <cmath>
#include <memory>
#include <optional>
#include <sstream>

#include "harness/inference/byte_digest.hpp"
#include "harness/inference/inference.hpp"
#include "harness/sync/weight_sync.hpp"
#include "harness/trainer/trainer.hpp"
#include "model/base/device.hpp"
#include "parallel/mesh/layout.hpp"
#include "parallel/plan/placement.hpp"

namespace lockstep::harness {
namespace {

void check_agreement(const TrainerResult& result, const parallel::Group& ranks) {
  ByteDigest digest;
  digest.add(&result.loss, sizeof result.loss);
  for (const auto& [name, grad] : result.grads) {
    const Tensor flat = grad.detach().contiguous();
    digest.add(flat.const_data_ptr(), flat.nbytes());
  }
  const std::vector<int64_t> all =
      ranks.all_gather(std::bit_cast<int64_t>(digest.value()), "agreement of ranks");
  for (size_t r = 1; r < all.size(); ++r) {
    LOCKSTEP_CHECK(all[r] == all[0],
                   kInternal,
                   "run: rank {} and rank 0 hold different bytes of loss or gradients after they "
                   "were reduced; all ranks must agree",
                   r);
  }
}

/// `text` of the root, whose size is known to all.
std::string broadcast_text(const std::string& text,
                           int64_t size,
                           int64_t root,
                           const parallel::Group& ranks,
                           std::string_view what) {
  Tensor bytes = at::zeros({size}, at::kByte);
  auto* data = reinterpret_cast<char*>(bytes.mutable_data_ptr<uint8_t>());
  if (root == ranks.rank()) text.copy(data, text.size());
  ranks.broadcast(bytes, root, what);
  return {data, static_cast<size_t>(size)};
}

/// Calls `body`. What it finds wrong with a run on one rank is thrown by all of them, so that none
/// goes on alone; a lost peer, or our own fault, only where it is met.
template <typename Body>
void together(const parallel::Group& world, const Body& body) {
  std::optional<Error> own;
  try {
    body();
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kComm || error.kind() == ErrorKind::kInternal) throw;
    own = error;
  }
  if (world.size() == 1) {
    if (own) throw Error(*own);
    return;
  }
  const std::string text = own ? own->what() : "";
  const std::vector<int64_t> kinds =
      world.all_gather(own ? static_cast<int64_t>(own->kind()) : -1, "errors of a run");
  for (size_t r = 0; r < kinds.size(); ++r) {
    if (kinds[r] < 0) continue;
    const auto root = static_cast<int64_t>(r);
    const int64_t size = world.all_reduce_max(
        root == world.rank() ? static_cast<int64_t>(text.size()) : 0, "errors of a run");
    throw Error(static_cast<ErrorKind>(kinds[r]),
                broadcast_text(text, size, root, world, "errors of a run"));
  }
}

/// Gives every rank what rank 0 has. Shapes and dtypes travel first, as text.
void share(RunOutput& output, const parallel::Group& world) {
  std::vector<std::pair<std::string, Tensor>> tensors = {{"logits", output.logits},
                                                         {"logprobs", output.logprobs}};
  tensors.insert(tensors.end(), output.trace.begin(), output.trace.end());
  std::string text;
  for (const auto& [name, tensor] : tensors) {
    if (!tensor.defined()) continue;
    text += fmt::format("{} {} {}", name, static_cast<int>(tensor.scalar_type()), tensor.dim());
    for (const int64_t size : tensor.sizes()) text += fmt::format(" {}", size);
    text += '\n';
  }
  const bool root = world.rank() == 0;
  const int64_t size =
      world.all_reduce_max(root ? static_cast<int64_t>(text.size()) : 0, "result of a run");
  std::istringstream lines(broadcast_text(text, size, 0, world, "result of a run"));
  std::map<std::string, Tensor> known(tensors.begin(), tensors.end());
  RunOutput all;
  for (std::string name; lines >> name;) {
    int dtype = 0;
    size_t dims = 0;
    lines >> dtype >> dims;
    std::vector<int64_t> shape(dims);
    for (int64_t& d : shape) lines >> d;
    Tensor tensor =
        root ? known.at(name).contiguous() : at::empty(shape, static_cast<at::ScalarType>(dtype));
    if (tensor.numel() > 0) {
      Tensor bytes = tensor.view({-1}).view(at::kByte);
      world.broadcast(bytes, 0, "result of a run");
    }
    if (name == "logits") {
      all.logits = tensor;
    } else if (name == "logprobs") {
      all.logprobs = tensor;
    } else {
      all.trace.emplace_back(name, tensor);
    }
  }
  output.logits = all.logits;
  output.logprobs = all.logprobs;
  output.trace = std::move(all.trace);
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
    return {broadcast_text(text, sizes[r], static_cast<int64_t>(r), ranks, "warnings")};
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

InferenceOptions inference_options(const RunSpec& run, const StepCallback& progress) {
  InferenceOptions options;
  options.numerics = numerics_of(run);
  if (run.page_size > 0) options.page_size = run.page_size;
  options.prefill_chunk = run.prefill_chunk;
  options.decode = run.decode;
  options.trace = run.trace;
  options.progress = progress;
  return options;
}

RunOutput run_inference(Inference& engine, const Workload& work, const parallel::Mesh& mesh) {
  InferenceResult result = engine.run(work.documents);
  RunOutput output = output_of(result, mesh.all());
  const int64_t rows = work.documents.packing.global_tokens();
  output.rank_rows.assign(static_cast<size_t>(output.ranks), {0, rows});
  output.forward_s = result.seconds;
  return output;
}

/// After its training steps.
std::unique_ptr<Trainer> make_trainer(const RunSpec& run,
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
  options.device = device_of(run.device);
  options.trace = run.trace;
  options.cp_cuts = run.cp_cuts;
  options.replay = replay;
  options.progress = progress;
  if (run.train_steps > 0) options.optimizer = parallel::OptimizerOptions{.lr = 1e-3};
  auto trainer = std::make_unique<Trainer>(work.source, std::move(options), mesh);
  for (int64_t step = 0; step < run.train_steps; ++step) trainer->train_step({work.documents});
  return trainer;
}

RunOutput run_trainer(Trainer& trainer, const Workload& work, const parallel::Mesh& mesh) {
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

parallel::Mesh mesh_on(const parallel::Group& world, const model::Topology& topology) {
  return world.size() == 1 && topology.num_ranks() == 1 ? parallel::Mesh::single()
                                                        : parallel::Mesh::create(world, topology);
}

/// Trains, brings the weights into an engine that was made with the model's, and serves.
RunOutput run_synchronised(const RunSpec& run,
                           const Workload& work,
                           const parallel::Group& world,
                           const StepCallback& progress) {
  const RunSpec& from = run.trainer.front();
  const parallel::Mesh trainers = mesh_on(world, from.topology),
                       engines = mesh_on(world, run.topology);
  std::unique_ptr<Trainer> trainer;
  std::unique_ptr<Inference> engine;
  together(world, [&] {
    if (trainers.active()) trainer = make_trainer(from, work, trainers, progress, {});
    if (engines.active())
      engine = std::make_unique<Inference>(work.source, inference_options(run, progress), engines);
  });
  WeightSync sync(world,
                  {work.source->config(),
                   numerics_of(from),
                   numerics_of(run),
                   from.topology,
                   run.topology,
                   consecutive_ranks(0, from.topology.num_ranks()),
                   consecutive_ranks(0, run.topology.num_ranks())});
  const SyncReport report =
      sync.run(2,
               trainer != nullptr ? sync.offer(trainer->shards()) : std::vector<OfferedTensor>{},
               engine != nullptr ? &engine->weights() : nullptr);
  trainer.reset();
  Tensor bytes = at::full({1}, report.bytes_received, at::kLong);
  world.all_reduce_sum(bytes, "bytes of the weight sync");
  if (engine == nullptr) return {};
  RunOutput output = run_inference(*engine, work, engines);
  output.sync_bytes = bytes.item<int64_t>();
  output.sync_s = report.seconds;
  return output;
}

/// What is the same for all.
RunOutput finish(RunOutput output,
                 const Workload& work,
                 std::chrono::steady_clock::time_point start) {
  output.cu_seqlens = work.documents.packing.cu_seqlens();
  output.tokens = work.documents.packing.global_tokens();
  output.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return output;
}

}  // namespace

RunOutput execute_run(const RunSpec& run,
                      const Workload& work,
                      const parallel::Group& world,
                      const StepCallback& progress,
                      const std::vector<Tensor>& replay) {
  if (!run.trainer.empty()) {
    const auto start = std::chrono::steady_clock::now();
    return finish(run_synchronised(run, work, world, progress), work, start);
  }
  const parallel::Mesh mesh = mesh_on(world, run.topology);
  return mesh.active() ? execute_run(run, work, mesh, progress, replay) : RunOutput{};
}

RunOutput execute_run(const RunSpec& run,
                      const Workload& work,
                      const parallel::Mesh& mesh,
                      const StepCallback& progress,
                      const std::vector<Tensor>& replay) {
  const auto start = std::chrono::steady_clock::now();
  LOCKSTEP_CHECK(run.trainer.empty(),
                 kConfig,
                 "run {}: weights_from takes the ranks of two engines; use `lockstep run`",
                 run.name);
  if (run.engine == "inference") {
    Inference engine(work.source, inference_options(run, progress), mesh);
    return finish(run_inference(engine, work, mesh), work, start);
  }
  const std::unique_ptr<Trainer> trainer = make_trainer(run, work, mesh, progress, replay);
  return finish(run_trainer(*trainer, work, mesh), work, start);
}

RunOutput execute_run_for_all(const RunSpec& run,
                              const Workload& work,
                              const parallel::Group& world,
                              const std::vector<Tensor>& replay) {
  RunOutput output;
  // Every rank does a run on one.
  if (run.num_ranks() == 1 && run.trainer.empty())
    return execute_run(run, work, parallel::Mesh::single(), {}, replay);
  together(world, [&] { output = execute_run(run, work, world, {}, replay); });
  if (run.topology.num_ranks() == world.size()) return output;
  share(output, world);
  output.cu_seqlens = work.documents.packing.cu_seqlens();
  output.tokens = work.documents.packing.global_tokens();
  return output;
}

void check_topology(const RunSpec& run, const model::ModelConfig& config) {
  for (const RunSpec& from : run.trainer) check_topology(from, config);
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
