#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;  // cudaStream_t without a CUDA header

namespace lockstep::model {

enum class MlaCudaStatus { kOk, kBadArgument, kWorkspaceTooSmall, kUnsupportedDevice, kCudaError };

struct MlaCudaResult {
  MlaCudaStatus status = MlaCudaStatus::kOk;
  int cuda_error = 0;       ///< cudaError_t of the failing runtime call, 0 otherwise
  const char* detail = "";  ///< static text: what was wrong and what to pass instead
  explicit operator bool() const { return status == MlaCudaStatus::kOk; }
};

/// Attention of absorbed queries over selected rows of the latent, which are keys and values.
/// Device pointers, contiguous, 16-byte aligned but for selection and lse; rank 512.
struct SparseMlaForwardArgs {
  int64_t tokens = 0;                     ///< T queries
  int64_t keys = 0;                       ///< S rows of the latent, below 2^31
  int64_t width = 0;                      ///< W entries in a row of the selection
  int heads = 0;                          ///< H, 1 to 64
  const uint16_t* q_THR = nullptr;        ///< bf16 [T,H,512], q_h Wk_h rounded once
  const uint16_t* latent_SR = nullptr;    ///< bf16 [S,512]
  const int32_t* selection_TW = nullptr;  ///< rows of latent; entries outside [0, S) are unused
  float scale = 0.0625f;                  ///< of the scores, positive
  uint16_t* a_THR = nullptr;              ///< bf16 [T,H,512], before Wv; may not overlap q
  float* lse_TH = nullptr;  ///< fp32 [T,H], ln of the sum of exp(score); null: not wanted
};

/// Bytes of device scratch that sparse_mla_forward needs: 8 per token, 128-byte aligned, contents
/// need no initialisation.
size_t sparse_mla_forward_workspace_bytes(int64_t tokens);

/// Absorbed sparse MLA forward for sm_90a.
///
///   s_j = scale (q . c_j) for j in the row of the selection;  P = softmax(s);  a = sum_j P_j c_j.
///
/// A row without a used entry gives a = 0 and lse = -inf. An entry named twice counts twice. Only
/// selected rows of the latent are read. Unused entries may stand anywhere; those behind the last
/// used one cost nothing, whole groups of 64 counted.
///
/// Numerics (D42 absorbed, D43 fp32, D44 unnormalised). Scores and all sums in fp32. Softmax over
/// groups of 64 entries in the order of the row, base 2, with the running maximum of the groups so
/// far subtracted; P rounded to bf16 for the product with the latent, the denominator from
/// unrounded P (one partial sum per four lanes and parity of the group); a divided in fp32, rounded
/// once. exp2 by ex2.approx (2^-22 relative).
/// Deterministic: no atomics; a token gives the same bytes in any batch. Asynchronous, two kernels.
/// T = 0 is allowed. Cost: see docs/performance.md.
MlaCudaResult sparse_mla_forward(const SparseMlaForwardArgs& args,
                                 void* workspace,
                                 size_t workspace_bytes,
                                 CUstream_st* stream);

/// Device pointers, contiguous, 16-byte aligned but for selection and lse; rank 512.
struct SparseMlaBackwardArgs {
  int64_t tokens = 0;                     ///< T queries
  int64_t keys = 0;                       ///< S rows of the latent, below 2^31
  int64_t width = 0;                      ///< W entries in a row of the selection
  int heads = 0;                          ///< H, 1 to 64
  int64_t tokens_at_once = 0;             ///< whose shares are kept at a time, 0: all; see below
  const uint16_t* q_THR = nullptr;        ///< bf16 [T,H,512], as in the forward call
  const uint16_t* latent_SR = nullptr;    ///< bf16 [S,512]
  const int32_t* selection_TW = nullptr;  ///< rows of latent; entries outside [0, S) are unused
  float scale = 0.0625f;                  ///< of the scores, positive
  const uint16_t* a_THR = nullptr;        ///< bf16 [T,H,512] of the forward call
  const float* lse_TH = nullptr;          ///< fp32 [T,H] of the forward call
  const uint16_t* da_THR = nullptr;       ///< bf16 [T,H,512] gradient of a
  uint16_t* dq_THR = nullptr;             ///< bf16 [T,H,512]; may not overlap q, a or da
  float* dlatent_SR = nullptr;            ///< fp32 [S,512], written: rows nobody selects are 0
};

/// Bytes of device scratch that sparse_mla_backward needs, 128-byte aligned, contents need no
/// initialisation: about 1048 for each entry of the tokens done at once and 8 for each key.
size_t sparse_mla_backward_workspace_bytes(const SparseMlaBackwardArgs& args);

/// Gradients of the absorbed sparse MLA for sm_90a.
///
///   P = exp(s - lse);  delta = da . a;  dS = scale P (da . c - delta);
///   dq = sum_j dS_j c_j;  dlatent_j = sum over tokens and heads of dS_j q + P_j da.
///
/// A token without a used entry gives dq = 0. An entry named twice counts twice. Only selected rows
/// of the latent are read.
///
/// Numerics. s, da . c, delta and all sums in fp32; P and dS rounded to bf16 for the products; dq
/// rounded once. dlatent: what a token gives a key is summed over heads in fp32, rounded to 11
/// significant bits relative to the largest of 64 columns, and added in the order of the tokens.
/// Deterministic: no atomics; dq of a token is the same bytes in any batch, dlatent does not depend
/// on tokens_at_once. Asynchronous, 8 to 10 kernels for each tokens_at_once, of which
/// tokens_at_once * width must stay below 2^31.
/// T = 0 is allowed. Cost: see docs/performance.md.
MlaCudaResult sparse_mla_backward(const SparseMlaBackwardArgs& args,
                                  void* workspace,
                                  size_t workspace_bytes,
                                  CUstream_st* stream);

}  // namespace lockstep::model
