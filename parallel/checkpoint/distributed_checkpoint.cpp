#include "parallel/checkpoint/distributed_checkpoint.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "model/checkpoint/checkpoint_source.hpp"
#include "model/checkpoint/mapped_file.hpp"
#include "model/checkpoint/safetensors.hpp"
#include "model/config/config_json.hpp"
#include "parallel/plan/placement.hpp"

namespace lockstep::parallel {
namespace {

namespace fs = std::filesystem;
constexpr const char* kStateFile = "state.json";
constexpr const char* kWeightsFile = "model.safetensors";

std::string_view optimizer_name(const Optimizer* optimizer) {
  return optimizer == nullptr ? "none" : optimizer_name(optimizer->options().kind);
}

std::string moment_file(std::string_view moment) { return fmt::format("{}.safetensors", moment); }

model::SafetensorsLayout layout_of(const std::vector<model::TensorToWrite>& tensors) {
  return model::layout_safetensors(
      tensors, {{"format", "pt"}, {std::string(model::kLayoutKey), std::string(model::kLayout)}});
}

/// One file of the checkpoint: its tensors, and this rank's values of them.
struct Part {
  std::string file;
  std::vector<model::TensorToWrite> tensors;
  std::map<std::string, Tensor> rows;  ///< by tensor name; absent where another rank writes
};

std::vector<Placement> placements(const TrainingParts& parts) {
  std::vector<Placement> result;
  const std::vector<model::Parameter> all = model::expected_parameters(parts.config);
  size_t next = 0;
  for (const Shard& shard : parts.params.shards()) {
    while (all[next].name != shard.spec.name) ++next;  // same order, tied copies left out
    result.push_back(place_parameter(
        parts.config, parts.num, parts.mesh.topology(), parts.mesh.place(), all[next]));
  }
  return result;
}

/// The ranks of the first replica hold every row; of tp ranks that hold the same, the first writes.
bool writes(const Shard& shard, const Mesh& mesh) {
  return mesh.place().dp == 0 && (shard.spec.tp_split || mesh.place().tp == 0);
}

std::vector<Part> files_of(const TrainingParts& parts, const std::vector<Placement>& placed) {
  std::vector<Part> files{{kWeightsFile, {}, {}}};
  std::vector<std::string_view> moments;
  if (parts.optimizer != nullptr) moments = Optimizer::state_names(parts.optimizer->options().kind);
  for (const std::string_view moment : moments) files.push_back({moment_file(moment), {}, {}});
  for (size_t i = 0; i < placed.size(); ++i) {
    Shard& shard = parts.params.shards()[i];
    const auto add = [&](Part& part, const Tensor& rows) {
      part.tensors.push_back(
          {shard.spec.name, rows.scalar_type(), placed[i].parameter.shape, nullptr});
      if (writes(shard, parts.mesh)) part.rows.emplace(shard.spec.name, rows);
    };
    add(files[0], shard.value);
    if (!shard.spec.trainable) continue;
    const std::map<std::string, Tensor>& state = parts.optimizer->state(shard.spec.name);
    for (size_t m = 0; m < moments.size(); ++m) {
      const auto found = state.find(std::string(moments[m]));
      if (found != state.end()) add(files[m + 1], found->second);
    }
  }
  return files;
}

void fail_io(const std::string& path, std::string_view what) {
  const int code = errno;
  fail(ErrorKind::kInput,
       "checkpoint: cannot {} {}: {}{}",
       what,
       path,
       std::strerror(code),  // NOLINT(concurrency-mt-unsafe): one thread writes
       code == ENOSPC ? "; free some space or choose another folder" : "");
}

class OpenFile {
 public:
  OpenFile(std::string path, int flags)
      : path_(std::move(path)), fd_(::open(path_.c_str(), flags | O_CLOEXEC, 0644)) {
    if (fd_ < 0) fail_io(path_, "open");
  }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;
  ~OpenFile() { ::close(fd_); }

  void allocate(uint64_t bytes) {
    // Reserved, so that a full disk shows here and not in a later write.
    const int code = ::posix_fallocate(fd_, 0, static_cast<off_t>(bytes));
    if (code != 0) {
      errno = code;
      fail_io(path_, fmt::format("reserve {} bytes for", bytes));
    }
  }
  void write_at(uint64_t at, const void* data, size_t bytes) {
    const auto* from = static_cast<const char*>(data);
    while (bytes > 0) {
      const ssize_t done = ::pwrite(fd_, from, bytes, static_cast<off_t>(at));
      if (done < 0 && errno == EINTR) continue;
      if (done <= 0) fail_io(path_, "write");
      from += done;
      at += static_cast<uint64_t>(done);
      bytes -= static_cast<size_t>(done);
    }
  }
  void sync() {
    if (::fsync(fd_) != 0) fail_io(path_, "sync");
  }

