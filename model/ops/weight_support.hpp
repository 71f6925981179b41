// Plain data passed from an operator's forward to its backward, and weights with exact sums.
#pragma once

#include <memory>
#include <utility>

#include "model/base/weight.hpp"
#include "model/config/numerics.hpp"

namespace lockstep::model {

/// Plain data kept from forward to backward beside the saved tensors.
template <typename T>
struct Stash : torch::CustomClassHolder {
  explicit Stash(T v) : value(std::move(v)) {}
  T value;
};
template <typename T>
void stash(torch::autograd::AutogradContext* ctx, T value) {
  c10::intrusive_ptr<torch::CustomClassHolder> holder =
      c10::make_intrusive<Stash<T>>(std::move(value));
  ctx->saved_data["stash"] = c10::IValue::make_capsule(std::move(holder));
}
template <typename T>
const T& stashed(torch::autograd::AutogradContext* ctx) {
  return static_cast<Stash<T>*>(ctx->saved_data["stash"].toCapsule().get())->value;
}

inline int64_t num_blocks(const RowBlocks& blocks) {
  return static_cast<int64_t>(blocks->size()) - 1;
}

/// Throws kShape unless a weight's exact sum, if it has one, fits the weight and the policy.
inline void check_exact(const Weight& weight, const Numerics& num, std::string_view what) {
  if (!weight.sum.defined()) return;
  LOCKSTEP_CHECK(num.acc() == at::kFloat,
                 kShape,
                 "{}: exact sums are of float32 numbers, policy {} accumulates in {}",
                 what,
                 num.name(),
                 dtype_name(num.acc()));
  check_shape(weight.value, weight.sum.sizes(), what);
}

/// The same, and its blocks end at `rows`.
inline void check_exact(const Weight& weight,
                        int64_t rows,
                        const Numerics& num,
                        std::string_view what) {
  check_exact(weight, num, what);
  if (!weight.sum.defined() && weight.blocks == nullptr) return;
  LOCKSTEP_CHECK(weight.blocks != nullptr && weight.blocks->back() == rows,
                 kShape,
                 "{}: blocks of rows end at {}, but there are {} rows",
                 what,
                 weight.blocks == nullptr ? -1 : weight.blocks->back(),
                 rows);
}

}  // namespace lockstep::model
