#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>

#include "model/ops/indexer_cuda.hpp"
#include "model/ops/indexer_select_kernel.cuh"
#include "model/ops/tensor_map.cuh"

namespace lockstep::model {
namespace {

using indexer::Dots;

IndexerCudaResult bad(const char* detail) { return {IndexerCudaStatus::kBadArgument, 0, detail}; }
IndexerCudaResult failed(cudaError_t e) {
  return {IndexerCudaStatus::kCudaError, static_cast<int>(e), cudaGetErrorString(e)};
}
IndexerCudaResult last_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? IndexerCudaResult{} : failed(error);
}
template <class... Pointers>
bool misaligned(Pointers... p) {
  return ((reinterpret_cast<uintptr_t>(p) % 16 != 0) || ...);
}

IndexerCudaResult check(const IndexerDocuments& d) {
  if (d.tokens < 0 || d.tokens >= int64_t{1} << 31) return bad("tokens must lie in [0, 2^31)");
  if (d.documents < 0 || (d.tokens > 0 && (d.documents == 0 || d.cu == nullptr)))
    return bad("tokens without documents: pass cu = {0, tokens} for one document");
  if (d.kpool < 1 || d.kpool > 1 << 16) return bad("kpool must lie in [1, 65536]");
  int device = 0, major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess) return failed(error);
  if (major != 9)
    return {IndexerCudaStatus::kUnsupportedDevice, 0, "needs compute capability 9.0 (sm_90a code)"};
  return {};
}
IndexerCudaResult check_pooled(const IndexerDocuments& d) {
  if (const IndexerCudaResult r = check(d); !r) return r;
  if (d.tokens > 0 && d.pool_offsets == nullptr)
    return bad("pool_offsets is null; indexer_pool_offsets writes them");
  return {};
}
IndexerCudaResult check_scores(const IndexerScoreArgs& a) {
  if (const IndexerCudaResult r = check_pooled(a.documents); !r) return r;
  if (a.first < 0 || a.count < 0 || a.first + a.count > a.documents.tokens)
    return bad("first and count must name tokens of the packed row");
  const int64_t kpool = a.documents.kpool;
  if (a.topk < 0 || a.topk % kpool != 0 || a.topk / kpool > indexer::kMaxBudget)
    return bad("topk must be a multiple of kpool and at most 512 pools");
  if (a.count == 0) return {};
  if (a.q == nullptr || a.weight == nullptr || a.pooled == nullptr)
    return bad("q, weight and pooled must not be null");
  if (a.fp8 && a.pool_scale == nullptr) return bad("pool_scale is null");
  if (a.fp8 && a.round_dots) return bad("round_dots is for bf16 scoring");
  if (misaligned(a.q, a.weight, a.pooled, a.pool_scale))
    return bad("all tensors: 16-byte alignment");
  return {};
}

indexer::Documents documents(const IndexerDocuments& d) {
  return {d.tokens, d.documents, d.kpool, d.cu, d.pool_offsets};
}
unsigned blocks(int64_t work, int64_t per_block) {
  return static_cast<unsigned>((work + per_block - 1) / per_block);
}
int64_t max_pools(const IndexerDocuments& d) { return d.tokens / d.kpool; }
float score_constant() { return static_cast<float>(std::pow(128.0, -0.5) * std::pow(32.0, -0.5)); }

/// Boxes of 128 bytes of `box_rows` rows.
cudaError_t encode(
    CUtensorMap* map, const void* base, int64_t row_bytes, int64_t rows, int box_rows) {
  EncodeTensorMap encoder = nullptr;
  const cudaError_t error = find_encoder(encoder);
  if (error != cudaSuccess) return error;
  const MapShape shape{CU_TENSOR_MAP_DATA_TYPE_UINT8,
                       row_bytes,
                       std::max<int64_t>(rows, 1),
                       1,
                       row_bytes,
                       128,
                       box_rows};
  return encode_map(encoder, map, base, shape) ? cudaSuccess : cudaErrorInvalidValue;
}

