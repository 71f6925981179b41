#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "model/checkpoint/safetensors.hpp"
#include "model/config/json_text.hpp"

namespace lockstep::model {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

struct DtypeRow {
  std::string_view name;
  at::ScalarType dtype;
};

constexpr std::array<DtypeRow, 15> kDtypes = {{
    {"F64", at::kDouble},
    {"F32", at::kFloat},
    {"F16", at::kHalf},
    {"BF16", at::kBFloat16},
    {"F8_E4M3", at::kFloat8_e4m3fn},
    {"F8_E5M2", at::kFloat8_e5m2},
    {"I64", at::kLong},
    {"I32", at::kInt},
    {"I16", at::kShort},
    {"I8", at::kChar},
    {"U64", at::kUInt64},
    {"U32", at::kUInt32},
    {"U16", at::kUInt16},
    {"U8", at::kByte},
    {"BOOL", at::kBool},
}};

/// Bytes of a shape, or nothing on overflow.
std::optional<uint64_t> shape_bytes(const std::vector<int64_t>& shape, at::ScalarType dtype) {
  uint64_t bytes = c10::elementSize(dtype);
  for (int64_t size : shape) {
    if (__builtin_mul_overflow(bytes, static_cast<uint64_t>(size), &bytes)) return std::nullopt;
  }
  return bytes;
}

/// Entry of a header, checked by itself.
TensorInfo read_entry(const json& entry, const std::string& where, uint64_t data_begin) {
  const auto complain = [&](std::string_view what) {
    fail(ErrorKind::kInput, "{}: {}; its header entry is {}", where, what, entry.dump());
  };
  if (!entry.is_object() || !entry.contains("dtype") || !entry.contains("shape") ||
      !entry.contains("data_offsets") || !entry["dtype"].is_string() ||
      !entry["shape"].is_array() || !entry["data_offsets"].is_array() ||
      entry["data_offsets"].size() != 2) {
    complain("expected dtype, shape and two data_offsets");
  }
  TensorInfo info{};
  info.dtype = dtype_of_safetensors(entry["dtype"].get<std::string>(), where);
  for (const json& size : entry["shape"]) {
    if (!size.is_number_unsigned() || size.get<uint64_t>() > uint64_t{1} << 62) {
      complain("a size in shape is not a number >= 0");
    }
    info.shape.push_back(size.get<int64_t>());
  }
  for (const json& offset : entry["data_offsets"]) {
    if (!offset.is_number_unsigned()) complain("a data offset is not a number >= 0");
  }
  const auto begin = entry["data_offsets"][0].get<uint64_t>();
  const auto end = entry["data_offsets"][1].get<uint64_t>();
  if (begin > end) complain("data_offsets run backwards");
  const auto bytes = shape_bytes(info.shape, info.dtype);
  if (bytes != end - begin) {
    complain(fmt::format("shape and dtype need {} bytes but data_offsets span {}",
                         bytes ? std::to_string(*bytes) : "more than 2^64",
                         end - begin));
  }
  info.begin = data_begin + begin;
  info.end = data_begin + end;
  return info;
}

std::string list_all(const std::vector<std::string>& names) {
  return fmt::format("{}", fmt::join(names, ", "));
}

}  // namespace

std::string_view safetensors_dtype(at::ScalarType dtype) {
  for (const DtypeRow& row : kDtypes) {
    if (row.dtype == dtype) return row.name;
  }
  fail(ErrorKind::kInput, "safetensors cannot hold dtype {}", dtype_name(dtype));
}

at::ScalarType dtype_of_safetensors(std::string_view name, std::string_view origin) {
  std::vector<std::string_view> known;
  for (const DtypeRow& row : kDtypes) {
    if (row.name == name) return row.dtype;
    known.push_back(row.name);
  }
  fail(ErrorKind::kInput,
       "{}: unknown dtype \"{}\"; known: {}",
       origin,
       name,
       fmt::join(known, ", "));
}

int64_t TensorInfo::numel() const {
  int64_t count = 1;
  for (int64_t size : shape) count *= size;
  return count;
}

