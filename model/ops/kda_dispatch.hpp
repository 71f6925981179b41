// Bridges from tensors to the torch-free kernels of KDA, convolution and norms.
#pragma once

#include <optional>
#include <span>
#include <type_traits>

#include "model/base/device.hpp"
#include "model/config/numerics.hpp"
#include "model/ops/kda_simd.hpp"

namespace lockstep::model {

/// Storage type S and computing type R of a width.
template <typename S_, typename R_>
struct Types {
  using S = S_;
  using R = R_;
};

/// Calls f(Types<S, R>{}) for the policy's width.
template <typename F>
auto by_width(Width width, F&& f) {
  switch (width) {
    case Width::kFloat64:
      return f(Types<double, double>{});
    case Width::kBFloat16:
      return f(Types<simd::Bf16, float>{});
    case Width::kFloat32:
      break;
  }
  return f(Types<float, float>{});
}

/// Read-only data of a tensor that already has S's dtype; null when undefined.
template <typename S>
const S* data(const Tensor& t) {
  if (!t.defined()) return nullptr;
  check_host(t);
  return static_cast<const S*>(t.const_data_ptr());
}
template <typename S>
S* mutable_data(Tensor& t) {
  check_host(t);
  return static_cast<S*>(t.mutable_data_ptr());
}

/// bf16 rounding of a float32 or float64 tensor, transparent to gradients: x + (round(x) - x), both
/// operations exact. For the references, whose backward has no roundings of its own.
inline Tensor round_through(const Tensor& x, bool on) {
  if (!on) return x;
  return x + (x.detach().to(at::kBFloat16).to(x.scalar_type()) - x.detach());
}

/// An undefined tensor as the absent argument that autograd functions accept.
inline std::optional<Tensor> present(const Tensor& t) {
  return t.defined() ? std::optional<Tensor>(t) : std::nullopt;
}

/// Throws kShape unless the tensor is one of a floating dtype.
inline void check_float(const Tensor& t, std::string_view what) {
  LOCKSTEP_CHECK(t.defined() && t.is_floating_point(),
                 kShape,
                 "{}: expected a floating-point tensor, got {}",
                 what,
                 describe(t));
}

/// Throws kShape unless cu = {0, ..., tokens}, not decreasing; {0} is no segment.
inline void check_boundaries(std::span<const int64_t> cu, int64_t tokens, std::string_view what) {
  LOCKSTEP_CHECK(
      !cu.empty() && cu.front() == 0 && cu.back() == tokens,
      kShape,
      "{}: expected segment boundaries from 0 to {} (the number of rows), got {} entries "
      "from {} to {}",
      what,
      tokens,
      cu.size(),
      cu.empty() ? -1 : cu.front(),
      cu.empty() ? -1 : cu.back());
  for (size_t i = 1; i < cu.size(); ++i) {
    LOCKSTEP_CHECK(cu[i - 1] <= cu[i],
                   kShape,
                   "{}: entry {} is {}, below entry {} which is {}; boundaries must not decrease",
                   what,
                   i,
                   cu[i],
                   i - 1,
                   cu[i - 1]);
  }
}

}  // namespace lockstep::model
