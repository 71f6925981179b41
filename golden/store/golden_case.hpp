// One stored reference case: configuration, documents, weights by formula, and the float64 results
// with the errors that the reference itself makes in float32 and bfloat16.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "golden/store/hdf5.hpp"
#include "golden/store/manifest.hpp"

namespace lockstep::golden {

/// How a stored tensor is kept: whole, or in a short form that golden/compare understands.
enum class StoredKind : uint8_t {
  kWhole,   ///< values has the tensor's shape
  kTensor,  ///< flat: norm, 64 projections, whole rows (gradients)
  kTokens,  ///< flat: norm, 2 projections of every row, whole rows (activations)
};

struct StoredTensor {
  std::string name;  ///< without the group: a module path or a checkpoint tensor name
  StoredKind kind = StoredKind::kWhole;
  std::vector<int64_t> shape;  ///< of the tensor itself
  Tensor values;               ///< float64, or an integer dtype for selections and expert ids
};

/// value = offset + amplitude * u(seed, name) in float64, rounded to float32, then to bfloat16 if
/// the checkpoint holds it so.
struct WeightRule {
  std::string name;  ///< as in a released text-only checkpoint: model.layers.0.self_attn.A_log
  std::vector<int64_t> shape;
  at::ScalarType dtype = at::kBFloat16;  ///< bfloat16 or float32
  double offset = 0.0, amplitude = 0.0;
};

/// The tensor of a rule in its checkpoint dtype.
Tensor make_weight(const WeightRule& rule, uint64_t seed);

/// Relative L2 errors against float64 of the reference's own five runs (the model as it is and with
/// its hidden channels in four other orders). bf16_replay: the same with the float64 run's expert
/// choices, which takes out the jumps of a changed expert.
struct Spread {
  std::vector<double> f32, bf16, bf16_replay;
};

/// A read-only view of one file. Tensors are read when asked for.
class GoldenCase {
 public:
  /// Throws kGolden when the file cannot be read or has another format version.
  explicit GoldenCase(const std::filesystem::path& file);

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] uint64_t seed() const { return seed_; }
  /// A flat text config.json.
  [[nodiscard]] std::string config_json() const;
  [[nodiscard]] Tensor ids() const;  ///< int64 [T], documents concatenated
  [[nodiscard]] std::vector<int64_t> cu_seqlens() const;

  /// The checkpoint folder whose weights the reference ran with; empty: weights follow from the
  /// seed. config_json() is then that folder's config.json, and there are no weight rules.
  [[nodiscard]] std::filesystem::path checkpoint() const;

  [[nodiscard]] const std::vector<WeightRule>& weight_rules() const { return rules_; }
  /// All weights by checkpoint name, by rule. Throws kGolden when their bytes differ from those the
  /// reference ran with, or when they are those of a checkpoint.
  [[nodiscard]] std::map<std::string, Tensor> weights() const;

  [[nodiscard]] Tensor logits() const;  ///< float64 [T, V]
  [[nodiscard]] Tensor logprobs()
      const;                          ///< float64 [T]: of the next token; NaN at a document's last
  [[nodiscard]] double loss() const;  ///< mean over all targets of all documents
  /// Module paths such as "layers.3.self_attn", "layers.3.self_attn.indexer" (int32 [T, width],
  /// indices into the row, ascending, then -1), "layers.1.mlp.gate.experts" (int32 [T, k],
  /// ascending).
  [[nodiscard]] std::vector<std::string> activation_names() const;
  [[nodiscard]] StoredTensor activation(std::string_view name) const;
  /// Checkpoint names of every tensor with a gradient; frozen ones are absent.
  [[nodiscard]] std::vector<std::string> grad_names() const;
  [[nodiscard]] StoredTensor grad(std::string_view name) const;

  /// "logits", "logprobs", "loss", "activations/<module>", "grads/<tensor>". Empty when the file
  /// was made without it.
  [[nodiscard]] std::optional<Spread> spread(std::string_view name) const;
  /// Smallest distance at a top-k boundary: "pools", "experts" or "groups" (infinite: no choice).
  [[nodiscard]] double min_gap(std::string_view kind) const;
  /// The reference was patched to carry a selection through layers that return none.
  [[nodiscard]] bool carried_selection() const;

  /// For everything else in the file: attributes (versions, commit, CPU) and other groups.
  [[nodiscard]] const Hdf5Reader& file() const { return file_; }

 private:
  [[nodiscard]] StoredTensor stored(const std::string& group, std::string_view name) const;

  Hdf5Reader file_;
  std::string name_;
  uint64_t seed_ = 0;
  std::vector<WeightRule> rules_;
  std::map<std::string, Spread, std::less<>> spreads_;
};

/// Opens a case of a golden folder after checking the file against the manifest. Throws kGolden
/// (exit code 4) naming the path and how to make the file when it is missing, stale or damaged.
GoldenCase open_golden(const std::filesystem::path& dir, std::string_view name);

}  // namespace lockstep::golden
