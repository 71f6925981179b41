// Which tensor of a checkpoint fills which parameter: names are first brought into one form, then
// looked up, then what this model does not have is dropped by rule, and whatever remains is an
// error.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "model/checkpoint/parameters.hpp"
#include "model/checkpoint/safetensors.hpp"

namespace lockstep::model {

/// Tensors that fill one parameter, in order.
struct Binding {
  Naming naming = Naming::kReleased;
  std::vector<std::string> tensors;      ///< names in the files, one per part
  std::vector<std::string> scales;       ///< block scales of FP8 payloads, "" where there is none
  at::ScalarType dtype = at::kBFloat16;  ///< as loaded: bfloat16 for FP8
};

struct NameMatch {
  std::vector<Binding> bindings;     ///< by parameter; unusable unless problems() is empty
  std::vector<std::string> dropped;  ///< vision tower and MTP layers
  // One line for each tensor concerned.
  std::vector<std::string> missing, unknown, duplicated, wrong_shape, wrong_dtype;

  /// All lines under headings, or empty if everything fits.
  [[nodiscard]] std::string problems() const;
};

/// Matches tensors with parameters without reading data. Prefixes "model." and "language_model."
/// are optional in any order; every naming scheme is accepted, also mixed between parameters.
/// Dropped: names under "visual.", and layers num_hidden_layers .. + num_nextn_predict_layers - 1.
/// With tied embeddings lm_head.weight may be absent.
NameMatch match_names(const ModelConfig& config,
                      const std::vector<Parameter>& parameters,
                      const std::map<std::string, TensorInfo, std::less<>>& tensors);

/// The name without the prefixes under which text models are stored.
std::string_view bare_name(std::string_view disk_name);

/// Block scales of FP8: rows and columns of a block.
inline constexpr int64_t kScaleBlock = 128;

/// bfloat16(float32(payload) * scale of its block). payload [..., out, in] FP8; scale [...,
/// ceil(out / 128), ceil(in / 128)] floating; edge blocks may be partial. The product is float32,
/// rounded once.
Tensor dequantize_blocks(const Tensor& payload, const Tensor& scale);

}  // namespace lockstep::model
