#include <cuda_runtime.h>

#include <algorithm>

#include "model/ops/kda_backward_kernel.cuh"
#include "model/ops/kda_cuda.hpp"
#include "model/ops/kda_launch.cuh"

namespace lockstep::model {
namespace {

using kda::BackwardParams;
using kda::Params;

struct Layout {
  size_t records = 0, state = 0, state_grad = 0, n = 0, dv_tiles = 0;
  size_t carry = 0, partials = 0, chunks = 0, chunk_begin = 0, total = 0;
};

Layout workspace_layout(int64_t tokens, int64_t documents, int heads) {
  const auto bound = static_cast<size_t>(kda_chunks_bound(tokens, documents));
  const auto h = static_cast<size_t>(heads);
  const size_t pairs = std::min(bound, static_cast<size_t>(kda_window_chunks(heads))) * h;
  Layout l;
  const auto take = [&](size_t bytes) {
    const size_t at = l.total;
    l.total += (bytes + 1023) / 1024 * 1024;
    return at;
  };
  l.records = take(pairs * kda::kTileBytes);
  l.state = take(pairs * kda::kStateBytes);
  l.state_grad = take(pairs * kda::kStateBytes);
  l.n = take(pairs * kda::kTile);
  l.dv_tiles = take(pairs * kda::kTile);
  l.carry = take(h * kda::kDim * kda::kDim * sizeof(float));
  l.partials = take(bound * h * kda::kPartials * sizeof(float));
  l.chunks = take(bound * sizeof(kda::ChunkInfo));
  l.chunk_begin = take(static_cast<size_t>(documents + 1) * sizeof(int));
  return l;
}

KdaCudaResult check(const KdaBackwardArgs& a) {
  KdaForwardArgs forward = a.forward;
  forward.o_THV = a.dv_THV;  // not read here, and checked as one that must be there
  forward.final_state_NHKV = nullptr;
  if (const KdaCudaResult result = kda_check_forward(forward); !result) return result;
  if (forward.tokens > 0 && (!a.do_THV || !a.dq_THK || !a.dk_THK || !a.dv_THV || !a.df_THK ||
                             !a.dbeta_logit_TH || !forward.checkpoints))
    return kda_bad_argument("do, dq, dk, dv, df, dbeta_logit and checkpoints must not be null");
  if (!a.da_log_H || !a.ddt_bias_HK)
    return kda_bad_argument("da_log and ddt_bias must not be null");
  if (!kda_aligned(a.do_THV) || !kda_aligned(a.dq_THK) || !kda_aligned(a.dk_THK) ||
      !kda_aligned(a.dv_THV) || !kda_aligned(a.df_THK) || !kda_aligned(a.dfinal_state_NHKV) ||
      !kda_aligned(a.dinitial_state_NHKV))
    return kda_bad_argument("do, dq, dk, dv, df and gradients of states must be 16-byte aligned");
  if (a.dinitial_state_NHKV != nullptr && a.dinitial_state_NHKV == a.dfinal_state_NHKV)
    return kda_bad_argument("dinitial_state may not alias dfinal_state");
  return {};
}

}  // namespace

size_t kda_backward_workspace_bytes(int64_t tokens, int64_t documents, int heads) {
  if (tokens < 0 || documents < 0 || heads < 1) return 0;
  return workspace_layout(tokens, documents, heads).total;
}

KdaCudaResult kda_backward(const KdaBackwardArgs& args,
                           void* workspace,
                           size_t workspace_bytes,
                           CUstream_st* stream) {
  if (const KdaCudaResult result = check(args); !result) return result;
  const KdaForwardArgs& a = args.forward;
  const KdaDevice device = kda_device();
  if (device.error != cudaSuccess) return kda_failed(device.error);
  if (!device.hopper)
    return {KdaCudaStatus::kUnsupportedDevice, 0, "needs compute capability 9.0 (sm_90a code)"};
  if (a.documents == 0) {
    const auto h = static_cast<size_t>(a.heads);
    cudaError_t error = cudaMemsetAsync(args.da_log_H, 0, h * sizeof(float), stream);
    if (error == cudaSuccess)
      error = cudaMemsetAsync(args.ddt_bias_HK, 0, h * kda::kDim * sizeof(float), stream);
    return error == cudaSuccess ? KdaCudaResult{} : kda_failed(error);
  }
  const Layout layout = workspace_layout(a.tokens, a.documents, a.heads);
  if (workspace == nullptr || workspace_bytes < layout.total)
    return {KdaCudaStatus::kWorkspaceTooSmall, 0, "allocate kda_backward_workspace_bytes(...)"};
  if (reinterpret_cast<uintptr_t>(workspace) % 128 != 0)
    return kda_bad_argument("workspace must be 128-byte aligned");

  auto* const bytes = static_cast<unsigned char*>(workspace);
  const int window = kda_window_chunks(a.heads);
  BackwardParams p{};
  Params& base = p.base;
  base.documents = a.documents;
  base.heads = base.row_heads = a.heads;
  base.ring = window;
  base.decay_scale = static_cast<float>(static_cast<double>(a.lower_bound) * 1.4426950408889634);
  base.q = a.q_THK;
  base.k = a.k_THK;
  base.v = a.v_THV;
  base.f = a.f_THK;
  base.beta_logit = a.beta_logit_TH;
  base.a_log = a.a_log_H;
  base.dt_bias = a.dt_bias_HK;
  base.cu_seqlens = a.cu_seqlens;
  base.initial_state = a.initial_state_NHKV;
  base.checkpoints = a.checkpoints;
  base.checkpoint_mask = window - 1;
  base.tiles = bytes + layout.records;
  base.chunks = reinterpret_cast<kda::ChunkInfo*>(bytes + layout.chunks);
  base.chunk_begin = reinterpret_cast<int*>(bytes + layout.chunk_begin);
  p.dout = args.do_THV;
  p.dfinal = args.dfinal_state_NHKV;
  p.dinitial = args.dinitial_state_NHKV;
  p.dq = args.dq_THK;
  p.dk = args.dk_THK;
  p.dv = args.dv_THV;
  p.df = args.df_THK;
  p.dbeta = args.dbeta_logit_TH;
  p.state = bytes + layout.state;
  p.state_grad = bytes + layout.state_grad;
  p.n = bytes + layout.n;
  p.dv_tiles = bytes + layout.dv_tiles;
  p.carry = reinterpret_cast<float*>(bytes + layout.carry);
  p.partials = reinterpret_cast<float*>(bytes + layout.partials);

  cudaError_t error = cudaSuccess;
  const auto allow = [&](const void* kernel, int shared) {
    if (error == cudaSuccess)
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  };
  allow(reinterpret_cast<const void*>(&kda::backward_prepare_kernel), kda::kPrepareBytes);
  allow(reinterpret_cast<const void*>(&kda::backward_chain_kernel), kda::kWindowChainBytes);
  allow(reinterpret_cast<const void*>(&kda::backward_gradient_kernel), kda::kGradientBytes);
  if (error != cudaSuccess) return kda_failed(error);

  Params plan = base;
  plan.heads = 0;  // no flags to clear
  kda::plan_kernel<<<1, kda::kPlanThreads, 0, stream>>>(plan);
  const auto heads = static_cast<unsigned>(a.heads);
  const auto sms = static_cast<unsigned>(device.multiprocessors);
  const unsigned blocks = heads * std::max(1u, sms / heads);
  const int64_t windows = kda_windows_bound(a.tokens, a.documents, a.heads);
  for (int64_t w = windows - 1; w >= 0; --w) {
    p.first = static_cast<int>(w * window);
    p.last = p.first + window;
    kda::
        backward_prepare_kernel<<<blocks, kda::kWindowPrepareThreads, kda::kPrepareBytes, stream>>>(
            p);
    kda::backward_chain_kernel<<<4 * heads,
                                 kda::kWindowChainThreads,
                                 kda::kWindowChainBytes,
                                 stream>>>(p);
    kda::backward_gradient_kernel<<<blocks, kda::kGradientThreads, kda::kGradientBytes, stream>>>(
        p);
  }
  kda::backward_sum_kernel<<<dim3(heads, 2), 1024, 0, stream>>>(p, args.da_log_H, args.ddt_bias_HK);
  if (p.dinitial != nullptr) {
    const auto rows = static_cast<unsigned>(std::min<int64_t>(a.documents, 256));
    kda::backward_empty_kernel<<<dim3(16, rows), 256, 0, stream>>>(p);
  }
  error = cudaGetLastError();
  return error == cudaSuccess ? KdaCudaResult{} : kda_failed(error);
}

}  // namespace lockstep::model