template <Dots kDots>
cudaError_t launch_scores(const indexer::ScoreParams& p, CUstream_st* stream) {
  using S = indexer::ScoreShared<kDots>;
  const auto kernel = &indexer::score_kernel<kDots>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kBytes);
  if (error != cudaSuccess) return error;
  const dim3 grid(blocks(p.count, indexer::kGroupTokens), blocks(p.stride, indexer::kPoolSplit));
  kernel<<<grid, indexer::kScoreThreads, S::kBytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

IndexerCudaResult indexer_pool_offsets(const IndexerDocuments& d,
                                       int64_t* offsets,
                                       CUstream_st* stream) {
  if (const IndexerCudaResult r = check(d); !r) return r;
  if (offsets == nullptr) return bad("offsets is null");
  indexer::offsets_kernel<<<1, 1024, 0, stream>>>(documents(d), offsets);
  return last_error();
}

IndexerCudaResult indexer_pool(const IndexerPoolArgs& a, CUstream_st* stream) {
  if (const IndexerCudaResult r = check_pooled(a.documents); !r) return r;
  const int64_t pools = max_pools(a.documents);
  if (pools == 0) return {};
  if (a.k == nullptr || a.gate == nullptr || a.ape == nullptr)
    return bad("k, gate and ape must not be null");
  if ((a.bytes == nullptr) != (a.scale == nullptr)) return bad("bytes and scale go together");
  if (misaligned(a.k, a.gate, a.ape, a.pooled, a.bytes, a.scale))
    return bad("all tensors: 16-byte alignment");
  indexer::PoolParams p{};
  p.documents = documents(a.documents);
  p.k = a.k, p.gate = a.gate, p.ape = a.ape;
  p.pooled = a.pooled, p.bytes = a.bytes, p.scale = a.scale;
  p.rotate = a.quantisation.rotate, p.pow2 = a.quantisation.pow2;
  p.bf16_weights = a.bf16_weights;
  indexer::
      pool_kernel<<<blocks(pools * 32, indexer::kRowThreads), indexer::kRowThreads, 0, stream>>>(p);
  return last_error();
}

IndexerCudaResult indexer_queries(const IndexerQueryArgs& a, CUstream_st* stream) {
  if (const IndexerCudaResult r = check({}); !r) return r;
  if (a.count < 0 || a.count >= int64_t{1} << 31) return bad("count must lie in [0, 2^31)");
  if (a.count == 0) return {};
  if (a.q == nullptr || a.weight == nullptr || a.bytes == nullptr || a.scaled == nullptr)
    return bad("q, weight, bytes and scaled must not be null");
  if (misaligned(a.q, a.weight, a.bytes, a.scaled)) return bad("all tensors: 16-byte alignment");
  indexer::QueryParams p{};
  p.rows = a.count * indexer::kHeads;
  p.q = a.q, p.weight = a.weight, p.bytes = a.bytes, p.scaled = a.scaled;
  p.constant = score_constant();
  p.rotate = a.quantisation.rotate, p.pow2 = a.quantisation.pow2;
  indexer::query_kernel<<<blocks(p.rows, indexer::kQueryRows), indexer::kRowThreads, 0, stream>>>(
      p);
  return last_error();
}

int64_t indexer_score_stride(const IndexerDocuments& d) {
  constexpr int64_t kTile = indexer::kTilePools;
  return (max_pools(d) + kTile - 1) / kTile * kTile;
}

