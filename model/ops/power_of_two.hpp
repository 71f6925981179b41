// 2^x on every device.
#pragma once

#include "model/base/torch.hpp"

namespace lockstep::model {

/// 2^x, differentiable. LibTorch 2.11's exp2 compiles its CUDA kernel while running, which ends in
/// "free(): invalid pointer" on some systems; the power of the number 2 has a compiled one.
inline Tensor power_of_two(const Tensor& x) {
  return x.device().is_cpu() ? x.exp2() : at::pow(2.0, x);
}

}  // namespace lockstep::model
