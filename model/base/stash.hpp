// Plain data passed from an autograd function's forward to its backward.
#pragma once

#include <utility>

#include "model/base/torch.hpp"

namespace lockstep {

template <typename T>
struct Stash : torch::CustomClassHolder {
  explicit Stash(T v) : value(std::move(v)) {}
  T value;
};

/// Keeps one value beside the saved tensors.
template <typename T>
void stash(torch::autograd::AutogradContext* ctx, T value) {
  c10::intrusive_ptr<torch::CustomClassHolder> holder =
      c10::make_intrusive<Stash<T>>(std::move(value));
  ctx->saved_data["stash"] = c10::IValue::make_capsule(std::move(holder));
}

/// What stash() kept; T must be the type that it was given.
template <typename T>
const T& stashed(torch::autograd::AutogradContext* ctx) {
  return static_cast<Stash<T>*>(ctx->saved_data["stash"].toCapsule().get())->value;
}

}  // namespace lockstep
