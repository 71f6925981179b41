#include <algorithm>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "model/checkpoint/safetensors.hpp"

namespace lockstep::model {
namespace {

namespace fs = std::filesystem;
using Shard = std::vector<const TensorToWrite*>;

/// Greedy, in the given order.
std::vector<Shard> split(const std::vector<TensorToWrite>& tensors, uint64_t max_bytes) {
  std::vector<Shard> shards(1);
  uint64_t filled = 0;
  for (const TensorToWrite& tensor : tensors) {
    if (!shards.back().empty() && filled + tensor.bytes() > max_bytes) {
      shards.emplace_back();
      filled = 0;
    }
    shards.back().push_back(&tensor);
    filled += tensor.bytes();
  }
  for (Shard& shard : shards) {
    std::stable_sort(shard.begin(), shard.end(), [](const auto* a, const auto* b) {
      return c10::elementSize(a->dtype) > c10::elementSize(b->dtype);
    });
  }
  return shards;
}

std::string header_of(const Shard& shard, const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  uint64_t at = 0;
  for (const TensorToWrite* tensor : shard) {
    auto& entry = header[tensor->name];
    entry["dtype"] = std::string(safetensors_dtype(tensor->dtype));
    entry["shape"] = tensor->shape;
    entry["data_offsets"] = {at, at + tensor->bytes()};
    at += tensor->bytes();
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');  // data starts aligned
  return text;
}

/// Length and header: what comes before the data.
std::string head_of(const Shard& shard, const std::map<std::string, std::string>& metadata) {
  const std::string header = header_of(shard, metadata);
  std::string head;
  for (size_t i = 0; i < 8; ++i) head.push_back(static_cast<char>(header.size() >> (8 * i) & 0xFF));
  return head + header;
}

void write_shard(AtomicFile& file,
                 const Shard& shard,
                 const std::map<std::string, std::string>& metadata) {
  const std::string head = head_of(shard, metadata);
  file.write(head.data(), head.size());
  for (const TensorToWrite* tensor : shard) {
    const Tensor value = tensor->produce().contiguous();
    check_shape(value, tensor->shape, tensor->name);
    check_dtype(value, tensor->dtype, tensor->name);
    LOCKSTEP_CHECK(value.device().is_cpu(),
                   kInput,
                   "tensor {} to be written is on {}; move it to the CPU first",
                   tensor->name,
                   value.device().str());
    if (tensor->bytes() > 0) file.write(value.const_data_ptr(), tensor->bytes());
  }
}

/// Early and clear, where the system can tell; writing checks again.
void check_space(const std::string& folder, uint64_t needed) {
  std::error_code error;
  const fs::space_info space = fs::space(folder.empty() ? "." : folder, error);
  LOCKSTEP_CHECK(error || space.available >= needed,
                 kInput,
                 "cannot write to {}: {} bytes are needed but only {} are free; free some space or "
                 "choose another target",
                 folder,
                 needed,
                 space.available);
}

}  // namespace

uint64_t TensorToWrite::bytes() const {
  uint64_t bytes = c10::elementSize(dtype);
  for (int64_t size : shape) bytes *= static_cast<uint64_t>(size);
  return bytes;
}

std::vector<std::string> write_safetensors(const std::string& folder,
                                           const std::vector<TensorToWrite>& tensors,
                                           const WriteOptions& options) {
  std::set<std::string_view> names;
  uint64_t total = 0;
  for (const TensorToWrite& tensor : tensors) {
    LOCKSTEP_CHECK(names.insert(tensor.name).second && tensor.name != "__metadata__",
                   kInput,
                   "tensor {} is given twice or has a reserved name",
                   tensor.name);
    total += tensor.bytes();
  }
  check_space(folder, total);

  const std::vector<Shard> shards = split(tensors, options.max_shard_bytes);
  std::vector<std::string> files;
  std::vector<std::unique_ptr<AtomicFile>> open;
  std::map<std::string, std::string> weight_map;
  for (size_t i = 0; i < shards.size(); ++i) {
    files.push_back(shards.size() == 1
                        ? "model.safetensors"
                        : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size()));
    open.push_back(std::make_unique<AtomicFile>((fs::path(folder) / files.back()).string()));
    write_shard(*open.back(), shards[i], options.metadata);
    open.back()->finish();
    for (const TensorToWrite* tensor : shards[i]) weight_map[tensor->name] = files.back();
  }
  if (shards.size() > 1) {
    nlohmann::ordered_json index;
    index["metadata"]["total_size"] = total;
    index["weight_map"] = weight_map;
    files.emplace_back("model.safetensors.index.json");
    open.push_back(std::make_unique<AtomicFile>((fs::path(folder) / files.back()).string()));
    const std::string text = index.dump(2) + "\n";
    open.back()->write(text.data(), text.size());
    open.back()->finish();
  }
  for (const auto& file : open) file->commit();
  return files;
}

SafetensorsLayout layout_safetensors(const std::vector<TensorToWrite>& tensors,
                                     const std::map<std::string, std::string>& metadata) {
  const Shard shard = split(tensors, std::numeric_limits<uint64_t>::max()).front();
  SafetensorsLayout layout{head_of(shard, metadata), {}, 0};
  layout.file_bytes = layout.head.size();
  for (const TensorToWrite* tensor : shard) {
    layout.offset[tensor->name] = layout.file_bytes;
    layout.file_bytes += tensor->bytes();
  }
  return layout;
}

void write_safetensors_file(const std::string& path,
                            const std::map<std::string, Tensor>& tensors,
                            const std::map<std::string, std::string>& metadata) {
  std::vector<TensorToWrite> all;
  uint64_t total = 0;
  for (const auto& [name, tensor] : tensors) {
    all.push_back(
        {name, tensor.scalar_type(), tensor.sizes().vec(), [&value = tensor] { return value; }});
    total += all.back().bytes();
  }
  check_space(fs::path(path).parent_path().string(), total);
  AtomicFile file(path);
  write_shard(file, split(all, UINT64_MAX).front(), metadata);
  file.commit();
}

}  // namespace lockstep::model
