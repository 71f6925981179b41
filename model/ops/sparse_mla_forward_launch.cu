#include <cuda_runtime.h>

#include <algorithm>

#include "model/ops/sparse_mla_cuda.hpp"
#include "model/ops/sparse_mla_forward_kernel.cuh"
#include "model/ops/sparse_mla_launch.cuh"

namespace lockstep::model {
namespace {

MlaCudaResult check(const SparseMlaForwardArgs& a) {
  if (a.tokens < 0 || a.keys < 0 || a.width < 0) return bad("tokens, keys and width must be >= 0");
  if (a.tokens >= int64_t{1} << 31 || a.keys >= int64_t{1} << 31 || a.width >= int64_t{1} << 31)
    return bad("tokens, keys and width must stay below 2^31: split the batch");
  if (a.heads < 1 || a.heads > mla::kHeads) return bad("heads must be 1 to 64: split them");
  if (!(a.scale > 0.0f)) return bad("scale must be positive");
  if (a.tokens == 0) return {};
  if (a.q_THR == nullptr || a.a_THR == nullptr) return bad("q or a is null");
  if (a.width > 0 && a.selection_TW == nullptr) return bad("selection is null");
  if (a.width > 0 && a.keys > 0 && a.latent_SR == nullptr) return bad("latent is null");
  if (misaligned(a.q_THR) || misaligned(a.latent_SR) || misaligned(a.a_THR))
    return bad("q, latent and a: 16-byte alignment");
  if (a.a_THR == a.q_THR) return bad("a may not overlap q");
  return {};
}

}  // namespace

size_t sparse_mla_forward_workspace_bytes(int64_t tokens) {
  return static_cast<size_t>(tokens) * sizeof(mla::TokenPlan);
}

MlaCudaResult sparse_mla_forward(const SparseMlaForwardArgs& a,
                                 void* workspace,
                                 size_t workspace_bytes,
                                 CUstream_st* stream) {
  if (const MlaCudaResult result = check(a); !result) return result;
  if (a.tokens == 0) return {};
  int multiprocessors = 0;
  if (const MlaCudaResult result = find_device(multiprocessors); !result) return result;
  if (workspace == nullptr || workspace_bytes < sparse_mla_forward_workspace_bytes(a.tokens))
    return {MlaCudaStatus::kWorkspaceTooSmall,
            0,
            "allocate sparse_mla_forward_workspace_bytes(tokens)"};
  if (reinterpret_cast<uintptr_t>(workspace) % 128 != 0)
    return bad("workspace must be 128-byte aligned");

  mla::ForwardParams p{};
  p.selection = {a.tokens,
                 static_cast<uint32_t>(a.keys),
                 static_cast<int>(a.width),
                 a.selection_TW,
                 a.latent_SR,
                 static_cast<mla::TokenPlan*>(workspace)};
  p.heads = a.heads;
  p.q = a.q_THR;
  p.exponent_scale = a.scale * 1.44269504088896340736f;
  p.a = a.a_THR;
  p.lse = a.lse_TH;

  constexpr int kBytes = sizeof(mla::ForwardShared);
  cudaError_t error = cudaFuncSetAttribute(
      mla::forward_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return failed(error);
  const auto planning = static_cast<unsigned>((a.tokens + mla::kPlanWarps - 1) / mla::kPlanWarps);
  mla::plan_tokens<<<planning, 32 * mla::kPlanWarps, 0, stream>>>(p.selection);
  if (error = cudaGetLastError(); error != cudaSuccess) return failed(error);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(a.tokens, multiprocessors));
  mla::forward_kernel<<<blocks, mla::kThreads, kBytes, stream>>>(p);
  error = cudaGetLastError();
  return error == cudaSuccess ? MlaCudaResult{} : failed(error);
}

}  // namespace lockstep::model
