// Parameters of one process: all resident as autograd leaves, or read from disk layer by layer.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "model/checkpoint/weight_source.hpp"
#include "model/config/numerics.hpp"
#include "model/seams/param_view.hpp"

namespace lockstep::harness {

/// Every parameter in its compute dtype, loaded once. With `grads`, trainable ones are leaves that
/// collect gradients.
class ResidentParameters final : public model::ParamView {
 public:
  ResidentParameters(const model::WeightSource& source, const model::Numerics& num, bool grads);
  Tensor get(const std::string& name) override;
  /// Trainable leaves by internal name, sorted.
  [[nodiscard]] const std::map<std::string, Tensor>& leaves() const { return leaves_; }
  void zero_grads();

 private:
  std::map<std::string, Tensor> values_, leaves_;
};

/// Nothing is kept between layers: get() converts from the mapped file, release_layer() lets the
/// pages go.
class StreamedParameters final : public model::ParamView {
 public:
  StreamedParameters(const model::WeightSource& source, const model::Numerics& num);
  Tensor get(const std::string& name) override;
  void release_layer(int64_t layer) override;

 private:
  const model::WeightSource& source_;
  const model::Numerics& num_;
};

}  // namespace lockstep::harness
