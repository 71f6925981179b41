// What the launchers of sparse MLA kernels share: results, and the device they run on.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "model/ops/sparse_mla_cuda.hpp"

namespace lockstep::model {

inline MlaCudaResult bad(const char* detail) { return {MlaCudaStatus::kBadArgument, 0, detail}; }
inline MlaCudaResult failed(cudaError_t e) {
  return {MlaCudaStatus::kCudaError, static_cast<int>(e), cudaGetErrorString(e)};
}
inline bool misaligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 != 0; }

/// Whether the current device runs this code, and how many multiprocessors it has.
inline MlaCudaResult find_device(int& multiprocessors) {
  int device = 0, major = 0;
  cudaError_t error = cudaGetDevice(&device);
  const auto query = [&](int* value, cudaDeviceAttr what) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(value, what, device);
  };
  query(&major, cudaDevAttrComputeCapabilityMajor);
  query(&multiprocessors, cudaDevAttrMultiProcessorCount);
  if (error != cudaSuccess) return failed(error);
  if (major != 9)
    return {MlaCudaStatus::kUnsupportedDevice, 0, "needs compute capability 9.0 (sm_90a code)"};
  return {};
}

}  // namespace lockstep::model
