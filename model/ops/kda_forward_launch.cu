#include <cuda_runtime.h>

#include <algorithm>

#include "model/ops/kda_cuda.hpp"
#include "model/ops/kda_forward_kernel.cuh"
#include "model/ops/kda_launch.cuh"

namespace lockstep::model {
namespace {

using kda::Params;

/// Slots per head of the tile ring: 29 MB in all for 64 heads, so that tiles pass through L2 and
/// are overwritten before they are ever written back; with fewer heads the slots go to those.
int ring_slots(int heads) { return std::max(6, 384 / heads); }

struct Layout {
  size_t tiles = 0, chunks = 0, chunk_begin = 0, flags = 0, total = 0;
};

Layout workspace_layout(int64_t tokens, int64_t documents, int heads) {
  const auto round_up = [](size_t bytes) { return (bytes + 1023) / 1024 * 1024; };
  const auto bound = static_cast<size_t>(kda_chunks_bound(tokens, documents));
  const auto h = static_cast<size_t>(heads), ring = static_cast<size_t>(ring_slots(heads));
  Layout l;
  l.tiles = 0;
  l.chunks = ring * h * kda::kTileBytes;
  l.chunk_begin = l.chunks + round_up(bound * sizeof(kda::ChunkInfo));
  l.flags = l.chunk_begin + round_up(static_cast<size_t>(documents + 1) * sizeof(int));
  l.total = l.flags + round_up(h * (ring + 2) * sizeof(int));
  return l;
}

}  // namespace

size_t kda_forward_workspace_bytes(int64_t tokens, int64_t documents, int heads) {
  if (tokens < 0 || documents < 0 || heads < 1) return 0;
  return workspace_layout(tokens, documents, heads).total;
}

size_t kda_checkpoint_bytes(int64_t tokens, int64_t documents, int heads) {
  if (tokens < 0 || documents < 0 || heads < 1) return 0;
  return static_cast<size_t>(kda_windows_bound(tokens, documents, heads)) *
         static_cast<size_t>(heads) * kda::kDim * kda::kDim * sizeof(float);
}

KdaCudaResult kda_forward(const KdaForwardArgs& a,
                          void* workspace,
                          size_t workspace_bytes,
                          CUstream_st* stream) {
  if (const KdaCudaResult result = kda_check_forward(a); !result) return result;
  if (a.documents == 0) return {};
  const KdaDevice device = kda_device();
  if (device.error != cudaSuccess) return kda_failed(device.error);
  if (!device.hopper || !device.cooperative || device.heads_per_launch() < 1)
    return {KdaCudaStatus::kUnsupportedDevice,
            0,
            "needs compute capability 9.0 (sm_90a code) and cooperative launch"};
  const Layout layout = workspace_layout(a.tokens, a.documents, a.heads);
  if (workspace == nullptr || workspace_bytes < layout.total)
    return {KdaCudaStatus::kWorkspaceTooSmall, 0, "allocate kda_forward_workspace_bytes(...)"};
  if (reinterpret_cast<uintptr_t>(workspace) % 128 != 0)
    return kda_bad_argument("workspace must be 128-byte aligned");

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
    p.checkpoints = a.checkpoints ? a.checkpoints + state : nullptr;
    p.checkpoint_mask = kda_window_chunks(a.heads) - 1;
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
  return error == cudaSuccess ? KdaCudaResult{} : kda_failed(error);
}

}  // namespace lockstep::model
