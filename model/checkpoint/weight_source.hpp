// Where weights come from: a checkpoint on disk, a formula, or memory. All under internal names, in
// internal layout, one parameter at a time.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "model/base/torch.hpp"
#include "model/checkpoint/parameters.hpp"
#include "model/config/config_json.hpp"

namespace lockstep::model {

struct WeightSpec {
  at::ScalarType dtype;  ///< of what load() returns
  std::vector<int64_t> shape;
};

class WeightSource {
 public:
  virtual ~WeightSource() = default;

  [[nodiscard]] virtual const ModelConfig& config() const = 0;
  /// Every parameter, in the order of expected_parameters.
  [[nodiscard]] virtual std::vector<std::string> names() const = 0;
  /// Without reading data.
  [[nodiscard]] virtual WeightSpec spec(const std::string& name) const = 0;
  /// Stored dtype, internal shape, contiguous, on the CPU. May be a view of a read-only mapping:
  /// writing to it is a fault. Throws kInput for an unknown name.
  [[nodiscard]] virtual Tensor load(const std::string& name) const = 0;
  /// Rows [begin, end) of dim 0, e.g. the experts of one rank; touches no other data on disk.
  [[nodiscard]] virtual Tensor load_rows(const std::string& name, int64_t begin, int64_t end) const;
  /// A value of that parameter's shape (a gradient, say) as the tensors of the checkpoint: names
  /// and shapes of the files, or of the released naming where there is no file. Views of `value`.
  [[nodiscard]] virtual std::vector<std::pair<std::string, Tensor>> disk_tensors(
      const std::string& name, const Tensor& value) const = 0;
  /// The parameter's pages may leave memory; loading it again reads the disk again.
  virtual void release(const std::string& /*name*/) const {}
  /// load() reads a file, so that weights larger than memory can be walked layer by layer.
  [[nodiscard]] virtual bool on_disk() const { return false; }
  /// Tensors of the files that this model does not have (vision tower, MTP layers).
  [[nodiscard]] virtual std::vector<std::string> dropped() const { return {}; }
};

/// Opens a Hugging Face or internal checkpoint folder: config.json and safetensors, either naming
/// scheme, composite or text prefixes, FP8 with block scales. Reads headers only. Every tensor is
/// used once and every parameter filled once; otherwise one kInput error lists all that is missing,
/// unknown, duplicated, of wrong shape or dtype. FP8 parameters load as bfloat16(float32(payload) *
/// scale of the 128 x 128 block).
std::unique_ptr<WeightSource> open_checkpoint(const std::string& folder,
                                              ConfigDefaults defaults = ConfigDefaults::kRefuse);

/// The same with an already resolved config; `folder` may also be a single file.
std::unique_ptr<WeightSource> open_checkpoint(const std::string& folder, ModelConfig config);

/// Weights by formula, equal in every program: each tensor of the released naming with text prefix
/// ("model.layers.0.self_attn.q_proj.weight") is offset + amp * seeded_uniform(seed, its name), in
/// float64, rounded to float32 and then to its declared disk dtype.
std::unique_ptr<WeightSource> seeded_source(ModelConfig config, uint64_t seed);

/// Weights in memory by internal name; the tensors are shared, not copied. Throws kInput listing
/// missing, unknown and misshapen ones.
std::unique_ptr<WeightSource> memory_source(ModelConfig config,
                                            std::map<std::string, Tensor> weights);

/// Offset and amplitude of the seeded formula for a tensor of the released naming with text prefix.
struct SeededRange {
  double offset, amp;
};
SeededRange seeded_range(const ModelConfig& config,
                         const std::string& released_name,
                         const std::vector<int64_t>& shape);

}  // namespace lockstep::model
