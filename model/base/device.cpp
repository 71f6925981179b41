#include "model/base/device.hpp"

#include <dlfcn.h>

#include <atomic>

namespace lockstep {
namespace {

std::atomic<int> device_forms_on_cpu{0};

std::string load_cuda() {
  if (dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL) == nullptr) {
    return "this machine has no NVIDIA driver (no libcuda.so.1); use \"cpu\", or a machine with a "
           "GPU";
  }
  if (dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    const char* why = dlerror();
    return fmt::format(
        "LibTorch's CUDA library cannot be loaded ({}); use \"cpu\", or build against a LibTorch "
        "for CUDA",
        why != nullptr ? why : "no reason given");
  }
  if (!at::globalContext().hasCUDA()) {
    return "no CUDA device is visible; use \"cpu\", or look at `nvidia-smi` and "
           "CUDA_VISIBLE_DEVICES";
  }
  // One rounding at the store, as the contract of every product says.
  at::globalContext().setAllowBF16ReductionCuBLAS(false);
  return {};
}

}  // namespace

const std::string& cuda_problem() {
  static const std::string problem = load_cuda();
  return problem;
}

at::Device device_of(std::string_view name) {
  if (name == "cpu") return at::kCPU;
  LOCKSTEP_CHECK(name == "cuda", kConfig, "unknown device '{}'; use \"cpu\" or \"cuda\"", name);
  LOCKSTEP_CHECK(cuda_problem().empty(), kConfig, "device cuda: {}", cuda_problem());
  return {at::kCUDA, 0};
}

bool takes_device_form(const Tensor& x) {
  return !x.device().is_cpu() || device_forms_on_cpu.load(std::memory_order_relaxed) > 0;
}

DeviceFormsOnCpu::DeviceFormsOnCpu() { ++device_forms_on_cpu; }
DeviceFormsOnCpu::~DeviceFormsOnCpu() { --device_forms_on_cpu; }

}  // namespace lockstep
