#include <cuda_runtime.h>

#include <algorithm>

#include "model/ops/head_cuda.hpp"
#include "model/ops/head_gemm_kernel.cuh"
#include "model/ops/tensor_map.cuh"

namespace lockstep::model {
namespace {

using head::Product;
using head::ProductParams;

constexpr int64_t kCounterBytes = 128;
constexpr int64_t kTile = gemm::kTileColumns;

HeadCudaResult bad(const char* detail) { return {HeadCudaStatus::kBadArgument, 0, detail}; }
HeadCudaResult failed(cudaError_t e) {
  return {HeadCudaStatus::kCudaError, static_cast<int>(e), cudaGetErrorString(e)};
}
HeadCudaResult outcome(cudaError_t e) { return e == cudaSuccess ? HeadCudaResult{} : failed(e); }
HeadCudaResult too_small(const char* detail) {
  return {HeadCudaStatus::kWorkspaceTooSmall, 0, detail};
}
template <class... Pointers>
bool misaligned(Pointers... p) {
  return ((reinterpret_cast<uintptr_t>(p) % 16 != 0) || ...);
}
int64_t tiles(int64_t count) { return (count + kTile - 1) / kTile; }

HeadCudaResult find(MapDevice& d) {
  d = find_map_device();
  if (d.error != cudaSuccess) return failed(d.error);
  if (!d.hopper)
    return {HeadCudaStatus::kUnsupportedDevice, 0, "needs compute capability 9.0 (sm_90a code)"};
  return {};
}

/// A matrix [rows][columns], rows `stride` elements apart.
bool encode(const MapDevice& d,
            CUtensorMap* map,
            const void* base,
            int64_t columns,
            int64_t rows,
            int64_t stride) {
  return encode_slabs(d, map, base, columns, rows, 1, stride);
}

template <Product kProduct, bool kRound>
cudaError_t launch(const MapDevice& d, const ProductParams& p, CUstream_st* stream) {
  const auto kernel = &head::product_kernel<kProduct, kRound>;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, head::kSharedBytes);
  if (error == cudaSuccess) error = cudaMemsetAsync(p.next, 0, sizeof(int), stream);
  if (error != cudaSuccess) return error;
  const unsigned blocks = static_cast<unsigned>(std::max(d.multiprocessors / 2 * 2, 2));
  kernel<<<blocks, gemm::kThreads, head::kSharedBytes, stream>>>(p);
  return cudaGetLastError();
}
template <Product kProduct>
cudaError_t launch_rounding(bool round,
                            const MapDevice& d,
                            const ProductParams& p,
                            CUstream_st* stream) {
  return round ? launch<kProduct, true>(d, p, stream) : launch<kProduct, false>(d, p, stream);
}

HeadCudaResult check(const HeadCudaArgs& a) {
  constexpr int64_t kMost = (int64_t{1} << 31) - 256;
  if (a.tokens < 0 || a.tokens > kMost) return bad("tokens must lie in [0, 2^31 - 256]");
  if (a.vocab < 1 || a.vocab > kMost) return bad("vocab must lie in [1, 2^31 - 256]");
  if (a.width < 64 || a.width % 64 != 0 || a.width > 1 << 24)
    return bad("width must be a multiple of 64, up to 2^24");
  if (tiles(a.vocab) * tiles(a.tokens) > kMost) return bad("tokens times vocab: too many tiles");
  if (!(a.factor > 0.0f)) return bad("factor must be positive: 1 / temperature");
  if (a.tokens == 0) return {};
  if (a.h == nullptr || a.weight == nullptr || a.labels == nullptr)
    return bad("h, weight and labels must not be null");
  if (misaligned(a.h, a.weight)) return bad("h and weight: 16-byte alignment");
  return {};
}

int64_t panel_bytes(int64_t vocab, int64_t rows, bool entropy) {
  return (tiles(vocab) * (entropy ? 12 : 8) + 4) * rows;
}
/// Bytes of the fp32 gradient of h.
int64_t sum_bytes(const HeadCudaArgs& a) { return a.tokens * a.width * 4; }

}  // namespace

size_t head_forward_workspace_bytes(int64_t vocab, int64_t rows, bool entropy) {
  return static_cast<size_t>(
      kCounterBytes + panel_bytes(vocab, std::max<int64_t>(tiles(rows), 1) * kTile, entropy));
}

