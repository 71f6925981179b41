#include <cuda_runtime.h>

#include <algorithm>

#include "model/ops/hc_backward_reduce.cuh"
#include "model/ops/hc_backward_streams.cuh"
#include "model/ops/hc_backward_sums.cuh"
#include "model/ops/hc_cuda.hpp"

namespace lockstep::model {
namespace {

using hc::BackwardMix;
using hc::BackwardParams;

constexpr size_t kRecordBytes = hc::kPass * sizeof(hc::Record);
constexpr size_t kMixBytes = size_t{hc::kPass} * hc::kBackSlices * hc::kMixSums * sizeof(float);
constexpr size_t kFnBytes = size_t{hc::kBackTeams} * hc::kLogits * hc::kRow * sizeof(float);
constexpr size_t kNormBytes = size_t{hc::kBackTeams} * hc::kWidth * sizeof(float);

/// Groups of the first kernel: whole tiles of the second.
int64_t groups(int64_t tokens) {
  return (tokens + hc::kBackTile - 1) / hc::kBackTile * (hc::kBackTile / hc::kSumsGroup);
}

HcCudaResult bad(const char* detail) { return {HcCudaStatus::kBadArgument, 0, detail}; }

HcCudaResult check(const HcBackwardArgs& a) {
  if (a.tokens < 0) return bad("tokens must be >= 0");
  if (a.tokens >= int64_t{1} << 32) return bad("tokens must stay below 2^32: split the batch");
  const bool mixes = a.y != nullptr, projects = a.fn != nullptr;
  const auto any = [](std::initializer_list<const void*> list, bool wanted) {
    return std::any_of(
        list.begin(), list.end(), [&](const void* p) { return (p != nullptr) != wanted; });
  };
  if (a.tokens > 0 && (a.x == nullptr || a.dx_next == nullptr || a.dx == nullptr))
    return bad("x, dx_next and dx must not be null");
  if (any({a.post, a.comb, a.dy, a.dpost, a.dcomb}, mixes))
    return bad("y, post, comb, dy, dpost and dcomb go together: all, or none at a first boundary");
  if (any({a.base, a.scale, a.norm_weight, a.m, a.r, a.dx_normed, a.dpost_next, a.dcomb_next},
          projects) ||
      any({a.dfn, a.dbase, a.dscale, a.dnorm_weight}, projects))
    return bad(
        "fn, base, scale, norm_weight, m, r, dx_normed, dpost_next, dcomb_next and the gradients "
        "of parameters go together: all of them, or none at a last boundary");
  if (!mixes && !projects) return bad("neither y nor fn: nothing to do");
  if (projects && (a.sinkhorn_iters < 1 || a.sinkhorn_iters > hc::kMaxIterations))
    return bad("sinkhorn_iters must be 1 to 64");
  if (!(a.norm_eps >= 0.0f && a.eps >= 0.0f)) return bad("epsilons must not be negative");
  for (const void* p : {static_cast<const void*>(a.x),
                        static_cast<const void*>(a.y),
                        static_cast<const void*>(a.post),
                        static_cast<const void*>(a.comb),
                        static_cast<const void*>(a.fn),
                        static_cast<const void*>(a.norm_weight),
                        static_cast<const void*>(a.dx_next),
                        static_cast<const void*>(a.dx_normed),
                        static_cast<const void*>(a.dcomb_next),
                        static_cast<const void*>(a.dx),
                        static_cast<const void*>(a.dy)})
    if (reinterpret_cast<uintptr_t>(p) % 16 != 0)
      return bad("streams, fn, norm_weight, post, comb and dcomb_next: 16-byte alignment");
  const size_t tokens = static_cast<size_t>(a.tokens), row = size_t{hc::kWidth} * 2;
  const auto overlaps = [](const void* to, size_t to_bytes, const void* from, size_t from_bytes) {
    const auto t = reinterpret_cast<uintptr_t>(to), f = reinterpret_cast<uintptr_t>(from);
    return to != nullptr && from != nullptr && t < f + from_bytes && f < t + to_bytes;
  };
  for (const auto& [out, out_row] : {std::pair<const void*, size_t>{a.dx, row * 4}, {a.dy, row}})
    for (const auto& [in, in_row] : {std::pair<const void*, size_t>{a.x, row * 4},
                                     {a.y, row},
                                     {a.dx_next, row * 4},
                                     {a.dx_normed, row}})
      if (overlaps(out, tokens * out_row, in, tokens * in_row))
        return bad("dx and dy may not overlap x, y, dx_next or dx_normed");
  return {};
}

/// `early`: blocks may start before the previous kernel has ended; the kernel waits for it itself.
template <class... Parameters>
cudaError_t launch(void (*kernel)(Parameters...),
                   int64_t blocks,
                   int threads,
                   size_t shared,
                   bool early,
                   cudaStream_t stream,
                   Parameters... parameters) {
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, parameters...);
}

cudaError_t reduce(const BackwardParams& p, int64_t mixed_tokens, bool parameters, cudaStream_t s) {
  const int64_t mix_blocks =
      (mixed_tokens * hc::kMixSums + hc::kReduceThreads - 1) / hc::kReduceThreads;
  const int parameter_blocks = parameters ? hc::kParameterBlocks : 0;
  if (mix_blocks + parameter_blocks == 0) return cudaSuccess;
  return launch(&hc::backward_reduce_kernel,
                mix_blocks + parameter_blocks,
                hc::kReduceThreads,
                0,
                p.tokens > 0,
                s,
                p,
                parameter_blocks,
                groups(p.tokens));
}

template <BackwardMix kMix, bool kUsualNorm>
cudaError_t run_pass(const BackwardParams& p, bool projects, int processors, cudaStream_t stream) {
  constexpr bool kMixes = kMix != BackwardMix::kNone;
  const int64_t padded = (p.end - p.begin + hc::kBackTile - 1) / hc::kBackTile * hc::kBackTile;
  cudaError_t error;
  if (projects) {
    error = launch(&hc::backward_sums_kernel<kMix, kUsualNorm>,
                   std::min<int64_t>(padded / hc::kBackTile, processors),
                   hc::kSumsThreads,
                   hc::sums_bytes(p.sinkhorn_iters),
                   false,
                   stream,
                   p);
  } else {
    error = launch(&hc::backward_records_kernel, (padded + 7) / 8, 256, 0, false, stream, p);
  }
  const auto streams = [&](auto kernel) {
    if (error == cudaSuccess)
      error = launch(kernel,
                     hc::kBackSlices * hc::kBackTeams,
                     hc::kStreamsThreads,
                     sizeof(hc::StreamsShared),
                     true,
                     stream,
                     p);
  };
  if (projects) {
    streams(&hc::backward_streams_kernel<kMix, true, kUsualNorm>);
  } else if constexpr (kMixes) {
    streams(&hc::backward_streams_kernel<kMix, false, true>);
  }
  if (error != cudaSuccess) return error;
  return reduce(p, kMixes ? p.end - p.begin : 0, projects && p.end == p.tokens, stream);
}

}  // namespace

