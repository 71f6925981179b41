// How many tokens each expert of each layer was given.
#pragma once

#include <optional>
#include <string>

#include "model/config/model_config.hpp"
#include "model/seams/trace.hpp"

namespace lockstep::harness {

/// Counts the router's choices as layers record them. Only real tokens reach a router, so padding
/// is in no count.
class RouterLoad final : public model::TraceSink {
 public:
  explicit RouterLoad(const model::ModelConfig& config);
  [[nodiscard]] bool wants(const std::string& name) const override;
  void record(const std::string& name, const Tensor& experts) override;
  /// [layers, E] int64 of this rank's tokens; zero rows for layers without experts.
  [[nodiscard]] Tensor counts() const { return counts_.clone(); }
  /// Layer whose correction bias has that name.
  static std::optional<int64_t> layer_of_bias(const std::string& parameter);

 private:
  Tensor counts_;
};

}  // namespace lockstep::harness
