// Every parameter of a source as an autograd leaf, for tests that call layers directly.
#pragma once

#include <map>
#include <string>

#include "model/checkpoint/weight_source.hpp"
#include "model/layers/parameter_policy.hpp"
#include "model/seams/param_view.hpp"

namespace lockstep::tests {

class LeafParameters final : public model::ParamView {
 public:
  LeafParameters(const model::WeightSource& source, const model::Numerics& num, bool grads) {
    for (const std::string& name : source.names()) {
      Tensor value = source.load(name).to(model::parameter_dtype(name, num)).clone();
      leaves_[name] = value.requires_grad_(grads && !model::is_frozen(name));
    }
  }
  Tensor get(const std::string& name) override { return leaves_.at(name); }
  [[nodiscard]] bool wants_grad(const std::string& name) const override {
    return leaves_.at(name).requires_grad();
  }
  [[nodiscard]] const std::map<std::string, Tensor>& leaves() const { return leaves_; }

 private:
  std::map<std::string, Tensor> leaves_;
};

}  // namespace lockstep::tests
