#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "golden/store/hdf5.hpp"
#include "harness/cli/commands.hpp"
#include "harness/cli/ranks.hpp"
#include "harness/launch/available.hpp"
#include "harness/launch/documents_file.hpp"
#include "harness/launch/mpi_start.hpp"
#include "harness/launch/workload.hpp"
#include "harness/result/json_text.hpp"
#include "harness/runner/execute.hpp"
#include "harness/runner/progress.hpp"
#include "harness/trainer/dtype_audit.hpp"
#include "model/checkpoint/safetensors.hpp"

namespace lockstep::harness {
namespace {

namespace fs = std::filesystem;

/// The options as a run; everything that can be wrong about them is found here.
RunSpec run_of(const LogitsOptions& options, std::string_view command) {
  RunSpec run;
  run.name = command;
  run.engine = options.engine;
  const std::string engine = engine_problem(options.engine);
  LOCKSTEP_CHECK(engine.empty(), kConfig, "--engine {}: {}", options.engine, engine);
  const std::string device = device_problem(options.device);
  LOCKSTEP_CHECK(device.empty(), kConfig, "--device {}: {}", options.device, device);
  run.device = options.device;
  run.policy = options.policy;
  for (const std::string& text : options.numerics) {
    const size_t equals = text.find('=');
    LOCKSTEP_CHECK(equals != std::string::npos,
                   kInput,
                   "--numerics {}: not of the form switch=value; write for example D09=1",
                   text);
    add_numerics(run, text.substr(0, equals), text.substr(equals + 1));
  }
  numerics_of(run);
  run.topology = model::parse_topology(options.topology);
  const std::string topology = topology_problem(run.topology, run.engine);
  LOCKSTEP_CHECK(topology.empty(), kMesh, "--topology {}: {}", options.topology, topology);
  run.grads = options.grads;
  run.recompute = options.recompute;
  run.reference_ops = options.reference_ops;
  run.stream_layers = options.stream_layers;
  run.trace = options.modules;
  run.decode = options.decode;
  run.prefill_chunk = options.prefill_chunk;
  run.page_size = options.page_size;
  const std::string problem = option_problem(run);
  LOCKSTEP_CHECK(problem.empty(), kConfig, "{}: {}", command, problem);
  LOCKSTEP_CHECK(
      !(run.stream_layers && run.grads),
      kConfig,
      "--stream-layers drops weights after use, so --grads cannot be computed; leave one "
      "of them out");
  return run;
}

/// A result that cannot be written, or would replace an input, is found out before it is computed.
void check_output(const fs::path& out,
                  const fs::path& docs,
                  const fs::path& model,
                  const std::vector<std::string>& suffixes) {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(model, error)) {
    std::error_code unlike;
    LOCKSTEP_CHECK(!fs::equivalent(out, entry.path(), unlike) || unlike,
                   kInput,
                   "--out {}: is a file of the checkpoint --model names, which would be lost; name "
                   "another",
                   out.string());
  }
  LOCKSTEP_CHECK(!fs::equivalent(out, docs, error) || error,
                 kInput,
                 "--out {}: is the file --docs names, which would be lost; name another",
                 out.string());
  const fs::path folder = out.has_parent_path() ? out.parent_path() : fs::path(".");
  LOCKSTEP_CHECK(fs::is_directory(folder, error),
                 kInput,
                 "--out {}: the folder {} does not exist; make it first",
                 out.string(),
                 folder.string());
  LOCKSTEP_CHECK(
      !fs::is_directory(out, error), kInput, "--out {}: is a folder; name a file", out.string());
  // The result is renamed into place, which would replace a device or pipe by a file.
  LOCKSTEP_CHECK(!fs::exists(out, error) || fs::is_regular_file(out, error),
                 kInput,
                 "--out {}: exists and is no ordinary file; name another",
                 out.string());
  LOCKSTEP_CHECK(
      std::find(suffixes.begin(), suffixes.end(), out.extension().string()) != suffixes.end(),
      kInput,
      "--out {}: the suffix says what is written; this command writes {}",
      out.string(),
      fmt::join(suffixes, ", "));
  model::AtomicFile probe(out.string());
  probe.write("", 0);
}

Workload workload_of(const LogitsOptions& options) {
  Workload work;
  std::error_code error;
  LOCKSTEP_CHECK(
      fs::is_directory(options.model, error),
      kInput,
      "--model {}: no such folder; give a folder with config.json and .safetensors files",
      options.model.string());
  work.source = model::open_checkpoint(options.model.string(), parse_defaults(options.defaults));
  work.documents = read_documents(options.docs, work.source->config().vocab_size);
  return work;
}

std::map<std::string, Tensor> logits_tensors(const RunOutput& output) {
  std::map<std::string, Tensor> tensors;
  tensors["logits"] = output.logits.contiguous();
  tensors["logprobs"] = output.logprobs.contiguous();
  tensors["loss"] = at::scalar_tensor(output.loss, at::kDouble);
  for (const auto& [name, grad] : output.grads) tensors["grads/" + name] = grad.contiguous();
  return tensors;
}

void write_logits(const fs::path& out, const RunOutput& output) {
  model::write_safetensors_file(out.string(), logits_tensors(output));
}

void write_dump(const fs::path& out, const RunOutput& output) {
  if (out.extension() == ".h5" || out.extension() == ".hdf5") {
    golden::Hdf5Writer file(out);
    for (const auto& [name, value] : output.trace) file.write(name, value.contiguous());
    for (const auto& [name, grad] : output.grads) file.write("grads/" + name, grad.contiguous());
    file.write("cu_seqlens", at::tensor(output.cu_seqlens, at::kLong));
    file.commit();
    return;
  }
  std::map<std::string, Tensor> tensors;
  for (const auto& [name, value] : output.trace) tensors[name] = value.contiguous();
  for (const auto& [name, grad] : output.grads) tensors["grads/" + name] = grad.contiguous();
  tensors["cu_seqlens"] = at::tensor(output.cu_seqlens, at::kLong);
  model::write_safetensors_file(out.string(), tensors);
}

std::string summary_json(const LogitsOptions& options, const RunOutput& output) {
  // A loss is a finite number or, in a broken model, NaN, which JSON has no literal for.
  const std::string loss = std::isfinite(output.loss) ? fmt::format("{}", output.loss)
                           : std::isnan(output.loss)  ? "\"NaN\""
                           : output.loss > 0          ? "\"Infinity\""
                                                      : "\"-Infinity\"";
  return fmt::format(
      "{{\n  \"out\": {},\n  \"tokens\": {},\n  \"targets\": {},\n  \"loss\": {},\n  "
      "\"ranks\": "
      "{},\n  \"grads\": {},\n  \"activations\": {},\n  \"seconds\": {:.6f},\n  \"peak_bytes\": "
      "{},\n  \"warnings\": {}\n}}\n",
      json_text(nlohmann::json(options.out.filename().string()), -1),
      output.tokens,
      output.num_targets,
      loss,
      output.ranks,
      output.grads.size(),
      output.trace.size(),
      output.seconds,
      output.peak_bytes,
      json_text(nlohmann::json(output.warnings), -1));
}

using Writer = void (*)(const fs::path&, const RunOutput&);

int run_engine(const LogitsOptions& options,
               const Context& context,
               const std::string& command,
               const std::vector<std::string>& suffixes,
               Writer write) {
  // Checked before a launcher starts anything, so that one message comes of it.
  const RunSpec run = run_of(options, command);
  const int64_t ranks = run.topology.num_ranks();
  parallel::set_comm_timeout_ms(options.comm_timeout_ms);
  if (!under_mpi_launcher()) check_hang_rank(ranks);
  if (ranks > 1 && !under_mpi_launcher()) {
    check_output(options.out, options.docs, options.model, suffixes);
    check_topology(run, workload_of(options).source->config());
    return start_own_ranks(ranks, context);
  }
  return on_ranks(context, command, [&](const parallel::Session& session) {
    const bool first = session.world().rank() == 0;
    check_hang_rank(session.world().size());
    LOCKSTEP_CHECK(session.world().size() >= ranks,
                   kMesh,
                   "--topology {} needs {} ranks, this mpirun has {}; start with mpirun -n {}, or "
                   "without mpirun",
                   model::to_string(run.topology),
                   ranks,
                   session.world().size(),
                   ranks);
    if (first) check_output(options.out, options.docs, options.model, suffixes);
    const Workload work = workload_of(options);
    const parallel::Mesh mesh = session.world().size() == 1
                                    ? parallel::Mesh::single()
                                    : parallel::Mesh::create(session.world(), run.topology);
    if (!mesh.active()) return 0;
    Progress progress(context.quiet || !first ? Progress::Mode::kQuiet : Progress::Mode::kAuto);
    progress.start(command);
    const RunOutput output =
        execute_run(run, work, mesh, [&](int64_t done, int64_t total, const char* what) {
          progress.step(done, total, what);
        });
    progress.clear();
    if (!first) return 0;
    LOCKSTEP_CHECK(run.trace.empty() || !output.trace.empty(),
                   kInput,
                   "--modules {}: no module has such a name; names are like layers.0, "
                   "layers.0.self_attn, layers.3.mlp (`--modules '*'` writes all)",
                   run.trace);
    write(options.out, output);
    for (const std::string& warning : output.warnings) {
      std::fputs(fmt::format("lockstep {}: warning: {}\n", command, warning).c_str(), stderr);
    }
    const std::string less = stored_in_less(*work.source, numerics_of(run));
    if (!less.empty() && !context.quiet) {
      std::fputs(fmt::format("lockstep {}: note: {}\n", command, less).c_str(), stderr);
    }
    if (context.json) {
      print(summary_json(options, output));
    } else if (!context.quiet) {
      print(fmt::format(
          "{}: {} tokens, {} targets, loss {:.8g}{}{}, {:.2f} s\n",
          options.out.string(),
          output.tokens,
          output.num_targets,
          std::fabs(output.loss),  // x86 makes its NaNs negative; no loss is
          output.grads.empty() ? "" : fmt::format(", {} gradients", output.grads.size()),
          output.trace.empty() ? "" : fmt::format(", {} activations", output.trace.size()),
          output.seconds));
    }
    return 0;
  });
}

}  // namespace

int run_command_logits(const LogitsOptions& options, const Context& context) {
  return run_engine(options, context, "logits", {".safetensors"}, write_logits);
}

int run_command_dump(const LogitsOptions& options, const Context& context) {
  return run_engine(options, context, "dump", {".h5", ".hdf5", ".safetensors"}, write_dump);
}

}  // namespace lockstep::harness
