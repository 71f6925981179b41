// Whether two tensors are the same to the last bit.
#pragma once

#include <cstring>

#include "model/base/torch.hpp"

namespace lockstep {

/// Same dtype, shape and bytes; tensors without elements have no bytes to differ in, nor an address
/// that memcmp would take. Either may be strided.
inline bool same_bytes(const Tensor& a, const Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  if (a.numel() == 0) return true;
  const Tensor x = a.detach().contiguous(), y = b.detach().contiguous();
  return std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

}  // namespace lockstep