IndexerCudaResult indexer_scores(const IndexerScoreArgs& a, float* scores, CUstream_st* stream) {
  if (const IndexerCudaResult r = check_scores(a); !r) return r;
  const int64_t pools = max_pools(a.documents);
  if (a.count == 0 || pools == 0) return {};
  if (scores == nullptr) return bad("scores is null");
  indexer::ScoreParams p{};
  const int64_t row_bytes = indexer::kDim * (a.fp8 ? 1 : 2);
  cudaError_t error = encode(
      &p.q, a.q, row_bytes, a.count * indexer::kHeads, indexer::kGroupTokens * indexer::kHeads);
  if (error == cudaSuccess)
    error = encode(&p.pooled, a.pooled, row_bytes, pools, indexer::kTilePools);
  if (error != cudaSuccess) return failed(error);
  p.documents = documents(a.documents);
  p.first = a.first, p.count = a.count;
  p.weight = a.weight, p.pool_scale = a.pool_scale, p.constant = score_constant();
  p.scores = scores, p.stride = indexer_score_stride(a.documents);
  p.budget = static_cast<int>(a.topk / a.documents.kpool);
  error = a.fp8          ? launch_scores<Dots::kFp8>(p, stream)
          : a.round_dots ? launch_scores<Dots::kRoundedBf16>(p, stream)
                         : launch_scores<Dots::kBf16>(p, stream);
  return error == cudaSuccess ? IndexerCudaResult{} : failed(error);
}

size_t indexer_select_workspace_bytes(const IndexerDocuments& d, int64_t rows) {
  constexpr int64_t kGroup = indexer::kGroupTokens;
  const int64_t rounded = std::max<int64_t>((rows + kGroup - 1) / kGroup, 1) * kGroup;
  return static_cast<size_t>(rounded * indexer_score_stride(d)) * sizeof(float);
}

IndexerCudaResult indexer_select(const IndexerSelectArgs& a,
                                 void* workspace,
                                 size_t workspace_bytes,
                                 CUstream_st* stream) {
  if (const IndexerCudaResult r = check_scores(a.score); !r) return r;
  const IndexerDocuments& d = a.score.documents;
  const int64_t width = a.score.topk + (a.select_tail ? d.kpool - 1 : 0);
  if (a.score.count == 0 || width == 0) return {};
  if (a.selection == nullptr) return bad("selection is null");
  const size_t group = indexer_select_workspace_bytes(d, indexer::kGroupTokens);
  if (group > 0 && (workspace == nullptr || workspace_bytes < group))
    return {IndexerCudaStatus::kWorkspaceTooSmall,
            0,
            "allocate indexer_select_workspace_bytes(documents, rows), rows >= 1"};
  if (misaligned(workspace)) return bad("workspace must be 16-byte aligned");
  cudaError_t error = cudaFuncSetAttribute(
      &indexer::select_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, indexer::kSelectBytes);
  if (error != cudaSuccess) return failed(error);
  const int64_t rows = group > 0
                           ? static_cast<int64_t>(workspace_bytes / group) * indexer::kGroupTokens
                           : a.score.count;
  const int64_t q_bytes = indexer::kHeads * indexer::kDim * (a.score.fp8 ? 1 : 2);
  for (int64_t done = 0; done < a.score.count; done += rows) {
    IndexerScoreArgs part = a.score;
    part.first += done;
    part.count = std::min(rows, a.score.count - done);
    part.q = static_cast<const unsigned char*>(part.q) + done * q_bytes;
    part.weight += done * indexer::kHeads;
    float* const scores = static_cast<float*>(workspace);
    if (const IndexerCudaResult r = indexer_scores(part, scores, stream); !r) return r;
    indexer::SelectParams p{};
    p.documents = documents(d);
    p.first = part.first, p.count = part.count;
    p.scores = scores, p.stride = indexer_score_stride(d);
    p.budget = static_cast<int>(a.score.topk / d.kpool);
    p.width = static_cast<int>(width);
    p.tail = a.select_tail, p.own_pool_first = a.own_pool_first;
    p.selection = a.selection + done * width;
    indexer::select_kernel<<<blocks(part.count, indexer::kSelectWarps),
                             indexer::kSelectWarps * 32,
                             indexer::kSelectBytes,
                             stream>>>(p);
    if (const IndexerCudaResult r = last_error(); !r) return r;
  }
  return {};
}

}  // namespace lockstep::model
