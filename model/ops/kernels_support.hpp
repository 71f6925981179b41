// What the tensor side of the kernels shares.
#pragma once

#include "model/ops/device_kernels.hpp"

struct CUstream_st;

namespace lockstep::model::kernels {

/// x has elements, in bf16, on a device whose instructions the kernels are compiled for.
bool takes(const Tensor& x);

/// The stream that the library queues work of this device on.
CUstream_st* stream_of(const Tensor& x);

/// Memory for a call, at least a byte.
Tensor workspace(size_t bytes, const Tensor& like);

/// Contiguous with an address that 16-byte loads take.
Tensor dense(const Tensor& x);
/// The same in float32, through bf16 first if asked; without history.
Tensor wide(const Tensor& x, bool through_bf16 = false);
/// Host numbers on x's device.
Tensor on_device_of(const Tensor& x, std::span<const int64_t> numbers);

/// Device memory of a tensor as kernels name it; null for an undefined one.
inline const uint16_t* half_in(const Tensor& x) {
  return x.defined() ? static_cast<const uint16_t*>(x.const_data_ptr()) : nullptr;
}
inline uint16_t* half_out(const Tensor& x) {
  return x.defined() ? static_cast<uint16_t*>(x.mutable_data_ptr()) : nullptr;
}
inline const float* float_in(const Tensor& x) {
  return x.defined() ? x.const_data_ptr<float>() : nullptr;
}
inline float* float_out(const Tensor& x) {
  return x.defined() ? x.mutable_data_ptr<float>() : nullptr;
}
inline const int64_t* index_in(const Tensor& x) { return x.const_data_ptr<int64_t>(); }

/// Throws kInternal unless a launch succeeded.
template <typename Result>
void must_run(const Result& result, const char* kernel) {
  LOCKSTEP_CHECK(static_cast<bool>(result),
                 kInternal,
                 "{}: the launch failed: {} (CUDA error {})",
                 kernel,
                 result.detail,
                 result.cuda_error);
}

}  // namespace lockstep::model::kernels
