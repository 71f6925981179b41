// Parameters read from disk when a unit needs them.
#pragma once

#include <string>

#include "model/checkpoint/weight_source.hpp"
#include "model/config/numerics.hpp"
#include "model/seams/param_view.hpp"

namespace lockstep::harness {

/// Nothing is kept between units: get() converts from the mapped file to the device, leave() lets
/// the pages go.
class StreamedParameters final : public model::ParamView {
 public:
  StreamedParameters(const model::WeightSource& source,
                     const model::Numerics& num,
                     at::Device device);
  Tensor get(const std::string& name) override;
  void leave(int64_t unit, model::Pass pass) override;

 private:
  const model::WeightSource& source_;
  const model::Numerics& num_;
  at::Device device_;
};

}  // namespace lockstep::harness
