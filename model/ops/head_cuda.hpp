#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;  // cudaStream_t without a CUDA header

namespace lockstep::model {

enum class HeadCudaStatus { kOk, kBadArgument, kWorkspaceTooSmall, kUnsupportedDevice, kCudaError };

struct HeadCudaResult {
  HeadCudaStatus status = HeadCudaStatus::kOk;
  int cuda_error = 0;       ///< cudaError_t of the failing runtime call, 0 otherwise
  const char* detail = "";  ///< static text: what was wrong and what to pass instead
  explicit operator bool() const { return status == HeadCudaStatus::kOk; }
};

/// Final projection and log-probabilities. Device pointers, contiguous; matrices 16-byte aligned.
/// Logits exist in registers only (their gradient in bf16 for a slice of the vocabulary). Every
/// call is asynchronous, never waits for the device and gives the same bytes in every run. Cost:
/// docs/performance.md.
struct HeadCudaArgs {
  int64_t tokens = 0;                ///< T, below 2^31
  int64_t width = 0;                 ///< D, a multiple of 64
  int64_t vocab = 0;                 ///< V, below 2^31
  const uint16_t* h = nullptr;       ///< bf16 [T,D]
  const uint16_t* weight = nullptr;  ///< bf16 [V,D]
  const int64_t* labels = nullptr;   ///< [T]; -1: none
  bool round_logits = true;          ///< D59: logits rounded to bf16, else fp32
  float factor = 1;                  ///< D60: 1 / temperature, multiplies the logits
};

struct HeadForwardCudaArgs {
  HeadCudaArgs head;
  float* logprobs = nullptr;  ///< [T] log softmax at the label; 0 without; NaN for one >= V
  float* log_sum = nullptr;   ///< [T] log of the sum of exponentials
  float* entropy = nullptr;   ///< [T] or null
};
/// For `rows` tokens at a time: 8 bytes (12 with entropy) for each 256 entries of the vocabulary.
size_t head_forward_workspace_bytes(int64_t vocab, int64_t rows, bool entropy);
/// Maximum and sums of 256 entries at a time, merged in order. A token's bytes do not depend on the
/// other tokens nor on the workspace.
HeadCudaResult head_forward(const HeadForwardCudaArgs& args,
                            void* workspace,
                            size_t workspace_bytes,
                            CUstream_st* stream);

struct HeadBackwardCudaArgs {
  HeadCudaArgs head;
  const float* log_sum = nullptr;    ///< [T] of head_forward
  const float* dlogprobs = nullptr;  ///< [T]
  uint16_t* dh = nullptr;            ///< bf16 [T,D]
  uint16_t* dweight = nullptr;       ///< bf16 [V,D], written (not added to)
};
/// For `slice` entries of the vocabulary at a time (rounded up to 256): 2 T slice + 4 T D bytes.
size_t head_backward_workspace_bytes(const HeadCudaArgs& head, int64_t slice);
/// Logits are computed again. Their gradient is rounded to bf16; dh is summed in fp32 over the
/// slices in order, dweight over all tokens, each rounded once. The slice, and with it the order of
/// dh's sum, follows from workspace_bytes.
HeadCudaResult head_backward(const HeadBackwardCudaArgs& args,
                             void* workspace,
                             size_t workspace_bytes,
                             CUstream_st* stream);

}  // namespace lockstep::model
