#include <cuda_runtime.h>

#include "model/ops/conv_cuda.hpp"
#include "model/ops/conv_kernels.cuh"

namespace lockstep::model {
namespace {

ConvCudaResult bad(const char* detail) { return {ConvCudaStatus::kBadArgument, 0, detail}; }
ConvCudaResult failed(cudaError_t e) {
  return {ConvCudaStatus::kCudaError, static_cast<int>(e), cudaGetErrorString(e)};
}
bool misaligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 != 0; }

ConvCudaResult check(const ConvArgs& a) {
  if (a.tokens < 0 || a.channels < 0 || a.documents < 0)
    return bad("tokens, channels and documents must be >= 0");
  if (a.tokens >= int64_t{1} << 32 || a.channels >= int64_t{1} << 24)
    return bad("tokens must stay below 2^32 and channels below 2^24");
  if (a.channels % 8 != 0 || a.x_stride % 8 != 0)
    return bad("channels and x_stride must be multiples of 8");
  if (a.x_stride < a.channels) return bad("x_stride must be at least channels");
  if (a.tokens > 0 && (a.documents == 0 || a.cu == nullptr))
    return bad("tokens without documents: pass cu = {0, tokens} for one document");
  if (a.tokens * a.channels > 0 && (a.x == nullptr || a.weight == nullptr))
    return bad("x and weight must not be null");
  if (misaligned(a.x) || misaligned(a.weight) || misaligned(a.halo))
    return bad("x, weight and halo: 16-byte alignment");
  int device = 0, major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess) return failed(error);
  if (major != 9)
    return {ConvCudaStatus::kUnsupportedDevice, 0, "needs compute capability 9.0 (sm_90a code)"};
  return {};
}

conv::Params params(const ConvArgs& a) {
  conv::Params p{};
  p.tokens = a.tokens;
  p.channels = a.channels;
  p.documents = a.documents;
  p.cu = a.cu;
  p.x = a.x;
  p.x_stride = a.x_stride;
  p.weight = a.weight;
  p.halo = a.halo;
  p.bf16_weight = a.bf16_weight;
  return p;
}

int64_t row_blocks(int64_t tokens) { return (tokens + conv::kBlockRows - 1) / conv::kBlockRows; }

template <class Kernel>
cudaError_t launch(Kernel kernel, int64_t blocks, conv::Params& p, cudaStream_t stream) {
  if (blocks > 0) kernel<<<static_cast<unsigned>(blocks), conv::kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

int64_t column_blocks(int64_t channels, int per_thread) {
  const int64_t width = int64_t{conv::kThreads} * per_thread;
  return (channels + width - 1) / width;
}

}  // namespace

ConvCudaResult conv_silu_forward(const ConvArgs& a, uint16_t* y, CUstream_st* stream) {
  if (const ConvCudaResult result = check(a); !result) return result;
  if (a.tokens * a.channels == 0) return {};
  if (y == nullptr || misaligned(y)) return bad("y must not be null, 16-byte aligned");
  if (y == a.x) return bad("y may not overlap x");
  conv::Params p = params(a);
  p.y = y;
  p.column_blocks = column_blocks(a.channels, conv::kForwardChannels);
  const cudaError_t error =
      launch(&conv::forward_kernel, row_blocks(a.tokens) * p.column_blocks, p, stream);
  return error == cudaSuccess ? ConvCudaResult{} : failed(error);
}

size_t conv_silu_backward_workspace_bytes(int64_t tokens, int64_t channels) {
  return static_cast<size_t>(row_blocks(tokens) * channels) * conv::kTaps * sizeof(float);
}

ConvCudaResult conv_silu_backward(const ConvArgs& a,
                                  const ConvGradients& g,
                                  void* workspace,
                                  size_t workspace_bytes,
                                  CUstream_st* stream) {
  if (const ConvCudaResult result = check(a); !result) return result;
  if (a.channels == 0) return {};
  if (g.dweight == nullptr) return bad("dweight must not be null");
  if (a.tokens > 0 && (g.dy == nullptr || g.dx == nullptr)) return bad("dy or dx is null");
  if ((a.halo == nullptr) != (g.dhalo == nullptr)) return bad("halo and dhalo go together");
  if (misaligned(g.dy) || misaligned(g.dx) || misaligned(g.dhalo) || misaligned(workspace))
    return bad("dy, dx, dhalo and workspace: 16-byte alignment");
  if (g.dx != nullptr && (g.dx == a.x || g.dx == g.dy)) return bad("dx may not overlap x or dy");
  const size_t bytes = conv_silu_backward_workspace_bytes(a.tokens, a.channels);
  if (bytes > 0 && (workspace == nullptr || workspace_bytes < bytes))
    return {ConvCudaStatus::kWorkspaceTooSmall,
            0,
            "allocate conv_silu_backward_workspace_bytes(tokens, channels)"};
  conv::Params p = params(a);
  p.dy = g.dy;
  p.dx = g.dx;
  p.dhalo = g.dhalo;
  p.dweight = g.dweight;
  p.weight_sums = static_cast<float*>(workspace);
  p.column_blocks = column_blocks(a.channels, conv::kBackwardChannels);
  cudaError_t error = cudaSuccess;
  if (g.dhalo != nullptr)  // rows of empty documents are written by nobody
    error = cudaMemsetAsync(
        g.dhalo, 0, static_cast<size_t>(a.documents * (conv::kTaps - 1) * a.channels) * 2, stream);
  if (error == cudaSuccess)
    error = launch(&conv::backward_kernel, row_blocks(a.tokens) * p.column_blocks, p, stream);
  if (error == cudaSuccess)
    error = launch(&conv::reduce_kernel,
                   (a.channels * conv::kTaps + conv::kThreads - 1) / conv::kThreads,
                   p,
                   stream);
  return error == cudaSuccess ? ConvCudaResult{} : failed(error);
}

}  // namespace lockstep::model