 private:
  std::string path_;
  int fd_;
};

/// Runs `work` on every rank and lets all of them fail if one does.
void together(const Group& group, std::string_view what, const std::function<void()>& work) {
  std::string error;
  try {
    work();
  } catch (const Error& e) {
    error = e.what();
  }
  const std::vector<int64_t> failed = group.all_gather(error.empty() ? 0 : 1, what);
  for (size_t r = 0; r < failed.size(); ++r) {
    if (failed[r] == 0) continue;
    if (!error.empty()) fail(ErrorKind::kInput, "{}", error);
    fail(ErrorKind::kInput, "checkpoint: rank {} could not {}; see its message", r, what);
  }
}

nlohmann::json read_state(const std::string& folder) {
  const fs::path path = fs::path(folder) / kStateFile;
  LOCKSTEP_CHECK(fs::exists(path),
                 kInput,
                 "checkpoint {}: there is no {}, so the save did not finish; use an earlier "
                 "checkpoint",
                 folder,
                 kStateFile);
  std::ifstream in(path);
  nlohmann::json state = nlohmann::json::parse(in, nullptr, /*allow_exceptions=*/false);
  LOCKSTEP_CHECK(state.is_object() && state.contains("files") && state.contains("step"),
                 kInput,
                 "checkpoint {}: {} is damaged; use an earlier checkpoint",
                 folder,
                 kStateFile);
  for (const auto& [name, bytes] : state["files"].items()) {
    std::error_code error;
    const uint64_t size = fs::file_size(fs::path(folder) / name, error);
    LOCKSTEP_CHECK(!error && size == bytes.get<uint64_t>(),
                   kInput,
                   "checkpoint {}: {} has {} bytes, {} says {}; use an earlier checkpoint",
                   folder,
                   name,
                   error ? 0 : size,
                   kStateFile,
                   bytes.get<uint64_t>());
  }
  return state;
}

/// This rank's rows of a stored tensor.
void read_rows(const model::Safetensors& file,
               const std::string& folder,
               const std::string& name,
               const Placement& placed,
               const Shard& shard,
               Tensor& into) {
  LOCKSTEP_CHECK(file.contains(name), kInput, "checkpoint {}: {} is missing", folder, name);
  const Tensor whole = file.load(name);
  check_shape(whole, placed.parameter.shape, fmt::format("checkpoint {}: {}", folder, name));
  const Tensor from = whole.reshape({-1});
  const Tensor flat = into.view({-1});
  for (const Run& run : runs(placed, shard.begin, shard.end))
    flat.narrow(0, run.part, run.count).copy_(from.narrow(0, run.whole, run.count));
  file.release(name);
}

}  // namespace

void save_checkpoint(const std::string& folder,
                     const TrainingState& state,
                     const TrainingParts& parts) {
  const at::NoGradGuard no_grad;
  const Group& all = parts.mesh.all();
  const fs::path final_path = fs::path(folder).lexically_normal();
  const fs::path partial =
      final_path.parent_path() / fmt::format(".{}.partial", final_path.filename().string());
  const std::vector<Placement> placed = placements(parts);
  const std::vector<Part> files = files_of(parts, placed);
  std::vector<model::SafetensorsLayout> layouts;
  layouts.reserve(files.size());
  for (const Part& part : files) layouts.push_back(layout_of(part.tensors));

  together(all, "start the checkpoint", [&] {
    if (all.rank() != 0) return;
    LOCKSTEP_CHECK(
        !fs::exists(final_path), kInput, "checkpoint {} exists already; choose a new name", folder);
    std::error_code error;
    fs::remove_all(partial, error);
    fs::create_directories(partial, error);
    LOCKSTEP_CHECK(
        !error, kInput, "checkpoint: cannot create {}: {}", partial.string(), error.message());
    for (size_t f = 0; f < files.size(); ++f) {
      OpenFile file((partial / files[f].file).string(), O_WRONLY | O_CREAT | O_EXCL);
      file.allocate(layouts[f].file_bytes);
      file.write_at(0, layouts[f].head.data(), layouts[f].head.size());
      file.sync();
    }
    model::AtomicFile config((partial / "config.json").string());
    const std::string text = model::export_config(parts.config);
    config.write(text.data(), text.size());
    config.commit();
  });
  together(all, "write its part of the checkpoint", [&] {
    for (size_t f = 0; f < files.size(); ++f) {
      if (files[f].rows.empty()) continue;
      OpenFile file((partial / files[f].file).string(), O_WRONLY);
      for (size_t i = 0; i < placed.size(); ++i) {
        const Shard& shard = parts.params.shards()[i];
        const auto rows = files[f].rows.find(shard.spec.name);
        if (rows == files[f].rows.end() || rows->second.numel() == 0) continue;
        const Tensor value = rows->second.contiguous();
        const auto width = static_cast<int64_t>(value.element_size());
        const auto* data = static_cast<const char*>(value.const_data_ptr());
        const uint64_t base = layouts[f].offset.at(shard.spec.name);
        for (const Run& run : runs(placed[i], shard.begin, shard.end))
          file.write_at(base + static_cast<uint64_t>(run.whole * width),
                        data + run.part * width,
                        static_cast<size_t>(run.count * width));
      }
      file.sync();
    }
  });
  together(all, "finish the checkpoint", [&] {
    if (all.rank() != 0) return;
    nlohmann::ordered_json json;
    json["format"] = "lockstep-training-1";
    json["step"] = state.step;
    json["optimizer"] = optimizer_name(parts.optimizer);
    json["optimizer_steps"] = parts.optimizer != nullptr ? parts.optimizer->num_steps() : 0;
    json["policy"] = parts.num.name();
    json["topology"] = model::to_string(parts.mesh.topology());
    json["values"] = state.values;
    for (size_t f = 0; f < files.size(); ++f) json["files"][files[f].file] = layouts[f].file_bytes;
    model::AtomicFile file((partial / kStateFile).string());
    const std::string text = json.dump(2) + "\n";
    file.write(text.data(), text.size());
    file.commit();
    std::error_code error;
    fs::rename(partial, final_path, error);
    LOCKSTEP_CHECK(!error,
                   kInput,
                   "checkpoint: cannot rename {} to {}: {}",
                   partial.string(),
                   folder,
                   error.message());
    model::sync_folder(final_path.has_parent_path() ? final_path.parent_path().string() : ".");
  });
}

std::vector<std::pair<std::string, uint64_t>> checkpoint_files(const model::ModelConfig& config,
                                                               const model::Numerics& num,
                                                               OptimizerKind optimizer) {
  std::vector<model::TensorToWrite> weights;
  std::map<std::string_view, std::vector<model::TensorToWrite>> moments;
  for (const ParamSpec& spec : parameter_specs(config, num, model::Topology{}, Coordinates{})) {
    weights.push_back(
        {spec.name, spec.trainable ? num.acc() : spec.compute_dtype, spec.shape, nullptr});
    if (!spec.trainable) continue;
    for (const std::string_view moment : Optimizer::state_names(optimizer, spec))
      moments[moment].push_back(weights.back());
  }
  std::vector<std::pair<std::string, uint64_t>> files{
      {kWeightsFile, layout_of(weights).file_bytes}};
  for (const std::string_view moment : Optimizer::state_names(optimizer))
    files.emplace_back(moment_file(moment), layout_of(moments[moment]).file_bytes);
  return files;
}

std::unique_ptr<model::WeightSource> open_training_checkpoint(const std::string& folder) {
  (void)read_state(folder);
  return model::open_checkpoint(folder);
}

TrainingState load_checkpoint(const std::string& folder, const TrainingParts& parts) {
  const at::NoGradGuard no_grad;
  const nlohmann::json json = read_state(folder);
  TrainingState state;
  state.step = json["step"].get<int64_t>();
  state.values = json.value("values", state.values);
  const std::vector<Placement> placed = placements(parts);
  const auto file = [&](std::string_view name) {
    return model::Safetensors::open((fs::path(folder) / name).string());
  };
  const model::Safetensors weights = file(kWeightsFile);
  std::vector<Shard>& shards = parts.params.shards();
  for (size_t i = 0; i < placed.size(); ++i)
    read_rows(weights, folder, shards[i].spec.name, placed[i], shards[i], shards[i].value);
  if (parts.optimizer == nullptr) return state;

  const std::string saved = json.value("optimizer", "none");
  LOCKSTEP_CHECK(saved == optimizer_name(parts.optimizer),
                 kInput,
                 "checkpoint {} holds the state of optimizer {}, this run uses {}; change the "
                 "optimizer or load weights only",
                 folder,
                 saved,
                 optimizer_name(parts.optimizer));
  for (const std::string_view moment : Optimizer::state_names(parts.optimizer->options().kind)) {
    const model::Safetensors moments = file(moment_file(moment));
    for (size_t i = 0; i < placed.size(); ++i) {
      if (!shards[i].spec.trainable) continue;
      const std::string& name = shards[i].spec.name;
      std::map<std::string, Tensor>& own = parts.optimizer->state(name);
      const auto found = own.find(std::string(moment));
      if (found != own.end()) read_rows(moments, folder, name, placed[i], shards[i], found->second);
    }
  }
  parts.optimizer->set_num_steps(json.value("optimizer_steps", state.step));
  return state;
}

std::string latest_checkpoint(const std::string& folder, const std::string& prefix) {
  std::string newest;
  int64_t newest_step = -1;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(prefix) || !fs::exists(entry.path() / kStateFile)) continue;
    int64_t step = 0;
    const char* end = name.data() + name.size();
    const auto [stop, bad] = std::from_chars(name.data() + prefix.size(), end, step);
    if (bad == std::errc() && stop == end && step > newest_step) {
      newest_step = step;
      newest = entry.path().string();
    }
  }
  return newest;
}

}  // namespace lockstep::parallel
