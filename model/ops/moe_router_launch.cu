#include <cuda_runtime.h>

#include "model/ops/moe_cuda.hpp"
#include "model/ops/moe_router_kernel.cuh"

namespace lockstep::model {
namespace {

MoeCudaResult bad(const char* detail) { return {MoeCudaStatus::kBadArgument, 0, detail}; }

MoeCudaResult check(const MoeRouterArgs& a) {
  if (a.tokens < 0 || a.tokens >= int64_t{1} << 33) return bad("tokens must lie in [0, 2^33)");
  if (a.experts < 1 || a.experts > moe::kRouterExperts) return bad("experts must lie in [1, 512]");
  if (a.slots < 1 || a.slots > 32) return bad("slots must lie in [1, 32]");
  if (a.groups < 1 || a.groups > 32 || a.experts % a.groups != 0 || a.groups_kept < 1 ||
      a.groups_kept > a.groups)
    return bad("groups must lie in [1, 32] and divide experts; groups_kept in [1, groups]");
  if (!a.replay && a.slots > a.experts / a.groups * a.groups_kept)
    return bad("slots must not exceed the experts of the kept groups");
  if (a.tokens > 0 && (a.logits == nullptr || a.chosen == nullptr))
    return bad("logits and chosen must not be null");
  return {};
}

moe::RouterParams params(const MoeRouterArgs& a) {
  moe::RouterParams p{};
  p.tokens = a.tokens;
  p.experts = static_cast<int>(a.experts), p.slots = static_cast<int>(a.slots);
  p.groups = static_cast<int>(a.groups), p.groups_kept = static_cast<int>(a.groups_kept);
  p.normalise = a.normalise, p.softmax = a.softmax, p.round_scores = a.round_scores;
  p.replay = a.replay;
  p.epsilon = a.epsilon, p.scaling = a.scaling;
  p.logits = a.logits, p.bias = a.bias, p.chosen = a.chosen;
  return p;
}

template <class Kernel>
MoeCudaResult launch(Kernel kernel, const moe::RouterParams& p, CUstream_st* stream) {
  const int64_t blocks = (p.tokens + moe::kRouterWarps - 1) / moe::kRouterWarps;
  kernel<<<static_cast<unsigned>(blocks), moe::kRouterWarps * 32, 0, stream>>>(p);
  const cudaError_t e = cudaGetLastError();
  if (e == cudaSuccess) return {};
  return {MoeCudaStatus::kCudaError, static_cast<int>(e), cudaGetErrorString(e)};
}

}  // namespace

MoeCudaResult moe_route(const MoeRouterArgs& a, float* weights, CUstream_st* stream) {
  if (const MoeCudaResult r = check(a); !r) return r;
  if (a.tokens == 0) return {};
  if (weights == nullptr || (!a.replay && a.bias == nullptr))
    return bad("weights and bias must not be null");
  moe::RouterParams p = params(a);
  p.weights = weights;
  return a.experts <= 288 ? launch(&moe::route_kernel<9>, p, stream)
                          : launch(&moe::route_kernel<16>, p, stream);
}

MoeCudaResult moe_route_backward(const MoeRouterArgs& a,
                                 const float* dweights,
                                 float* dlogits,
                                 CUstream_st* stream) {
  if (const MoeCudaResult r = check(a); !r) return r;
  if (a.tokens == 0) return {};
  if (dweights == nullptr || dlogits == nullptr) return bad("dweights and dlogits: null");
  moe::RouterParams p = params(a);
  p.dweights = dweights, p.dlogits = dlogits;
  return a.experts <= 288 ? launch(&moe::route_backward_kernel<9>, p, stream)
                          : launch(&moe::route_backward_kernel<16>, p, stream);
}

}  // namespace lockstep::model