void Safetensors::add_file(const std::string& path) {
  auto file = MappedFile::open(path);
  LOCKSTEP_CHECK(file->size() >= 8,
                 kInput,
                 "{}: {} bytes are too few for a safetensors file",
                 path,
                 file->size());
  uint64_t header_bytes = 0;
  for (int i = 7; i >= 0; --i) {
    header_bytes = header_bytes << 8 | static_cast<uint64_t>(file->data()[i]);
  }
  LOCKSTEP_CHECK(header_bytes <= file->size() - 8,
                 kInput,
                 "{}: the header claims {} bytes but the file has {}; it is cut off or not "
                 "safetensors",
                 path,
                 header_bytes,
                 file->size());
  const std::string_view text(reinterpret_cast<const char*>(file->data()) + 8, header_bytes);
  check_json(text, path);
  const json header = json::parse(text);
  LOCKSTEP_CHECK(header.is_object(), kInput, "{}: the header is not a JSON object", path);

  const uint64_t data_begin = 8 + header_bytes;
  std::vector<std::pair<const TensorInfo*, const std::string*>> order;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") {
      LOCKSTEP_CHECK(entry.is_object(), kInput, "{}: __metadata__ is not an object", path);
      for (const auto& [key, value] : entry.items()) {
        LOCKSTEP_CHECK(value.is_string(),
                       kInput,
                       "{}: __metadata__.{} is {}; only strings are allowed",
                       path,
                       key,
                       value.dump());
        metadata_[key] = value.get<std::string>();
      }
      continue;
    }
    TensorInfo info = read_entry(entry, fmt::format("{}: tensor {}", path, name), data_begin);
    info.shard = files_.size();
    const auto [at, is_new] = tensors_.emplace(name, std::move(info));
    LOCKSTEP_CHECK(is_new,
                   kInput,
                   "tensor {} is in two files, {} and {}; remove one",
                   name,
                   files_[at->second.shard]->path(),
                   path);
    order.emplace_back(&at->second, &at->first);
  }

  std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return std::pair(a.first->begin, a.first->end) < std::pair(b.first->begin, b.first->end);
  });
  uint64_t at = data_begin;
  for (const auto& [info, name] : order) {
    LOCKSTEP_CHECK(info->end <= file->size(),
                   kInput,
                   "{}: tensor {} ends at byte {} but the file has {}; the file is cut off",
                   path,
                   *name,
                   info->end,
                   file->size());
    LOCKSTEP_CHECK(info->begin == at,
                   kInput,
                   "{}: tensor {} starts at data offset {}, expected {}: tensors {}",
                   path,
                   *name,
                   info->begin - data_begin,
                   at - data_begin,
                   info->begin < at ? "overlap" : "leave a gap");
    at = info->end;
  }
  LOCKSTEP_CHECK(at == file->size(),
                 kInput,
                 "{}: {} bytes follow the last tensor; the header does not describe this file",
                 path,
                 file->size() - at);
  files_.push_back(std::move(file));
}

