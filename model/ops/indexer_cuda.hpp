#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;  // cudaStream_t without a CUDA header

namespace lockstep::model {

enum class IndexerCudaStatus {
  kOk,
  kBadArgument,
  kWorkspaceTooSmall,
  kUnsupportedDevice,
  kCudaError
};

struct IndexerCudaResult {
  IndexerCudaStatus status = IndexerCudaStatus::kOk;
  int cuda_error = 0;       ///< cudaError_t of the failing runtime call, 0 otherwise
  const char* detail = "";  ///< static text: what was wrong and what to pass instead
  explicit operator bool() const { return status == IndexerCudaStatus::kOk; }
};

// All pointers below are device pointers, contiguous, 16-byte aligned. Every call is asynchronous,
// never waits for the device and gives the same bytes in every run. 32 heads of 128. Cost:
// docs/performance.md.

/// Packed documents and their pools of kpool tokens, counted from each document's start. P, the
/// number of pools, stays on the device; tensors of pools have room for tokens / kpool.
struct IndexerDocuments {
  int64_t tokens = 0;  ///< T of the packed row, below 2^31
  int64_t documents = 0;
  int64_t kpool = 4;
  const int64_t* cu = nullptr;            ///< [documents + 1]: 0, ..., T; documents may be empty
  const int64_t* pool_offsets = nullptr;  ///< [documents + 1]: as indexer_pool_offsets writes them
};
/// offsets[d] = pools of the documents before d.
IndexerCudaResult indexer_pool_offsets(const IndexerDocuments& documents,
                                       int64_t* offsets,
                                       CUstream_st* stream);

/// How rows of 128 become e4m3 bytes with one scale (D31, D32).
struct IndexerQuantisation {
  bool rotate = true;  ///< Walsh-Hadamard before
  bool pow2 = true;    ///< scales are powers of two
};

/// Pooled keys, rounded once (D33), and the same rotated and quantised. Bytes as of pool_keys and
/// quantise_pools on the CPU in bf16. Results that are null are not written.
struct IndexerPoolArgs {
  IndexerDocuments documents;
  IndexerQuantisation quantisation;
  bool bf16_weights = false;       ///< D33: softmax weights and products rounded to bf16
  const uint16_t* k = nullptr;     ///< bf16 [T,128] after LayerNorm
  const uint16_t* gate = nullptr;  ///< bf16 [T,128]
  const float* ape = nullptr;      ///< fp32 [kpool,128]
  uint16_t* pooled = nullptr;      ///< bf16 [P,128]
  uint8_t* bytes = nullptr;        ///< e4m3 [P,128]
  float* scale = nullptr;          ///< [P]
};
IndexerCudaResult indexer_pool(const IndexerPoolArgs& args, CUstream_st* stream);

/// Queries as fp8 scoring multiplies them: rotated and quantised, their scale in the weights.
struct IndexerQueryArgs {
  IndexerQuantisation quantisation;
  int64_t count = 0;              ///< tokens N
  const uint16_t* q = nullptr;    ///< bf16 [N,32,128]
  const float* weight = nullptr;  ///< fp32 [N,32], raw
  uint8_t* bytes = nullptr;       ///< e4m3 [N,32,128]
  float* scaled = nullptr;        ///< fp32 [N,32]: (weight * scale) * fp32(128^-1/2 32^-1/2)
};
IndexerCudaResult indexer_queries(const IndexerQueryArgs& args, CUstream_st* stream);

/// Queries of tokens first .. first + count - 1 of the packed row against the pools of their
/// documents.
/// score(t, p) = pool_scale_p sum over heads of w relu(q . k). fp8: both operands e4m3, sums of
/// products as the tensor cores keep them (about 2^-13 of the largest). bf16: w = weight *
/// fp32(128^-1/2 32^-1/2), the dot product rounded to bf16 first if round_dots (D30).
struct IndexerScoreArgs {
  IndexerDocuments documents;
  int64_t first = 0, count = 0;
  bool fp8 = true;
  bool round_dots = false;            ///< bf16 only
  const void* q = nullptr;            ///< [count,32,128]: e4m3 of indexer_queries, or bf16
  const float* weight = nullptr;      ///< [count,32]: scaled of indexer_queries, or raw
  const void* pooled = nullptr;       ///< [P,128] e4m3 or bf16
  const float* pool_scale = nullptr;  ///< [P], fp8 only
  int64_t topk = 2048;                ///< tokens; a multiple of kpool, at most 512 pools
};

/// Floats between two rows of scores: pools, padded.
int64_t indexer_score_stride(const IndexerDocuments& documents);
/// scores [count, stride]; column p is pool p of the packed row. Written where a token sees the
/// pool and sees more pools than it may select; other columns may hold anything.
IndexerCudaResult indexer_scores(const IndexerScoreArgs& args, float* scores, CUstream_st* stream);

struct IndexerSelectArgs {
  IndexerScoreArgs score;
  bool select_tail = true;
  bool own_pool_first = false;   ///< D36: a pool that a token completes is taken first
  int32_t* selection = nullptr;  ///< [count, topk + kpool - 1] (topk without tail)
};
/// Workspace for scoring `rows` tokens at a time (rounded up to 8): all of them need not fit.
size_t indexer_select_workspace_bytes(const IndexerDocuments& documents, int64_t rows);
/// The topk / kpool best full pools of each token, those whose last token <= t: rows of the packed
/// row, ascending, then the tail, then -1. Ties go to the lower pool, NaN counts as largest.
/// A row depends on its own query and its document's pools only, not on the workspace.
IndexerCudaResult indexer_select(const IndexerSelectArgs& args,
                                 void* workspace,
                                 size_t workspace_bytes,
                                 CUstream_st* stream);

}  // namespace lockstep::model
