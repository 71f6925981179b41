#include <cuda_runtime.h>

#include <algorithm>

#include "model/ops/kda_cuda.hpp"
#include "model/ops/kda_forward_kernel.cuh"

namespace lockstep::model {
namespace {

using kda::Params;

/// Slots per head of the tile ring: 29 MB in all for 64 heads, so that tiles pass through L2 and
/// are overwritten before they are ever written back; with fewer heads the slots go to those.
int ring_slots(int heads) { return std::max(6, 384 / heads); }

struct Device {
  cudaError_t error = cudaSuccess;
  int multiprocessors = 0;
  bool hopper = false;
  bool cooperative = false;

  /// Heads one launch can take: a block, hence a multiprocessor, per chain of a head and V half.
  int heads_per_launch() const { return multiprocessors / 2; }
};

Device current_device() {
  Device d;
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

int64_t chunks_bound(int64_t tokens, int64_t documents) { return tokens / kda::kChunk + documents; }

struct Layout {
  size_t tiles = 0, chunks = 0, chunk_begin = 0, flags = 0, total = 0;
};

Layout workspace_layout(int64_t tokens, int64_t documents, int heads) {
  const auto round_up = [](size_t bytes) { return (bytes + 1023) / 1024 * 1024; };
  const auto bound = static_cast<size_t>(chunks_bound(tokens, documents));
  const auto h = static_cast<size_t>(heads), ring = static_cast<size_t>(ring_slots(heads));
  Layout l;
  l.tiles = 0;
  l.chunks = ring * h * kda::kTileBytes;
  l.chunk_begin = l.chunks + round_up(bound * sizeof(kda::ChunkInfo));
  l.flags = l.chunk_begin + round_up(static_cast<size_t>(documents + 1) * sizeof(int));
  l.total = l.flags + round_up(h * (ring + 2) * sizeof(int));
  return l;
}

KdaCudaResult bad(const char* detail) { return {KdaCudaStatus::kBadArgument, 0, detail}; }

KdaCudaResult check(const KdaForwardArgs& a) {
  if (a.tokens < 0 || a.documents < 0 || a.heads < 1)
    return bad("tokens and documents must be >= 0 and heads >= 1");
  if (a.tokens > 0 && a.documents == 0)
    return bad("tokens without documents: pass cu_seqlens {0, T}");
  if (chunks_bound(a.tokens, a.documents) * a.heads >= (int64_t{1} << 31))
    return bad("tokens / 64 * heads must stay below 2^31: split the batch");
  if (!(a.lower_bound >= -5.0f && a.lower_bound < 0.0f))
    return bad("lower_bound must lie in [-5, 0): the anchored exponents are safe only there");
  if (a.documents > 0 && a.cu_seqlens == nullptr) return bad("cu_seqlens is null");
  if (a.tokens > 0 &&
      (!a.q_THK || !a.k_THK || !a.v_THV || !a.f_THK || !a.beta_logit_TH || !a.o_THV))
    return bad("q, k, v, f, beta_logit and o must not be null");
  if (a.tokens > 0 && (!a.a_log_H || !a.dt_bias_HK))
    return bad("a_log and dt_bias must not be null");
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  if (!aligned(a.q_THK) || !aligned(a.k_THK) || !aligned(a.v_THV) || !aligned(a.f_THK) ||
      !aligned(a.o_THV) || !aligned(a.dt_bias_HK))
    return bad("q, k, v, f, o and dt_bias must be 16-byte aligned");
  if (a.final_state_NHKV != nullptr && a.final_state_NHKV == a.initial_state_NHKV)
    return bad("final_state may not alias initial_state");
  return {};
}

}  // namespace

size_t kda_forward_workspace_bytes(int64_t tokens, int64_t documents, int heads) {
  if (tokens < 0 || documents < 0 || heads < 1) return 0;
  return workspace_layout(tokens, documents, heads).total;
}

KdaCudaResult kda_forward(const KdaForwardArgs& a,
                          void* workspace,
                          size_t workspace_bytes,
                          CUstream_st* stream) {
  if (const KdaCudaResult result = check(a); !result) return result;
  if (a.documents == 0) return {};
  const Device device = current_device();
  const auto failed = [](cudaError_t error) {
    return KdaCudaResult{
        KdaCudaStatus::kCudaError, static_cast<int>(error), cudaGetErrorString(error)};
  };
  if (device.error != cudaSuccess) return failed(device.error);
  if (!device.hopper || !device.cooperative || device.heads_per_launch() < 1)
    return {KdaCudaStatus::kUnsupportedDevice,
            0,
            "needs compute capability 9.0 (sm_90a code) and cooperative launch"};
  const Layout layout = workspace_layout(a.tokens, a.documents, a.heads);
  if (workspace == nullptr || workspace_bytes < layout.total)
    return {KdaCudaStatus::kWorkspaceTooSmall, 0, "allocate kda_forward_workspace_bytes(...)"};
  if (reinterpret_cast<uintptr_t>(workspace) % 128 != 0)
    return bad("workspace must be 128-byte aligned");

  const void* const kernel = reinterpret_cast<const void*>(&kda::forward_kernel);
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kda::kForwardBytes);
  auto* const bytes = static_cast<unsigned char*>(workspace);
  for (int first = 0; first < a.heads && error == cudaSuccess; first += device.heads_per_launch()) {
    const int64_t channel = int64_t{first} * kda::kDim, state = channel * kda::kDim;
    Params p{};
    p.documents = a.documents;
    p.heads = std::min(a.heads - first, device.heads_per_launch());
    p.row_heads = a.heads;
    p.ring = ring_slots(a.heads);
    p.decay_scale = static_cast<float>(static_cast<double>(a.lower_bound) * 1.4426950408889634);
    p.q = a.q_THK + channel;
    p.k = a.k_THK + channel;
    p.v = a.v_THV + channel;
    p.f = a.f_THK + channel;
    p.beta_logit = a.beta_logit_TH + first;
    p.a_log = a.a_log_H + first;
    p.dt_bias = a.dt_bias_HK + channel;
    p.cu_seqlens = a.cu_seqlens;
    p.initial_state = a.initial_state_NHKV ? a.initial_state_NHKV + state : nullptr;
    p.final_state = a.final_state_NHKV ? a.final_state_NHKV + state : nullptr;
    p.o = a.o_THV + channel;
    p.tiles = bytes + layout.tiles;
    p.chunks = reinterpret_cast<kda::ChunkInfo*>(bytes + layout.chunks);
    p.chunk_begin = reinterpret_cast<int*>(bytes + layout.chunk_begin);
    p.ready = reinterpret_cast<int*>(bytes + layout.flags);
    p.consumed = p.ready + p.heads * p.ring;
    kda::plan_kernel<<<1, kda::kPlanThreads, 0, stream>>>(p);
    error = cudaGetLastError();
    void* arguments[] = {&p};
    if (error == cudaSuccess)
      error = cudaLaunchCooperativeKernel(kernel,
                                          dim3(static_cast<unsigned>(device.multiprocessors)),
                                          dim3(kda::kForwardThreads),
                                          arguments,
                                          kda::kForwardBytes,
                                          stream);
  }
  return error == cudaSuccess ? KdaCudaResult{} : failed(error);
}

}  // namespace lockstep::model
