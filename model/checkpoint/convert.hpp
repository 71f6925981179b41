// Checkpoints from one form into another, and what is inside them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "model/checkpoint/weight_source.hpp"

namespace lockstep::model {

struct ExportOptions {
  uint64_t max_shard_bytes = 5'000'000'000;
  std::string copy_from;  ///< folder whose tokenizer and template files go along; empty: none
};

struct ConvertReport {
  std::vector<std::string> files;    ///< written
  std::vector<std::string> dropped;  ///< tensors this model does not have
  int64_t num_tensors = 0, num_parameters = 0;
  uint64_t bytes = 0;         ///< of tensors
  int64_t num_quantized = 0;  ///< FP8 tensors that became bfloat16; 0: the conversion is lossless

  [[nodiscard]] std::string text() const;
};

/// Writes a checkpoint folder: config.json, shards and index. kReleased and kTransformers folders
/// open in transformers without a generation config; a composite config gets composite names. Bytes
/// are copied in the stored dtype. The result is read again and compared byte by byte with the
/// source before it gets its name, so a folder that exists is whole. Throws kInput if `to` exists
/// and is not an empty folder, if the disk is full, or if the comparison fails.
ConvertReport export_checkpoint(const WeightSource& source,
                                const std::string& to,
                                Naming naming = Naming::kReleased,
                                const ExportOptions& options = {});

/// export_checkpoint of a folder. `format` is hf (released names) or internal; kInput otherwise.
/// Files beside the weights (tokenizer, templates) are copied.
ConvertReport convert(const std::string& from,
                      const std::string& to,
                      std::string_view format,
                      ConfigDefaults defaults = ConfigDefaults::kRefuse,
                      uint64_t max_shard_bytes = ExportOptions{}.max_shard_bytes);

struct Inspection {
  std::string text;   ///< for people
  std::string json;   ///< keys: folder, files, tensors, totals, config, naming, dropped, problems
  bool fits = false;  ///< config and tensors belong together
  std::string problems;  ///< why they do not
};

/// What a checkpoint folder holds, from headers alone. A config or tensors that do not fit are
/// reported in the result; throws kInput only if the files cannot be read.
Inspection inspect(const std::string& folder, ConfigDefaults defaults = ConfigDefaults::kRefuse);

}  // namespace lockstep::model
