// safetensors files: one file or the shards of a folder, read through a mapping and written whole
// or not at all. Format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape,
// data_offsets}}, then the data, tensors one after another without gaps.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "model/base/torch.hpp"
#include "model/checkpoint/mapped_file.hpp"

namespace lockstep::model {

/// Name of a dtype in a header ("BF16"), and back. Throws kInput for a dtype the format or this
/// program does not know.
std::string_view safetensors_dtype(at::ScalarType dtype);
at::ScalarType dtype_of_safetensors(std::string_view name, std::string_view origin);

struct TensorInfo {
  at::ScalarType dtype;
  std::vector<int64_t> shape;
  size_t shard;         ///< index into files()
  uint64_t begin, end;  ///< bytes in that file

  [[nodiscard]] uint64_t bytes() const { return end - begin; }
  [[nodiscard]] int64_t numel() const;
};

/// Tensors by name over one or more files. Opening reads headers only.
class Safetensors {
 public:
  /// `path`: a .safetensors file; an index file; or a folder with model.safetensors, or with
  /// model.safetensors.index.json and its shards, or with shards alone. Throws kInput naming file
  /// and cause for: a header longer than the file, malformed or repeating JSON, an unknown dtype, a
  /// shape that does not match its bytes, offsets that overlap, leave gaps or pass the end,
  /// truncated or surplus data, a name in two shards, an index that disagrees with the shards, a
  /// folder with both a single file and an index.
  static Safetensors open(const std::string& path);

  /// Sorted by name.
  [[nodiscard]] const std::map<std::string, TensorInfo, std::less<>>& tensors() const {
    return tensors_;
  }
  /// Throws kInput naming the nearest existing names.
  [[nodiscard]] const TensorInfo& info(std::string_view name) const;
  [[nodiscard]] bool contains(std::string_view name) const {
    return tensors_.find(name) != tensors_.end();
  }
  /// View of the mapping (it keeps the file open; writing to it is a fault), or an aligned copy
  /// where the file puts the data at an address its dtype cannot be read from.
  [[nodiscard]] Tensor load(std::string_view name) const;
  /// Drops the pages of this tensor from memory; views of it stay valid and read the file again.
  void release(std::string_view name) const;

  [[nodiscard]] const std::vector<std::shared_ptr<const MappedFile>>& files() const {
    return files_;
  }
  /// __metadata__ of all files.
  [[nodiscard]] const std::map<std::string, std::string>& metadata() const { return metadata_; }
  [[nodiscard]] uint64_t total_bytes() const;

 private:
  void add_file(const std::string& path);
  void check_index(const std::string& index_path);

  std::vector<std::shared_ptr<const MappedFile>> files_;
  std::map<std::string, TensorInfo, std::less<>> tensors_;
  std::map<std::string, std::string> metadata_;
};

/// A tensor to write, produced when its turn comes, so that only one needs to be in memory.
struct TensorToWrite {
  std::string name;
  at::ScalarType dtype;
  std::vector<int64_t> shape;
  std::function<Tensor()> produce;  ///< must have that dtype and shape

  [[nodiscard]] uint64_t bytes() const;
};

struct WriteOptions {
  uint64_t max_shard_bytes = 5'000'000'000;  ///< of data; a larger tensor gets a shard of its own
  std::map<std::string, std::string> metadata = {{"format", "pt"}};
};

/// Writes model.safetensors, or model-00001-of-0000N.safetensors and model.safetensors.index.json
/// (metadata.total_size, weight_map), into an existing folder. Tensors keep the given order, wider
/// dtypes first within a shard so that all are aligned; the bytes depend on the arguments alone.
/// All files are complete under temporary names before the first is renamed, the index last; a
/// failure while writing leaves none. Returns the names of the files. Throws kInput (repeated name,
/// full disk, wrong produced tensor).
std::vector<std::string> write_safetensors(const std::string& folder,
                                           const std::vector<TensorToWrite>& tensors,
                                           const WriteOptions& options = {});

/// Where the bytes of each tensor of one file will be, for writers that fill it together.
struct SafetensorsLayout {
  std::string head;                        ///< first bytes of the file: length and JSON header
  std::map<std::string, uint64_t> offset;  ///< of each tensor's data in the file
  uint64_t file_bytes = 0;
};
/// `produce` is not called.
SafetensorsLayout layout_safetensors(const std::vector<TensorToWrite>& tensors,
                                     const std::map<std::string, std::string>& metadata);

/// One file of tensors in memory.
void write_safetensors_file(const std::string& path,
                            const std::map<std::string, Tensor>& tensors,
                            const std::map<std::string, std::string>& metadata = {});

}  // namespace lockstep::model
