#include "model/ops/kernels_support.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <cuda_runtime_api.h>

namespace lockstep::model::kernels {

bool takes(const Tensor& x) {
  if (!x.is_cuda() || x.scalar_type() != at::kBFloat16 || x.numel() == 0) return false;
  static const bool hopper = [index = x.device().index()] {
    int major = 0;
    return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index) ==
               cudaSuccess &&
           major == 9;
  }();
  return hopper;
}

CUstream_st* stream_of(const Tensor& x) {
  const c10::impl::VirtualGuardImpl device(x.device().type());
  return static_cast<CUstream_st*>(device.getStream(x.device()).native_handle());
}

Tensor workspace(size_t bytes, const Tensor& like) {
  return at::empty({std::max<int64_t>(1, static_cast<int64_t>(bytes))},
                   like.options().dtype(at::kByte).requires_grad(false));
}

Tensor dense(const Tensor& x) {
  const Tensor result = x.detach().contiguous();
  return reinterpret_cast<uintptr_t>(result.const_data_ptr()) % 16 == 0 ? result : result.clone();
}

Tensor wide(const Tensor& x, bool through_bf16) {
  return dense((through_bf16 ? x.detach().to(at::kBFloat16) : x.detach()).to(at::kFloat));
}

Tensor on_device_of(const Tensor& x, std::span<const int64_t> numbers) {
  return at::tensor(c10::IntArrayRef(numbers.data(), numbers.size()), at::kLong).to(x.device());
}

}  // namespace lockstep::model::kernels
