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
  float* checkpoints = nullptr;       ///< kda_checkpoint_bytes(...) for kda_backward, or null
  uint16_t* o_THV = nullptr;          ///< bf16 [T,H,128]
};

/// Bytes of device scratch that kda_forward needs for these sizes (contents need no
/// initialisation): about 26 MB for up to 64 heads, which stay in L2 (400 KB for each further
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
///   norm, and all matrix operands: k and q times their decay factors, P = (I+L)^-1 diag(beta), M,
///   S, V - K~ S and N = P (V - K~ S). Decay factors are anchored per 16-row sub-chunk at the
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

/// Bytes of the fp32 states that a forward pass leaves for its backward pass: one per window of
/// 8192 / heads chunks (a power of two, 64 to 1024), 64 KB per head; 67 MB for 64 heads and 131072
/// tokens.
size_t kda_checkpoint_bytes(int64_t tokens, int64_t documents, int heads);

/// Arguments of the backward pass of a forward pass with the same `forward` inputs. Only its inputs
/// and `checkpoints` (as that pass filled them) are read; o_THV and final_state_NHKV are ignored.
struct KdaBackwardArgs {
  KdaForwardArgs forward;
  const uint16_t* do_THV = nullptr;          ///< bf16 [T,H,128]
  const float* dfinal_state_NHKV = nullptr;  ///< fp32 [N,H,128,128] or null for zeros
  uint16_t* dq_THK = nullptr;                ///< bf16 [T,H,128], with respect to raw q
  uint16_t* dk_THK = nullptr;                ///< bf16 [T,H,128], with respect to raw k
  uint16_t* dv_THV = nullptr;                ///< bf16 [T,H,128]
  uint16_t* df_THK = nullptr;                ///< bf16 [T,H,128], with respect to f
  uint16_t* dbeta_logit_TH = nullptr;        ///< bf16 [T,H]
  float* da_log_H = nullptr;                 ///< fp32 [H]
  float* ddt_bias_HK = nullptr;              ///< fp32 [H*128]
  float* dinitial_state_NHKV = nullptr;      ///< fp32 [N,H,128,128] or null
};

/// Bytes of device scratch of kda_backward: 160.5 KB for each (chunk, head) of one window (1.4 GB
/// for 64 heads from 8192 tokens on), 516 bytes for each (chunk, head) of the batch.
size_t kda_backward_workspace_bytes(int64_t tokens, int64_t documents, int heads);

/// KDA backward for sm_90a: all gradients, through gate, l2norm and beta sigmoid, from the inputs
/// and one state per window; everything else is computed again, a window at a time from the last to
/// the first.
///
/// Numerics. As kda_forward, from the same bf16 operands; further bf16 operands: do, the gradient
/// of the state, dN = M^T do + K- dS and beta Y = P^T dN, and the masked products do N^T and
/// -(beta Y) N^T. fp32: the carried gradient of the state, every accumulator, and everything
/// elementwise (decay factors, gate, norms, running sums, beta). Inside a 16-row sub-chunk factors
/// are anchored at its middle row, exponents within 40 in the natural log, so that gradients of any
/// size up to 1e17 cannot overflow. The diagonal of do N^T has no part in the gate's gradient,
/// and terms of keys decayed to the chunk's end enter it as a running sum over earlier rows, never
/// as a difference of sums. d(A_log) and d(dt_bias): one fp32 partial per chunk, added in chunk
/// order in eight interleaved groups.
/// Deterministic: no atomics, one order of every sum; a document's gradients (but d(A_log) and
/// d(dt_bias), which sum over the batch) are the same bytes in any packing.
/// Errors (relative Frobenius against float64) and cost: see docs/performance.md.
KdaCudaResult kda_backward(const KdaBackwardArgs& args,
                           void* workspace,
                           size_t workspace_bytes,
                           CUstream_st* stream);

/// Arguments of one decode step: one token for each of `sequences` rows. Device pointers,
/// contiguous, 16-byte aligned but for beta_logit and slots.
struct KdaDecodeArgs {
  int64_t sequences = 0;                    ///< B
  int heads = 0;                            ///< H
  const uint16_t* q_BHK = nullptr;          ///< bf16 [B,H,128], after conv and SiLU, before l2norm
  const uint16_t* k_BHK = nullptr;          ///< bf16 [B,H,128], likewise
  const uint16_t* v_BHV = nullptr;          ///< bf16 [B,H,128]
  const uint16_t* f_BHK = nullptr;          ///< bf16 [B,H,128], gate input before bias and sigmoid
  const uint16_t* beta_logit_BH = nullptr;  ///< bf16 [B,H]
  const float* a_log_H = nullptr;           ///< fp32 [H]
  const float* dt_bias_HK = nullptr;        ///< fp32 [H*128]
  float lower_bound = -5.0f;                ///< natural-log decay lies in (lower_bound, 0)
  const int32_t* slots_B = nullptr;  ///< slot of each row; distinct, or negative: row is padding
  float* state_SHKV = nullptr;       ///< fp32 [slots,H,128,128], updated in place
  uint16_t* o_BHV = nullptr;         ///< bf16 [B,H,128]; zeros for padding
};

/// One step of the recurrence of kda_forward, for sm_90a. fp32 throughout, o rounded once;
/// the state as kda_forward leaves it. Sums over K in one fixed order: a row's result is the same
/// bytes alone and in any batch. Reads and writes each state once, needs no workspace.
KdaCudaResult kda_decode(const KdaDecodeArgs& args, CUstream_st* stream);

}  // namespace lockstep::model
