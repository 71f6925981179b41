// Devices besides the CPU. LibTorch's CUDA library is loaded when a CUDA device is asked for, so
// that everything else starts without it.
#pragma once

#include <string>
#include <string_view>

#include "model/base/torch.hpp"

namespace lockstep {

/// Why no tensor can live on a CUDA device here, and what to do about it; empty: one can. LibTorch
/// looks for its CUDA library once, so the first call must come before it is asked about devices,
/// as the first backward does.
const std::string& cuda_problem();

/// "cpu", or "cuda" for the first CUDA device. Throws kConfig with cuda_problem().
at::Device device_of(std::string_view name);

/// Operators take their device form for x, whose memory no loop of ours may see.
bool takes_device_form(const Tensor& x);

/// While one lives, operators take their device forms for CPU tensors too: tests of these without a
/// GPU. Kernels stay out.
class DeviceFormsOnCpu {
 public:
  DeviceFormsOnCpu();
  DeviceFormsOnCpu(const DeviceFormsOnCpu&) = delete;
  DeviceFormsOnCpu& operator=(const DeviceFormsOnCpu&) = delete;
  ~DeviceFormsOnCpu();
};

/// Throws kInternal for a tensor that is not in host memory.
inline void check_host(const Tensor& x) {
  LOCKSTEP_CHECK(x.device().is_cpu(),
                 kInternal,
                 "a loop over host memory was given {} on {}",
                 describe(x),
                 x.device().str());
}

}  // namespace lockstep