size_t hc_backward_workspace_bytes(int64_t tokens) {
  return kRecordBytes + kMixBytes + kFnBytes + kNormBytes +
         static_cast<size_t>(groups(std::max<int64_t>(tokens, 0))) * hc::kLogitSums * sizeof(float);
}

HcCudaResult hc_backward(const HcBackwardArgs& a,
                         void* workspace,
                         size_t workspace_bytes,
                         CUstream_st* stream) {
  if (const HcCudaResult result = check(a); !result) return result;
  const auto failed = [](cudaError_t e) {
    return HcCudaResult{HcCudaStatus::kCudaError, static_cast<int>(e), cudaGetErrorString(e)};
  };
  int device = 0, major = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return failed(error);
  if (major != 9)
    return {HcCudaStatus::kUnsupportedDevice, 0, "needs compute capability 9.0 (sm_90a code)"};
  if (workspace == nullptr || workspace_bytes < hc_backward_workspace_bytes(a.tokens))
    return {HcCudaStatus::kWorkspaceTooSmall, 0, "allocate hc_backward_workspace_bytes(tokens)"};
  if (reinterpret_cast<uintptr_t>(workspace) % 128 != 0)
    return bad("workspace must be 128-byte aligned");

  BackwardParams p{};
  p.tokens = a.tokens;
  p.x = a.x;
  p.y = a.y;
  p.dx_next = a.dx_next;
  p.dx_normed = a.dx_normed;
  p.post = a.post;
  p.comb = a.comb;
  p.fn = a.fn;
  p.base = a.base;
  p.scale = a.scale;
  p.norm_weight = a.norm_weight;
  p.m = a.m;
  p.r = a.r;
  p.dpost_next = a.dpost_next;
  p.dcomb_next = a.dcomb_next;
  p.norm_eps = a.norm_eps;
  p.eps = a.eps;
  p.sinkhorn_iters = a.sinkhorn_iters;
  p.bf16_fn = a.rounding.bf16_fn;
  p.bf16_base_scale = a.rounding.bf16_base_scale;
  p.bf16_coefficients = a.rounding.bf16_coefficients;
  p.two_norm_roundings = a.rounding.two_norm_roundings;
  p.unrounded_statistic = a.rounding.unrounded_statistic;
  p.bf16_norm_weight = a.rounding.bf16_norm_weight;
  p.dx = a.dx;
  p.dy = a.dy;
  p.dpost = a.dpost;
  p.dcomb = a.dcomb;
  p.dfn = a.dfn;
  p.dbase = a.dbase;
  p.dscale = a.dscale;
  p.dnorm_weight = a.dnorm_weight;
  unsigned char* memory = static_cast<unsigned char*>(workspace);
  const auto take = [&](size_t bytes) { return std::exchange(memory, memory + bytes); };
  p.records = reinterpret_cast<hc::Record*>(take(kRecordBytes));
  p.mix_sums = reinterpret_cast<float*>(take(kMixBytes));
  p.fn_sums = reinterpret_cast<float*>(take(kFnBytes));
  p.norm_sums = reinterpret_cast<float*>(take(kNormBytes));
  p.logit_sums = reinterpret_cast<float*>(memory);

  const bool projects = a.fn != nullptr;
  for (int64_t begin = 0; begin < a.tokens; begin += hc::kPass) {
    p.begin = begin;
    p.end = std::min(a.tokens, begin + hc::kPass);
    p.first_pass = begin == 0;
    const auto run = [&]<bool kUsualNorm>() {
      return a.y == nullptr
                 ? run_pass<BackwardMix::kNone, kUsualNorm>(p, projects, processors, stream)
             : a.rounding.three_mix_roundings
                 ? run_pass<BackwardMix::kThreeRoundings, kUsualNorm>(
                       p, projects, processors, stream)
                 : run_pass<BackwardMix::kOneRounding, kUsualNorm>(p, projects, processors, stream);
    };
    error = a.rounding.two_norm_roundings || a.rounding.unrounded_statistic
                ? run.operator()<false>()
                : run.operator()<true>();
    if (error != cudaSuccess) return failed(error);
  }
  if (projects && a.tokens == 0 && (error = reduce(p, 0, true, stream)) != cudaSuccess)
    return failed(error);
  return {};
}

}  // namespace lockstep::model
