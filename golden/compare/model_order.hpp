// The order in which the model computes what names stand for: what "first" means when two runs
// part.
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::golden {

/// Where a tensor stands. Inputs come first, then the embedding, the layers by number with their
/// operators as they are computed and each module after what is inside it, the final norm, the
/// head, logits, log-probabilities and loss. Gradients (below a folder "grads", or "grad:NAME")
/// follow in backward order: the same places from the last to the first. Names that are not of this
/// model come last. Ties, such as experts of one layer, are in natural order: 2 before 10.
struct ModelPlace {
  enum class Part : uint8_t { kInput, kForward, kResult, kGradient, kUnknown };
  Part part = Part::kUnknown;
  int64_t layer =
      0;  ///< kForward: -1 embedding, one past any layer for what follows; gradients: negated
  int64_t module = 0;  ///< within the layer; gradients: negated
  std::string name;

  [[nodiscard]] bool known() const { return part != Part::kUnknown; }
  /// By the places alone, then by natural order of the names.
  std::strong_ordering operator<=>(const ModelPlace& other) const;
  bool operator==(const ModelPlace& other) const = default;
};

/// Names of checkpoints in all three namings, of dumped modules, of results of runs and of goldens,
/// below any folders ("trace/layers.0.mlp", "f64/grads/model.layers.0.mlp.gate.weight").
ModelPlace model_place(std::string_view name);

/// The same names, in that order.
std::vector<std::string> in_model_order(const std::vector<std::string>& names);

}  // namespace lockstep::golden
