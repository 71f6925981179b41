// What operator files share on the tensor side: choosing a width, and rounding in references.
#pragma once

#include <utility>

#include "model/base/device.hpp"
#include "model/base/scalar.hpp"
#include "model/ops/weight_support.hpp"

namespace lockstep::model {

/// Calls f.template operator()<W>() with the width type of `num`.
template <typename F>
decltype(auto) with_width(const Numerics& num, F&& f) {
  switch (num.width()) {
    case Width::kFloat64:
      return std::forward<F>(f).template operator()<WidthF64>();
    case Width::kFloat32:
      return std::forward<F>(f).template operator()<WidthF32>();
    case Width::kBFloat16:
      break;
  }
  return std::forward<F>(f).template operator()<WidthBf16>();
}

/// Storage of a contiguous CPU tensor as loops see it; null for an undefined tensor.
template <typename A>
A* data(const Tensor& t) {
  if (!t.defined()) return nullptr;
  check_host(t);
  return static_cast<A*>(t.data_ptr());
}
template <typename A>
const A* cdata(const Tensor& t) {
  if (!t.defined()) return nullptr;
  check_host(t);
  return static_cast<const A*>(t.const_data_ptr());
}

/// `value` (in acc) rounded to act and raised again, for references: the value changes, the
/// gradient passes untouched. Gradients are rounded where a tensor leaves an operator, not inside.
inline Tensor rounded(const Tensor& value, const Numerics& num) {
  if (!num.is_bf16()) return value;
  return value + (value.detach().to(at::kBFloat16).to(value.scalar_type()) - value.detach());
}

/// A parameter as an operator computes with it: in acc, through bf16 first if asked. The gradient
/// takes the same way back, so that of a bf16 copy is rounded to bf16.
inline Tensor param_as_used(const Tensor& param, bool through_bf16, const Numerics& num) {
  return through_bf16 ? param.to(at::kBFloat16).to(num.acc()) : param.to(num.acc());
}

/// Throws kShape unless the tensor is in act or acc, which is what weights come in.
inline void check_weight_dtype(const Tensor& weight, const Numerics& num, std::string_view what) {
  LOCKSTEP_CHECK(weight.scalar_type() == num.act() || weight.scalar_type() == num.acc(),
                 kShape,
                 "{}: expected dtype {} or {} under policy {}, got {}; convert it first",
                 what,
                 dtype_name(num.act()),
                 dtype_name(num.acc()),
                 num.name(),
                 describe(weight));
}

}  // namespace lockstep::model
