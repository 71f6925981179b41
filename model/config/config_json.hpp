// Hugging Face config files of this model, read and written: composite glm5_next or text
// glm5_next_text, nested or flat, under every alias the programs around it use.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "model/config/model_config.hpp"

namespace lockstep::model {

/// Resolves a config. `origin` (a path) starts every message. A key and its alias that disagree, a
/// wrong type, an unsupported value or a missing architecture key is kConfig naming key, value,
/// what is allowed and the fix; malformed JSON or a repeated key is kInput.
/// Missing keys: sizes, index_kpool, swiglu_limit and layer_types are refused under kRefuse, since
/// the programs disagree about them or no default fits a model of another size; kHf and kTrainer
/// take that program's class default. Everything else has one default.
ModelConfig parse_config(std::string_view json_text,
                         ConfigDefaults defaults,
                         std::string_view origin);

/// parse_config of a file, or of config.json in a folder.
ModelConfig load_config(const std::string& path, ConfigDefaults defaults = ConfigDefaults::kRefuse);

/// The config file to put beside exported weights. Members of source_json keep their bytes and
/// order unless the struct now says something else; `dtype` and a head_dim of 0 are dropped; every
/// alias pair gets both names; keys that an engine refuses to miss are added. `dtype` ("bfloat16")
/// is written when not empty. Parsing the result gives the same config. `quantized` false drops
/// quantization_config, for weights that are no longer quantized.
std::string export_config(const ModelConfig& config,
                          std::string_view dtype = {},
                          bool quantized = true);

/// The resolved architecture as a JSON object with fixed keys, for people and for comparing.
std::string describe_config(const ModelConfig& config);

/// Architecture by name: glm-5.3-flash (the real sizes), tiny (hidden 96, 4 layers), mini (hidden
/// 256, 4 layers). Throws kConfig listing the names otherwise.
ModelConfig preset_config(std::string_view name);
std::vector<std::string> preset_names();

/// The config with some keys of its file replaced, e.g. {"num_hidden_layers": 8}. A new depth
/// without its own layer lists repeats the pattern of three KDA layers and one sparse one, and
/// keeps the number of leading dense layers. Throws as parse_config.
ModelConfig with_overrides(const ModelConfig& config, std::string_view json_object);

/// Throws kConfig naming key, value, allowed values and the fix unless the sizes fit together.
void validate(const ModelConfig& config, std::string_view origin);

}  // namespace lockstep::model
