#include <cuda_runtime.h>

#include <algorithm>

#include "model/ops/hc_cuda.hpp"
#include "model/ops/hc_forward_kernel.cuh"

namespace lockstep::model {
namespace {

using hc::Params;

constexpr int kMaxTeams = 16;  // more multiprocessors than that stay idle
constexpr int kMaxStreams = kMaxTeams * hc::kGroups;
constexpr size_t kDoneBytes = size_t{kMaxStreams} * hc::kSlices * sizeof(int);
constexpr size_t kPartialBytes =
    size_t{kMaxStreams} * hc::kRing * hc::kSlices * hc::kPartial * sizeof(float);

HcCudaResult bad(const char* detail) { return {HcCudaStatus::kBadArgument, 0, detail}; }

bool overlap(const void* a, size_t a_bytes, const void* b, size_t b_bytes) {
  const auto first = reinterpret_cast<uintptr_t>(a), second = reinterpret_cast<uintptr_t>(b);
  return first < second + b_bytes && second < first + a_bytes;
}

HcCudaResult check(const HcForwardArgs& a) {
  if (a.tokens < 0) return bad("tokens must be >= 0");
  if (a.tokens >= int64_t{1} << 34) return bad("tokens must stay below 2^34: split the batch");
  if (a.tokens == 0) return {};
  if (a.x == nullptr) return bad("x is null");
  const bool mixes = a.y != nullptr, projects = a.fn != nullptr;
  if (mixes != (a.post != nullptr) || mixes != (a.comb != nullptr) ||
      mixes != (a.x_next != nullptr))
    return bad("y, post, comb and x_next go together: all of them, or none at a first boundary");
  if (projects != (a.base != nullptr) || projects != (a.scale != nullptr) ||
      projects != (a.norm_weight != nullptr) || projects != (a.x_normed != nullptr) ||
      projects != (a.post_next != nullptr) || projects != (a.comb_next != nullptr))
    return bad("fn, base, scale, norm_weight, x_normed, post_next and comb_next go together");
  if (!mixes && !projects) return bad("neither y nor fn: nothing to do");
  if (!projects && (a.pre_next != nullptr || a.m_next != nullptr || a.r_next != nullptr))
    return bad("pre_next, m_next or r_next without fn");
  if (projects && a.sinkhorn_iters < 1) return bad("sinkhorn_iters must be at least 1");
  if (!(a.norm_eps >= 0.0f && a.eps >= 0.0f)) return bad("epsilons must not be negative");
  for (const void* p : {static_cast<const void*>(a.x),
                        static_cast<const void*>(a.y),
                        static_cast<const void*>(a.post),
                        static_cast<const void*>(a.comb),
                        static_cast<const void*>(a.x_next),
                        static_cast<const void*>(a.fn),
                        static_cast<const void*>(a.norm_weight),
                        static_cast<const void*>(a.x_normed)})
    if (reinterpret_cast<uintptr_t>(p) % 16 != 0)
      return bad("x, y, post, comb, x_next, fn, norm_weight and x_normed: 16-byte alignment");
  const size_t tokens = static_cast<size_t>(a.tokens), row = size_t{hc::kWidth} * 2;
  if (mixes && overlap(a.x, tokens * row * 4, a.x_next, tokens * row * 4))
    return bad("x_next may not overlap x");
  if (mixes && projects &&
      (overlap(a.post, tokens * 16, a.post_next, tokens * 16) ||
       overlap(a.comb, tokens * 64, a.comb_next, tokens * 64)))
    return bad("post_next and comb_next may not overlap post and comb");
  return {};
}

}  // namespace

size_t hc_forward_workspace_bytes() { return kDoneBytes + kPartialBytes; }

HcCudaResult hc_forward(const HcForwardArgs& a,
                        void* workspace,
                        size_t workspace_bytes,
                        CUstream_st* stream) {
  if (const HcCudaResult result = check(a); !result) return result;
  if (a.tokens == 0) return {};
  int device = 0, major = 0, cooperative = 0, multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  const auto query = [&](int* value, cudaDeviceAttr what) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(value, what, device);
  };
  query(&major, cudaDevAttrComputeCapabilityMajor);
  query(&cooperative, cudaDevAttrCooperativeLaunch);
  query(&multiprocessors, cudaDevAttrMultiProcessorCount);
  const auto failed = [](cudaError_t e) {
    return HcCudaResult{HcCudaStatus::kCudaError, static_cast<int>(e), cudaGetErrorString(e)};
  };
  if (error != cudaSuccess) return failed(error);
  const int teams = std::min(multiprocessors / hc::kSlices, kMaxTeams);
  if (major != 9 || cooperative == 0 || teams < 1)
    return {HcCudaStatus::kUnsupportedDevice,
            0,
            "needs compute capability 9.0 (sm_90a code), cooperative launch, 16 multiprocessors"};
  if (workspace == nullptr || workspace_bytes < hc_forward_workspace_bytes())
    return {HcCudaStatus::kWorkspaceTooSmall, 0, "allocate hc_forward_workspace_bytes()"};
  if (reinterpret_cast<uintptr_t>(workspace) % 128 != 0)
    return bad("workspace must be 128-byte aligned");

  Params p{};
  p.tokens = a.tokens;
  p.tiles = (a.tokens + hc::kTile - 1) / hc::kTile;
  p.x = a.x;
  p.y = a.y;
  p.post = a.post;
  p.comb = a.comb;
  p.x_next = a.x_next;
  p.fn = a.fn;
  p.base = a.base;
  p.scale = a.scale;
  p.norm_weight = a.norm_weight;
  p.norm_eps = a.norm_eps;
  p.eps = a.eps;
  p.sinkhorn_iters = a.sinkhorn_iters;
  p.project = a.fn != nullptr;
  p.bf16_fn = a.rounding.bf16_fn;
  p.bf16_base_scale = a.rounding.bf16_base_scale;
  p.bf16_coefficients = a.rounding.bf16_coefficients;
  p.two_norm_roundings = a.rounding.two_norm_roundings;
  p.unrounded_statistic = a.rounding.unrounded_statistic;
  p.bf16_norm_weight = a.rounding.bf16_norm_weight;
  p.x_normed = a.x_normed;
  p.pre_next = a.pre_next;
  p.post_next = a.post_next;
  p.comb_next = a.comb_next;
  p.m_next = a.m_next;
  p.r_next = a.r_next;
  p.done = static_cast<int*>(workspace);
  p.partial = reinterpret_cast<float*>(static_cast<unsigned char*>(workspace) + kDoneBytes);

  using hc::Mix;
  const void* const kernel =
      a.y == nullptr ? reinterpret_cast<const void*>(&hc::forward_kernel<Mix::kNone>)
      : a.rounding.three_mix_roundings
          ? reinterpret_cast<const void*>(&hc::forward_kernel<Mix::kThreeRoundings>)
          : reinterpret_cast<const void*>(&hc::forward_kernel<Mix::kOneRounding>);
  constexpr int kBytes = sizeof(hc::Shared);
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error == cudaSuccess && p.project) error = cudaMemsetAsync(p.done, 0, kDoneBytes, stream);
  void* arguments[] = {&p};
  if (error == cudaSuccess)
    error = cudaLaunchCooperativeKernel(kernel,
                                        dim3(static_cast<unsigned>(teams * hc::kSlices)),
                                        dim3(hc::kThreads),
                                        arguments,
                                        kBytes,
                                        stream);
  return error == cudaSuccess ? HcCudaResult{} : failed(error);
}

}  // namespace lockstep::model
