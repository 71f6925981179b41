// The parameters of the model by internal name, and the names of the same bytes on disk.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "model/base/torch.hpp"
#include "model/config/model_config.hpp"

namespace lockstep::model {

/// Naming schemes of tensors on disk. A checkpoint may mix them; writing uses one.
enum class Naming : uint8_t {
  kReleased,      ///< published files: one tensor per expert, three convolutions, flat hc_* names
  kTransformers,  ///< module names of transformers: stacked experts, one convolution, forget_gate
  kInternal,      ///< the names of this program
};
inline constexpr std::array<Naming, 3> kNamings = {
    Naming::kReleased, Naming::kTransformers, Naming::kInternal};
std::string_view naming_name(Naming naming);

/// A tensor on disk that holds a run of consecutive elements of a parameter, row-major.
struct DiskPart {
  std::string name;                      ///< without the prefix of the text model
  std::vector<int64_t> shape;            ///< as this naming writes it
  std::vector<int64_t> also_shape = {};  ///< another accepted shape of the same elements, or empty

  [[nodiscard]] int64_t numel() const;
};

/// One parameter. In every naming its bytes are those of its parts, one after another: experts
/// ascending with gate before up, convolutions q, k, v. So every conversion copies bytes.
struct Parameter {
  std::string name;            ///< "layers.3.self_attn.q_a_proj.weight", "norm.weight", ...
  std::vector<int64_t> shape;  ///< internal
  at::ScalarType disk_dtype;   ///< in the published checkpoint: float32 or bfloat16
  int64_t layer = -1;          ///< -1: outside the layers
  bool frozen = false;         ///< indexer: no gradient flows into it
  bool buffer = false;         ///< correction bias: not trained by gradients
  bool expert = false;         ///< routed experts, dim 0 counts them
  bool hf_fp32 = false;        ///< transformers keeps it float32 in a bfloat16 model
  bool engine_fp32 = false;    ///< the inference engine keeps it float32
  bool island = false;  ///< hyper-connection or decay parameter: exempt from the bfloat16 cast
                        ///< under the islands policy
  bool conv = false;    ///< short convolution: its own switch
  std::array<std::vector<DiskPart>, 3> parts;  ///< by Naming

  [[nodiscard]] int64_t numel() const;
  [[nodiscard]] const std::vector<DiskPart>& parts_in(Naming naming) const {
    return parts[static_cast<size_t>(naming)];
  }
};

/// Every parameter of this architecture, layer by layer, in a fixed order.
std::vector<Parameter> expected_parameters(const ModelConfig& config);

/// Prefix of text tensors on disk: "model.language_model." (composite), "model." (text), nothing
/// for internal names. lm_head.weight carries none.
std::string disk_name(std::string_view part_name, Naming naming, bool composite);

/// The parts of a value of that parameter's shape in one naming, as views with the parts' shapes,
/// in order.
std::vector<Tensor> split_parts(const Parameter& parameter, Naming naming, const Tensor& value);

}  // namespace lockstep::model
