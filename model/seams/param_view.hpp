// Where a scheme that owns parameters (a loader, a shard gatherer) hands them to a layer.
#pragma once

#include <string>

#include "model/base/torch.hpp"

namespace lockstep::model {

class ParamView {
 public:
  virtual ~ParamView() = default;

  /// The parameter of that internal name in the dtype the policy computes with. The same call
  /// during recompute returns equal values. Throws kInternal for a name the model does not have.
  virtual Tensor get(const std::string& name) = 0;

  /// The layer's parameters are not needed until the next get(): a streaming or sharding view may
  /// drop them.
  virtual void release_layer(int64_t layer) { (void)layer; }
};

}  // namespace lockstep::model
