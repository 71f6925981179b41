// Where a caller may look at named activations.
#pragma once

#include <string>

#include "model/base/torch.hpp"

namespace lockstep::model {

class TraceSink {
 public:
  virtual ~TraceSink() = default;
  /// True if `name` is wanted; the tensor is then passed to record(). Rows are local rows.
  [[nodiscard]] virtual bool wants(const std::string& name) const = 0;
  virtual void record(const std::string& name, const Tensor& value) = 0;
};

}  // namespace lockstep::model
