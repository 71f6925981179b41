#include <cuda_runtime.h>

#include "model/ops/kda_cuda.hpp"
#include "model/ops/kda_forward_kernel.cuh"

namespace lockstep::model {
namespace {

using kda::Params;

constexpr int kRing = 6;  // slots per head: 29 MB of tiles for 64 heads, half of the L2

struct Device {
  cudaError_t error = cudaSuccess;
  int multiprocessors = 0;
  bool hopper = false;
  bool cooperative = false;
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

/// Chains take one multiprocessor per head; preparation needs at least as many again.
bool fused_fits(const Device& device, int heads) {
  return device.error == cudaSuccess && device.cooperative && heads * 2 <= device.multiprocessors;
}

int64_t chunks_bound(int64_t tokens, int64_t documents) { return tokens / kda::kChunk + documents; }

struct Layout {
  size_t tiles = 0, chunks = 0, chunk_begin = 0, flags = 0, total = 0;
};

Layout workspace_layout(int64_t tokens, int64_t documents, int heads, int ring) {
  const auto round_up = [](size_t bytes) { return (bytes + 1023) / 1024 * 1024; };
  const int64_t bound = chunks_bound(tokens, documents);
  Layout l;
  l.tiles = 0;
  l.chunks = static_cast<size_t>(ring > 0 ? ring : bound) * static_cast<size_t>(heads) * kda::kTileBytes;
  l.chunk_begin = l.chunks + round_up(static_cast<size_t>(bound) * sizeof(kda::ChunkInfo));
  l.flags = l.chunk_begin + round_up(static_cast<size_t>(documents + 1) * sizeof(int));
  l.total = l.flags + round_up(static_cast<size_t>(heads) * static_cast<size_t>(ring + 1) * sizeof(int));
  return l;
}

KdaCudaResult bad(const char* detail) { return {KdaCudaStatus::kBadArgument, 0, detail}; }

KdaCudaResult check(const KdaForwardArgs& a) {
  if (a.tokens < 0 || a.documents < 0 || a.heads < 1)
    return bad("tokens and documents must be >= 0 and heads >= 1");
  if (a.tokens > 0 && a.documents == 0) return bad("tokens without documents: pass cu_seqlens {0, T}");
  if (chunks_bound(a.tokens, a.documents) * a.heads >= (int64_t{1} << 31))
    return bad("tokens / 64 * heads must stay below 2^31: split the batch");
  if (!(a.lower_bound >= -5.0f && a.lower_bound < 0.0f))
    return bad("lower_bound must lie in [-5, 0): the anchored exponents are safe only there");
  if (a.documents > 0 && a.cu_seqlens == nullptr) return bad("cu_seqlens is null");
  if (a.tokens > 0 && (!a.q_THK || !a.k_THK || !a.v_THV || !a.f_THK || !a.beta_logit_TH || !a.o_THV))
    return bad("q, k, v, f, beta_logit and o must not be null");
  if (a.tokens > 0 && (!a.a_log_H || !a.dt_bias_HK)) return bad("a_log and dt_bias must not be null");
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  if (!aligned(a.q_THK) || !aligned(a.k_THK) || !aligned(a.v_THV) || !aligned(a.f_THK) ||
      !aligned(a.o_THV) || !aligned(a.dt_bias_HK))
    return bad("q, k, v, f, o and dt_bias must be 16-byte aligned");
  if (a.final_state_NHKV != nullptr && a.final_state_NHKV == a.initial_state_NHKV)
    return bad("final_state may not alias initial_state");
  return {};
}

}  // namespace

size_t kda_forward_workspace_bytes(int64_t tokens,
                                   int64_t documents,
                                   int heads,
                                   KdaSchedule schedule) {
  if (tokens < 0 || documents < 0 || heads < 1) return 0;
  const bool fused = schedule == KdaSchedule::kFused ||
                     (schedule == KdaSchedule::kAuto && fused_fits(current_device(), heads));
  return workspace_layout(tokens, documents, heads, fused ? kRing : 0).total;
}

KdaCudaResult kda_forward(const KdaForwardArgs& a,
                          void* workspace,
                          size_t workspace_bytes,
                          CUstream_st* stream) {
  if (const KdaCudaResult result = check(a); !result) return result;
  if (a.documents == 0) return {};
  const Device device = current_device();
  const auto failed = [](cudaError_t error) {
    return KdaCudaResult{KdaCudaStatus::kCudaError, static_cast<int>(error), cudaGetErrorString(error)};
  };
  if (device.error != cudaSuccess) return failed(device.error);
  if (!device.hopper)
    return {KdaCudaStatus::kUnsupportedDevice, 0, "needs compute capability 9.0 (sm_90a code)"};
  const bool fits = fused_fits(device, a.heads);
  if (a.schedule == KdaSchedule::kFused && !fits)
    return {KdaCudaStatus::kUnsupportedDevice, 0,
            "kFused needs cooperative launch and two multiprocessors per head: use kTwoPass"};
  const bool fused = fits && a.schedule != KdaSchedule::kTwoPass;
  const int ring = fused ? kRing : 0;
  const Layout layout = workspace_layout(a.tokens, a.documents, a.heads, ring);
  if (workspace == nullptr || workspace_bytes < layout.total)
    return {KdaCudaStatus::kWorkspaceTooSmall, 0, "allocate kda_forward_workspace_bytes(...)"};
  if (reinterpret_cast<uintptr_t>(workspace) % 128 != 0)
    return bad("workspace must be 128-byte aligned");

  auto* bytes = static_cast<unsigned char*>(workspace);
  Params p{};
  p.tokens = a.tokens;
  p.documents = a.documents;
  p.chunks_bound = chunks_bound(a.tokens, a.documents);
  p.heads = a.heads;
  p.ring = ring;
  p.decay_scale = static_cast<float>(static_cast<double>(a.lower_bound) * 1.4426950408889634);
  p.q = a.q_THK;
  p.k = a.k_THK;
  p.v = a.v_THV;
  p.f = a.f_THK;
  p.beta_logit = a.beta_logit_TH;
  p.a_log = a.a_log_H;
  p.dt_bias = a.dt_bias_HK;
  p.cu_seqlens = a.cu_seqlens;
  p.initial_state = a.initial_state_NHKV;
  p.final_state = a.final_state_NHKV;
  p.o = a.o_THV;
  p.tiles = bytes + layout.tiles;
  p.chunks = reinterpret_cast<kda::ChunkInfo*>(bytes + layout.chunks);
  p.chunk_begin = reinterpret_cast<int*>(bytes + layout.chunk_begin);
  p.ready = reinterpret_cast<int*>(bytes + layout.flags);
  p.consumed = p.ready + a.heads * ring;

  cudaError_t error = cudaSuccess;
  const auto allow_shared = [&](const void* kernel, int size) {
    if (error == cudaSuccess)
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, size);
  };
  kda::plan_kernel<<<1, kda::kPlanThreads, 0, stream>>>(p);
  error = cudaGetLastError();
  if (fused) {
    const void* kernel = reinterpret_cast<const void*>(&kda::fused_kernel);
    allow_shared(kernel, kda::kFusedBytes);
    void* arguments[] = {&p};
    if (error == cudaSuccess)
      error = cudaLaunchCooperativeKernel(kernel, dim3(static_cast<unsigned>(device.multiprocessors)),
                                          dim3(kda::kFusedThreads), arguments, kda::kFusedBytes, stream);
  } else {
    allow_shared(reinterpret_cast<const void*>(&kda::prepare_kernel), kda::kPrepareBytes);
    allow_shared(reinterpret_cast<const void*>(&kda::chain_kernel), kda::kChainBytes);
    if (error == cudaSuccess && a.tokens > 0) {
      kda::prepare_kernel<<<static_cast<unsigned>(2 * device.multiprocessors),
                            kda::kPrepareThreads, kda::kPrepareBytes, stream>>>(p);
      error = cudaGetLastError();
    }
    if (error == cudaSuccess) {
      kda::chain_kernel<<<static_cast<unsigned>(a.documents * a.heads), kda::kChainThreads,
                          kda::kChainBytes, stream>>>(p);
      error = cudaGetLastError();
    }
  }
  return error == cudaSuccess ? KdaCudaResult{} : failed(error);
}

}  // namespace lockstep::model
