#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;  // cudaStream_t without a CUDA header

namespace lockstep::model {

/// Result of a launch. kCudaError carries the runtime's own code in KdaCudaResult::cuda_error.
enum class KdaCudaStatus { kOk, kBadArgument, kWorkspaceTooSmall, kUnsupportedDevice, kCudaError };

struct KdaCudaResult {
  KdaCudaStatus status = KdaCudaStatus::kOk;
  int cuda_error = 0;       ///< cudaError_t of the failing runtime call, 0 otherwise
  const char* detail = "";  ///< static text: what was wrong and what to pass instead
  explicit operator bool() const { return status == KdaCudaStatus::kOk; }
};

/// Arguments of one forward pass over packed documents. All pointers are device pointers,
/// contiguous and 16-byte aligned; K = V = 128.
struct KdaForwardArgs {
  int64_t tokens = 0;                       ///< T, all documents together
  int64_t documents = 0;                    ///< N
  int heads = 0;                            ///< H
  const uint16_t* q_THK = nullptr;          ///< bf16 [T,H,128], after conv and SiLU, before l2norm
  const uint16_t* k_THK = nullptr;          ///< bf16 [T,H,128], likewise
  const uint16_t* v_THV = nullptr;          ///< bf16 [T,H,128]
  const uint16_t* f_THK = nullptr;          ///< bf16 [T,H,128], gate input before bias and sigmoid
  const uint16_t* beta_logit_TH = nullptr;  ///< bf16 [T,H]
  const float* a_log_H = nullptr;           ///< fp32 [H]
  const float* dt_bias_HK = nullptr;        ///< fp32 [H*128]
  float lower_bound = -5.0f;                ///< natural-log decay lies in (lower_bound, 0); >= -5
  const int64_t* cu_seqlens = nullptr;      ///< int64 [N+1], from 0 to T, non-decreasing
  const float* initial_state_NHKV = nullptr;  ///< fp32 [N,H,128,128] or null for zeros
  float* final_state_NHKV = nullptr;  ///< fp32 [N,H,128,128] or null; may not alias the initial
  uint16_t* o_THV = nullptr;          ///< bf16 [T,H,128]
};

/// Bytes of device scratch that kda_forward needs for these sizes (contents need no
/// initialisation): about 28.5 MB for up to 64 heads, which stay in L2 (445 KB for each further
/// head), and 16 bytes per chunk of 64 tokens.
size_t kda_forward_workspace_bytes(int64_t tokens, int64_t documents, int heads);

/// KDA forward with fused gate, l2norm, and beta sigmoid, for sm_90a.
///
///   qn = q / sqrt(sum q^2 + 1e-6), kn likewise; g = lower_bound * sigmoid(exp(A_log)(f +
///   dt_bias)); beta = sigmoid(logit); s = 128^-1/2; per token S <- diag(exp g) S;  d = beta (v -
///   kn S);  S <- S + kn^T d;  o = s qn S.
///
/// Numerics. Chunks of 64 tokens counted from each document's first token.
///   fp32: row norms, gate, cumulative decay b and all exponents (base 2), beta, the state S, every
///   accumulator; s multiplies the fp32 output. bf16 (round to nearest even): qn, kn after the
///   norm, and all matrix operands: k and q times their decay factors, P = (I+L)^-1 diag(beta), W =
///   P K~, U = P V, M, S and N = U - W S. Decay factors are anchored per 16-row sub-chunk at the
///   cumulative decay rounded to a power of two: rows at their own sub-chunk's start, columns at
///   the next one's, the rest of the factor is a power of two and exact. Exponents stay within 80
///   in the natural log and nothing overflows at -5 per token; entries above the diagonal are
///   replaced by zero, never multiplied. (I+L)^-1: 16-row diagonal blocks by fp32 substitution,
///   blocks below by fp16 products with fp32 sums (relative 2^-12, an eighth of a bf16 step). Error
///   against a float64 recurrence: about 5e-3 relative (Frobenius) in o and S.
/// Deterministic: no atomics, one order of every sum, the same bytes in every run, for any packing
/// of a document, and for a zero initial state given or left out. A document may be empty (its
/// final state is its initial state) or one token long. The call is asynchronous and needs no host
/// synchronisation. It launches one cooperative kernel with a block on every multiprocessor for
/// each 66 heads (on 132 multiprocessors), so it waits for kernels of other streams to leave room.
/// Cost: see docs/performance.md.
KdaCudaResult kda_forward(const KdaForwardArgs& args,
                          void* workspace,
                          size_t workspace_bytes,
                          CUstream_st* stream);

}  // namespace lockstep::model
