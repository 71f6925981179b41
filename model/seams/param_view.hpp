// Where a scheme that owns parameters (a loader, a shard gatherer) hands them to the model, and
// takes their gradients back.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/base/torch.hpp"

namespace lockstep::model {

/// Parameters that are needed together: layer 0, 1, ..., the embedding before and the head after.
inline constexpr int64_t kStemUnit = -1;
inline int64_t head_unit(int64_t num_layers) { return num_layers; }

enum class Pass : uint8_t { kForward, kBackward };

struct NamedGrad {
  std::string name;
  Tensor grad;   ///< in the dtype of the value get() returned; undefined if pairs are given
  Tensor pairs;  ///< invariant policies: the pairs of an ExactSum instead, [2, shape...] float64
};

/// The model enters a unit, gets its parameters, and leaves it; in backward again, in reverse order
/// of units, with the unit's gradients just before it leaves. Every rank makes the same calls in
/// the same order, whatever tokens it holds, so a view may communicate in them.
class ParamView {
 public:
  virtual ~ParamView() = default;

  /// The parameter of that internal name, as much of it as this rank computes with, in the dtype
  /// the policy computes with. Its storage is valid between enter() and leave() of its unit. Throws
  /// kInternal for a name the model does not have.
  virtual Tensor get(const std::string& name) = 0;
  /// get() takes part in gradients.
  [[nodiscard]] virtual bool wants_grad(const std::string& /*name*/) const { return false; }

  virtual void enter(int64_t /*unit*/, Pass /*pass*/) {}
  virtual void leave(int64_t /*unit*/, Pass /*pass*/) {}
  /// Gradients of the parameters that backward of the unit reached.
  // NOLINTNEXTLINE(performance-unnecessary-value-param): overriders keep them
  virtual void add_grads(int64_t /*unit*/, std::vector<NamedGrad> /*grads*/) {}
};

}  // namespace lockstep::model
