// Products of cuBLAS as the rate that device tests are held against. The library is opened at run
// time: a machine may have another version than the one compiled with, or none.
#pragma once

#include <cublas_v2.h>
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace lockstep::device_test {

struct Cublas {
  cublasHandle_t handle = nullptr;
  using Gemm = cublasStatus_t (*)(cublasHandle_t,
                                  cublasOperation_t,
                                  cublasOperation_t,
                                  int,
                                  int,
                                  int,
                                  const void*,
                                  const void*,
                                  cudaDataType,
                                  int,
                                  const void*,
                                  cudaDataType,
                                  int,
                                  const void*,
                                  void*,
                                  cudaDataType,
                                  int,
                                  cublasComputeType_t,
                                  cublasGemmAlgo_t);
  Gemm gemm = nullptr;
  Cublas() {
    void* library = dlopen("libcublas.so.13", RTLD_NOW);
    if (library == nullptr) library = dlopen("libcublas.so", RTLD_NOW);
    if (library == nullptr) {
      std::printf("cuBLAS not found (%s): no comparison; set LD_LIBRARY_PATH\n", dlerror());
      return;
    }
    const auto create =
        reinterpret_cast<decltype(&cublasCreate_v2)>(dlsym(library, "cublasCreate_v2"));
    gemm = reinterpret_cast<Gemm>(dlsym(library, "cublasGemmEx"));
    if (create == nullptr || gemm == nullptr || create(&handle) != CUBLAS_STATUS_SUCCESS)
      gemm = nullptr;
  }
  /// Column-major c [m,n] = op(a) op(b), bf16, fp32 sums.
  void operator()(bool ta,
                  bool tb,
                  int64_t m,
                  int64_t n,
                  int64_t k,
                  const uint16_t* a,
                  const uint16_t* b,
                  uint16_t* c) const {
    const float one = 1, zero = 0;
    const cublasStatus_t status = gemm(handle,
                                       ta ? CUBLAS_OP_T : CUBLAS_OP_N,
                                       tb ? CUBLAS_OP_T : CUBLAS_OP_N,
                                       int(m),
                                       int(n),
                                       int(k),
                                       &one,
                                       a,
                                       CUDA_R_16BF,
                                       int(ta ? k : m),
                                       b,
                                       CUDA_R_16BF,
                                       int(tb ? n : k),
                                       &zero,
                                       c,
                                       CUDA_R_16BF,
                                       int(m),
                                       CUBLAS_COMPUTE_32F,
                                       CUBLAS_GEMM_DEFAULT);
    if (status != CUBLAS_STATUS_SUCCESS) std::exit((std::printf("cuBLAS %d\n", status), 2));
  }
};

}  // namespace lockstep::device_test