void Safetensors::check_index(const std::string& index_path) {
  const std::string text = read_text_file(index_path);
  check_json(text, index_path);
  const json index = json::parse(text);
  LOCKSTEP_CHECK(index.is_object() && index.contains("weight_map") &&
                     index["weight_map"].is_object() && !index["weight_map"].empty(),
                 kInput,
                 "{}: no weight_map {{tensor: file}}",
                 index_path);
  const fs::path folder = fs::path(index_path).parent_path();
  std::map<std::string, std::string> weight_map;
  std::map<std::string, size_t> shards;
  for (const auto& [name, file] : index["weight_map"].items()) {
    LOCKSTEP_CHECK(file.is_string() && fs::path(file.get<std::string>()).filename().string() ==
                                           file.get<std::string>(),
                   kInput,
                   "{}: weight_map.{} is {}; expected the name of a file in this folder",
                   index_path,
                   name,
                   file.dump());
    weight_map[name] = file.get<std::string>();
    shards.emplace(weight_map[name], 0);
  }
  std::vector<std::string> missing_files;
  for (const auto& [name, unused] : shards) {
    if (!fs::exists(folder / name)) missing_files.push_back(name);
  }
  LOCKSTEP_CHECK(missing_files.empty(),
                 kInput,
                 "{}: names files that do not exist: {}; fetch them, or rewrite the index",
                 index_path,
                 list_all(missing_files));
  for (auto& [name, number] : shards) {
    number = files_.size();
    add_file((folder / name).string());
  }
  std::vector<std::string> absent, unlisted;
  for (const auto& [name, file] : weight_map) {
    const auto found = tensors_.find(name);
    if (found == tensors_.end() || found->second.shard != shards[file]) {
      absent.push_back(fmt::format("{} in {}", name, file));
    }
  }
  for (const auto& [name, info] : tensors_) {
    if (!weight_map.contains(name)) unlisted.push_back(name);
  }
  LOCKSTEP_CHECK(
      absent.empty() && unlisted.empty(),
      kInput,
      "{}: the index disagrees with the files: {} listed but absent [{}], {} present but "
      "not listed [{}]",
      index_path,
      absent.size(),
      list_all(absent),
      unlisted.size(),
      list_all(unlisted));
}

Safetensors Safetensors::open(const std::string& path) {
  Safetensors result;
  if (!fs::is_directory(path)) {
    if (path.ends_with(".json")) {
      result.check_index(path);
    } else {
      result.add_file(path);
    }
    return result;
  }
  const fs::path folder(path);
  const fs::path single = folder / "model.safetensors";
  const fs::path index = folder / "model.safetensors.index.json";
  const bool has_single = fs::exists(single), has_index = fs::exists(index);
  LOCKSTEP_CHECK(
      !(has_single && has_index),
      kInput,
      "{}: has both model.safetensors and model.safetensors.index.json; remove the stale "
      "one",
      path);
  if (has_single) {
    result.add_file(single.string());
  } else if (has_index) {
    result.check_index(index.string());
  } else {
    std::vector<std::string> shards;
    for (const auto& entry : fs::directory_iterator(folder)) {
      if (entry.path().extension() == ".safetensors") shards.push_back(entry.path().string());
    }
    std::sort(shards.begin(), shards.end());
    LOCKSTEP_CHECK(!shards.empty(), kInput, "{}: no .safetensors file in this folder", path);
    for (const std::string& shard : shards) result.add_file(shard);
  }
  return result;
}

const TensorInfo& Safetensors::info(std::string_view name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) {
    auto near = tensors_.lower_bound(name);
    if (near != tensors_.begin()) --near;
    std::vector<std::string> names;
    for (int i = 0; i < 3 && near != tensors_.end(); ++i, ++near) names.push_back(near->first);
    fail(ErrorKind::kInput,
         "no tensor {} in {} files; near it: {}",
         name,
         files_.size(),
         fmt::join(names, ", "));
  }
  return found->second;
}

Tensor Safetensors::load(std::string_view name) const {
  const TensorInfo& tensor = info(name);
  const auto options = at::TensorOptions().dtype(tensor.dtype);
  const auto& file = files_[tensor.shard];
  const std::byte* data = file->data() + tensor.begin;
  if (reinterpret_cast<uintptr_t>(data) % c10::elementSize(tensor.dtype) != 0) {
    Tensor copy = at::empty(tensor.shape, options);
    std::memcpy(copy.mutable_data_ptr(), data, tensor.bytes());
    return copy;
  }
  return at::from_blob(
      const_cast<std::byte*>(data), tensor.shape, [file](void*) {}, options);
}

void Safetensors::release(std::string_view name) const {
  const TensorInfo& tensor = info(name);
  files_[tensor.shard]->release(tensor.begin, tensor.end);
}

uint64_t Safetensors::total_bytes() const {
  uint64_t total = 0;
  for (const auto& [name, tensor] : tensors_) total += tensor.bytes();
  return total;
}

}  // namespace lockstep::model
