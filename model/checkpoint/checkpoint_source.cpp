#include "model/checkpoint/checkpoint_source.hpp"

#include <algorithm>
#include <filesystem>

#include "model/base/same_bytes.hpp"

namespace lockstep::model {

CheckpointSource::CheckpointSource(const std::string& folder, ModelConfig config)
    : config_(std::move(config)),
      files_(Safetensors::open(folder)),
      parameters_(expected_parameters(config_)),
      match_(match_names(config_, parameters_, files_.tensors())) {
  for (size_t i = 0; i < parameters_.size(); ++i) index_[parameters_[i].name] = i;
  const auto layout = files_.metadata().find(std::string(kLayoutKey));
  LOCKSTEP_CHECK(layout == files_.metadata().end() || layout->second == kLayout,
                 kInput,
                 "{}: written in layout {}, but this program reads {}; convert it with the program "
                 "that wrote it",
                 folder,
                 layout->second,
                 kLayout);
  const std::string problems = match_.problems();
  LOCKSTEP_CHECK(problems.empty(),
                 kInput,
                 "{}: the tensors do not fit the config: every tensor must be used once and every "
                 "parameter filled once. Check that config.json belongs to these files.{}",
                 folder,
                 problems);
  if (config_.tie_word_embeddings) check_tied_copy();
}

void CheckpointSource::check_tied_copy() const {
  const Tensor embed = load("embed_tokens.weight"), head = load("lm_head.weight");
  LOCKSTEP_CHECK(same_bytes(embed, head),
                 kInput,
                 "tie_word_embeddings is true but lm_head.weight differs from embed_tokens.weight; "
                 "set it to false, or remove lm_head.weight");
}

std::vector<std::string> CheckpointSource::names() const {
  std::vector<std::string> names;
  for (const Parameter& p : parameters_) names.push_back(p.name);
  return names;
}

size_t CheckpointSource::index_of(const std::string& name) const {
  const auto found = index_.find(name);
  LOCKSTEP_CHECK(found != index_.end(),
                 kInput,
                 "no parameter {} in this model of {} parameters (the first is {})",
                 name,
                 parameters_.size(),
                 parameters_.front().name);
  return found->second;
}

WeightSpec CheckpointSource::spec(const std::string& name) const {
  const size_t i = index_of(name);
  return {match_.bindings[i].dtype, parameters_[i].shape};
}

Tensor CheckpointSource::load_part(const Binding& binding, size_t part) const {
  const Tensor stored = files_.load(binding.tensors[part]);
  const std::string& scale = binding.scales[part];
  return scale.empty() ? stored : dequantize_blocks(stored, files_.load(scale));
}

Tensor CheckpointSource::load(const std::string& name) const {
  return load_rows(name, 0, parameters_[index_of(name)].shape.front());
}

Tensor CheckpointSource::load_rows(const std::string& name, int64_t begin, int64_t end) const {
  const size_t i = index_of(name);
  const Parameter& p = parameters_[i];
  const Binding& binding = match_.bindings[i];
  LOCKSTEP_CHECK(begin >= 0 && begin <= end && end <= p.shape.front(),
                 kInput,
                 "{}: rows [{}, {}) of {}",
                 name,
                 begin,
                 end,
                 p.shape.front());
  if (binding.tensors.size() == 1) {
    return load_part(binding, 0).view(p.shape).narrow(0, begin, end - begin);
  }
  std::vector<int64_t> shape = p.shape;
  shape.front() = end - begin;
  Tensor rows = at::empty(shape, at::TensorOptions().dtype(binding.dtype));
  const int64_t row = p.numel() / p.shape.front();
  const auto width = static_cast<int64_t>(c10::elementSize(binding.dtype));
  auto* out = static_cast<std::byte*>(rows.mutable_data_ptr());
  int64_t at = 0;  // first element of the part
  const auto& parts = p.parts_in(binding.naming);
  for (size_t k = 0; k < parts.size(); ++k) {
    const int64_t from = std::max(at, begin * row), to = std::min(at + parts[k].numel(), end * row);
    if (from < to) {
      const Tensor part = load_part(binding, k);
      const auto* in = static_cast<const std::byte*>(part.const_data_ptr());
      std::memcpy(out + (from - begin * row) * width,
                  in + (from - at) * width,
                  static_cast<size_t>((to - from) * width));
    }
    at += parts[k].numel();
  }
  return rows;
}

std::vector<std::pair<std::string, Tensor>> CheckpointSource::disk_tensors(
    const std::string& name, const Tensor& value) const {
  const size_t i = index_of(name);
  const Binding& binding = match_.bindings[i];
  const std::vector<Tensor> parts = split_parts(parameters_[i], binding.naming, value);
  std::vector<std::pair<std::string, Tensor>> named;
  for (size_t k = 0; k < parts.size(); ++k) {
    // A file may hold the part in its other shape.
    named.emplace_back(binding.tensors[k], parts[k].view(files_.info(binding.tensors[k]).shape));
  }
  return named;
}

void CheckpointSource::release(const std::string& name) const {
  const Binding& binding = match_.bindings[index_of(name)];
  for (const std::string& tensor : binding.tensors) files_.release(tensor);
  for (const std::string& scale : binding.scales) {
    if (!scale.empty()) files_.release(scale);
  }
}

int64_t CheckpointSource::num_quantized() const {
  int64_t count = 0;
  for (const Binding& binding : match_.bindings) {
    count += std::count_if(
        binding.scales.begin(), binding.scales.end(), [](const auto& s) { return !s.empty(); });
  }
  return count;
}

std::unique_ptr<WeightSource> open_checkpoint(const std::string& folder, ConfigDefaults defaults) {
  LOCKSTEP_CHECK(std::filesystem::is_directory(folder),
                 kInput,
                 "{} is not a folder; a checkpoint is a folder with config.json and safetensors",
                 folder);
  return std::make_unique<CheckpointSource>(folder, load_config(folder, defaults));
}

std::unique_ptr<WeightSource> open_checkpoint(const std::string& folder, ModelConfig config) {
  validate(config, folder);
  return std::make_unique<CheckpointSource>(folder, std::move(config));
}

}  // namespace lockstep::model