HeadCudaResult head_forward(const HeadForwardCudaArgs& args,
                            void* workspace,
                            size_t workspace_bytes,
                            CUstream_st* stream) {
  const HeadCudaArgs& a = args.head;
  if (const HeadCudaResult r = check(a); !r) return r;
  if (a.tokens == 0) return {};
  if (args.logprobs == nullptr || args.log_sum == nullptr)
    return bad("logprobs and log_sum must not be null");
  const bool entropy = args.entropy != nullptr;
  if (workspace == nullptr || workspace_bytes < head_forward_workspace_bytes(a.vocab, 1, entropy))
    return too_small("allocate head_forward_workspace_bytes(vocab, rows, entropy)");
  if (misaligned(workspace)) return bad("workspace must be 16-byte aligned");
  MapDevice d;
  if (const HeadCudaResult r = find(d); !r) return r;
  // Whole tiles of rows, so that a token's place in its tile is the same.
  const int64_t rows = std::min((static_cast<int64_t>(workspace_bytes) - kCounterBytes) /
                                    panel_bytes(a.vocab, kTile, entropy) * kTile,
                                tiles(a.tokens) * kTile);
  const int64_t count = tiles(a.vocab);
  unsigned char* const at = static_cast<unsigned char*>(workspace) + kCounterBytes;
  ProductParams p{};
  p.next = static_cast<int*>(workspace);
  p.columns = static_cast<int>(a.vocab);
  p.depth_tiles = static_cast<int>(a.width / gemm::kTileDepth);
  p.factor = a.factor;
  p.panels = reinterpret_cast<float2*>(at);
  p.label_logits = reinterpret_cast<float*>(at + count * rows * 8);
  p.weighted = entropy ? p.label_logits + rows : nullptr;
  if (!encode(d, &p.b, a.weight, a.width, a.vocab, a.width)) return failed(cudaErrorInvalidValue);
  for (int64_t done = 0; done < a.tokens; done += rows) {
    const int64_t part = std::min(rows, a.tokens - done);
    p.rows = static_cast<int>(part);
    p.labels = a.labels + done;
    if (!encode(d, &p.a, a.h + done * a.width, a.width, part, a.width))
      return failed(cudaErrorInvalidValue);
    cudaError_t error = launch_rounding<Product::kPanels>(a.round_logits, d, p, stream);
    if (error != cudaSuccess) return failed(error);
    const head::MergeParams m{p.rows,
                              static_cast<int>(count),
                              a.vocab,
                              p.labels,
                              p.panels,
                              p.weighted,
                              p.label_logits,
                              args.logprobs + done,
                              args.log_sum + done,
                              entropy ? args.entropy + done : nullptr};
    const unsigned blocks =
        static_cast<unsigned>((part + head::kMergeThreads - 1) / head::kMergeThreads);
    head::merge_kernel<<<blocks, head::kMergeThreads, 0, stream>>>(m);
    error = cudaGetLastError();
    if (error != cudaSuccess) return failed(error);
  }
  return {};
}

size_t head_backward_workspace_bytes(const HeadCudaArgs& a, int64_t slice) {
  return static_cast<size_t>(kCounterBytes + sum_bytes(a) +
                             std::max<int64_t>(tiles(slice), 1) * kTile * a.tokens * 2);
}

HeadCudaResult head_backward(const HeadBackwardCudaArgs& args,
                             void* workspace,
                             size_t workspace_bytes,
                             CUstream_st* stream) {
  const HeadCudaArgs& a = args.head;
  if (const HeadCudaResult r = check(a); !r) return r;
  if (args.dweight == nullptr || misaligned(args.dweight))
    return bad("dweight must not be null, 16-byte aligned");
  if (a.tokens == 0)
    return outcome(
        cudaMemsetAsync(args.dweight, 0, static_cast<size_t>(a.vocab * a.width) * 2, stream));
  if (args.log_sum == nullptr || args.dlogprobs == nullptr || args.dh == nullptr)
    return bad("log_sum, dlogprobs and dh must not be null");
  if (misaligned(args.dh, workspace)) return bad("dh and workspace: 16-byte alignment");
  if (workspace == nullptr || workspace_bytes < head_backward_workspace_bytes(a, 1))
    return too_small("allocate head_backward_workspace_bytes(head, slice)");
  MapDevice d;
  if (const HeadCudaResult r = find(d); !r) return r;
  const int64_t room = static_cast<int64_t>(workspace_bytes) - kCounterBytes - sum_bytes(a);
  const int64_t slice = std::min(room / (kTile * a.tokens * 2), tiles(a.vocab)) * kTile;
  unsigned char* const at = static_cast<unsigned char*>(workspace) + kCounterBytes;
  uint16_t* const dlogits = reinterpret_cast<uint16_t*>(at + sum_bytes(a));
  bool good = true;
  const auto depth = [](int64_t count) {
    return static_cast<int>((count + gemm::kTileDepth - 1) / gemm::kTileDepth);
  };
  for (int64_t first = 0; first < a.vocab; first += slice) {
    const int64_t part = std::min(slice, a.vocab - first);
    const uint16_t* const weight = a.weight + first * a.width;
    ProductParams p{};
    p.next = static_cast<int*>(workspace);
    p.rows = static_cast<int>(a.tokens);
    p.columns = static_cast<int>(part);
    p.depth_tiles = depth(a.width);
    p.factor = a.factor;
    p.labels = a.labels;
    p.log_sum = args.log_sum;
    p.dlogprobs = args.dlogprobs;
    p.first_column = first;
    good = encode(d, &p.a, a.h, a.width, a.tokens, a.width) &&
           encode(d, &p.b, weight, a.width, part, a.width) &&
           encode(d, &p.out, dlogits, part, a.tokens, slice);
    if (!good) return failed(cudaErrorInvalidValue);
    cudaError_t error = launch_rounding<Product::kLogits>(a.round_logits, d, p, stream);
    if (error != cudaSuccess) return failed(error);

    p.columns = static_cast<int>(a.width);
    p.depth_tiles = depth(part);
    p.sums = reinterpret_cast<float*>(at);
    p.result = args.dh;
    p.first = first == 0;
    p.last = first + part == a.vocab;
    p.a = p.out;
    error = launch<Product::kInput, false>(d, p, stream);
    if (error != cudaSuccess) return failed(error);

    p.rows = static_cast<int>(part);
    p.depth_tiles = depth(a.tokens);
    good = encode(d, &p.b, a.h, a.width, a.tokens, a.width) &&
           encode(d, &p.out, args.dweight + first * a.width, a.width, part, a.width);
    if (!good) return failed(cudaErrorInvalidValue);
    error = launch<Product::kWeights, false>(d, p, stream);
    if (error != cudaSuccess) return failed(error);
  }
  return {};
}

}  // namespace lockstep::model
