#pragma once

// What the launchers of the KDA kernels share: device query, argument checks, sizes.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "model/ops/kda_cuda.hpp"
#include "model/ops/kda_forward_tiles.cuh"

namespace lockstep::model {

struct KdaDevice {
  cudaError_t error = cudaSuccess;
  int multiprocessors = 0;
  bool hopper = false;
  bool cooperative = false;

  /// Heads one launch can take: a block, hence a multiprocessor, per chain of a head and V half.
  int heads_per_launch() const { return multiprocessors / 2; }
};

inline KdaDevice kda_device() {
  KdaDevice d;
  int index = 0, major = 0, cooperative = 0;
  d.error = cudaGetDevice(&index);
  const auto query = [&](int* value, cudaDeviceAttr what) {
    if (d.error == cudaSuccess) d.error = cudaDeviceGetAttribute(value, what, index);
  };
  query(&d.multiprocessors, cudaDevAttrMultiProcessorCount);
  query(&major, cudaDevAttrComputeCapabilityMajor);
  query(&cooperative, cudaDevAttrCooperativeLaunch);
  d.hopper = major == 9;
  d.cooperative = cooperative != 0;
  return d;
}

inline int64_t kda_chunks_bound(int64_t tokens, int64_t documents) {
  return tokens / kda::kChunk + documents;
}

/// Chunks per checkpoint of the state, a power of two: enough (chunk, head) pairs for the whole
/// device, few enough that what the backward pass keeps per pair stays small.
inline int kda_window_chunks(int heads) {
  int window = 64;
  while (window < 1024 && window * 2 * heads <= 8192) window *= 2;
  return window;
}
inline int64_t kda_windows_bound(int64_t tokens, int64_t documents, int heads) {
  const int window = kda_window_chunks(heads);
  return (kda_chunks_bound(tokens, documents) + window - 1) / window;
}

inline KdaCudaResult kda_failed(cudaError_t error) {
  return {KdaCudaStatus::kCudaError, static_cast<int>(error), cudaGetErrorString(error)};
}
inline bool kda_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }
inline KdaCudaResult kda_bad_argument(const char* detail) {
  return {KdaCudaStatus::kBadArgument, 0, detail};
}

inline KdaCudaResult kda_check_forward(const KdaForwardArgs& a) {
  if (a.tokens < 0 || a.documents < 0 || a.heads < 1)
    return kda_bad_argument("tokens and documents must be >= 0 and heads >= 1");
  if (a.tokens > 0 && a.documents == 0)
    return kda_bad_argument("tokens without documents: pass cu_seqlens {0, T}");
  if (kda_chunks_bound(a.tokens, a.documents) * a.heads >= (int64_t{1} << 31))
    return kda_bad_argument("tokens / 64 * heads must stay below 2^31: split the batch");
  if (!(a.lower_bound >= -5.0f && a.lower_bound < 0.0f))
    return kda_bad_argument(
        "lower_bound must lie in [-5, 0): the anchored exponents are safe only there");
  if (a.documents > 0 && a.cu_seqlens == nullptr) return kda_bad_argument("cu_seqlens is null");
  if (a.tokens > 0 &&
      (!a.q_THK || !a.k_THK || !a.v_THV || !a.f_THK || !a.beta_logit_TH || !a.o_THV))
    return kda_bad_argument("q, k, v, f, beta_logit and o must not be null");
  if (a.tokens > 0 && (!a.a_log_H || !a.dt_bias_HK))
    return kda_bad_argument("a_log and dt_bias must not be null");
  if (!kda_aligned(a.q_THK) || !kda_aligned(a.k_THK) || !kda_aligned(a.v_THV) ||
      !kda_aligned(a.f_THK) || !kda_aligned(a.o_THV) || !kda_aligned(a.dt_bias_HK))
    return kda_bad_argument("q, k, v, f, o and dt_bias must be 16-byte aligned");
  if (a.final_state_NHKV != nullptr && a.final_state_NHKV == a.initial_state_NHKV)
    return kda_bad_argument("final_state may not alias initial_state");
  return {};
}

}  // namespace lockstep::model
