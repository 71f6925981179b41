#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;  // cudaStream_t without a CUDA header

namespace lockstep::model {

enum class HcCudaStatus { kOk, kBadArgument, kWorkspaceTooSmall, kUnsupportedDevice, kCudaError };

struct HcCudaResult {
  HcCudaStatus status = HcCudaStatus::kOk;
  int cuda_error = 0;       ///< cudaError_t of the failing runtime call, 0 otherwise
  const char* detail = "";  ///< static text: what was wrong and what to pass instead
  explicit operator bool() const { return status == HcCudaStatus::kOk; }
};

/// Rounding points of the boundary. The defaults are the policy fsdp-fp32-islands with the fused
/// mix (one rounding).
struct HcForwardRounding {
  bool bf16_fn = false;              ///< D01: fn rounded to bf16 before use
  bool bf16_base_scale = false;      ///< D02: base and scale rounded to bf16 before use
  bool bf16_coefficients = true;     ///< D08: post and comb rounded to bf16 at the mix
  bool three_mix_roundings = false;  ///< D09: bf16(bf16(post y) + bf16(comb^T X)) instead of one
  bool two_norm_roundings = false;   ///< D11: bf16(w bf16(xhat)) instead of one
  bool unrounded_statistic = false;  ///< D12: RMSNorm's mean square of fp32 u instead of bf16(u)
  bool bf16_norm_weight = true;      ///< D13: norm_weight rounded to bf16 before use
};

/// One boundary between two sublayers: mix of the previous one, then collapse of the next one. All
/// pointers are device pointers, contiguous, 16-byte aligned; n = 4 streams, D = 4096 channels.
///   first boundary (nothing to mix): y, post and comb of the previous boundary and x_next null;
///   last boundary (mix only): fn and every output but x_next null.
struct HcForwardArgs {
  int64_t tokens = 0;            ///< T
  const uint16_t* x = nullptr;   ///< bf16 [T,4,4096], streams before the mix
  const uint16_t* y = nullptr;   ///< bf16 [T,4096], output of the previous sublayer
  const float* post = nullptr;   ///< fp32 [T,4], of the previous boundary
  const float* comb = nullptr;   ///< fp32 [T,4,4], likewise; row = source stream
  uint16_t* x_next = nullptr;    ///< bf16 [T,4,4096], streams after the mix; may not overlap x
  const float* fn = nullptr;     ///< fp32 [24,16384]: rows 0-3 pre, 4-7 post, 8-23 comb
  const float* base = nullptr;   ///< fp32 [24]
  const float* scale = nullptr;  ///< fp32 [3]: pre, post, comb
  const float* norm_weight = nullptr;  ///< fp32 [4096]
  float norm_eps = 1e-5f;              ///< of both statistics
  float eps = 1e-6f;                   ///< added to pre, softmax and every Sinkhorn denominator
  int sinkhorn_iters = 20;             ///< >= 1
  HcForwardRounding rounding;
  uint16_t* x_normed = nullptr;  ///< bf16 [T,4096], what the sublayer reads
  float* pre_next = nullptr;     ///< fp32 [T,4], or null when not wanted
  float* post_next = nullptr;    ///< fp32 [T,4], not rounded; may not overlap post
  float* comb_next = nullptr;    ///< fp32 [T,4,4], not rounded; may not overlap comb
  float* m_next = nullptr;       ///< fp32 [T,24], m, what hc_backward starts from; null: not wanted
  float* r_next = nullptr;       ///< fp32 [T], r, likewise
};

/// Bytes of device scratch that hc_forward needs (contents need no initialisation): 1.7 MB,
/// whatever the number of tokens. Calls that may run at the same time need one each.
size_t hc_forward_workspace_bytes();

/// Hyper-connection boundary forward for sm_90a, one pass over device memory.
///
///   X'_j = post_j y + sum_i comb_ij X_i;  z = flatten(X');  r = 1/sqrt(mean z^2 + norm_eps);
///   m = r (fn z);  pre = sigmoid(m scale_0 + base) + eps;  post = 2 sigmoid(m scale_1 + base);
///   comb = Sinkhorn(softmax(m scale_2 + base) + eps);  u = sum_i pre_i X'_i;
///   x_normed = RMSNorm(u) norm_weight.
///
/// Numerics. X' in fp32, post y first, then i = 0..3 with fused multiply-adds, stored as bf16; what
/// follows reads the stored values. fn z on the tensor cores: X' is bf16, fn three bf16 terms whose
/// sum is fp32 fn to 2^-24, smallest term first, fp32 sums. r multiplies the product, where the
/// policy with normalisation first (D04) multiplies z: in fp32 the two differ by rounding only, as
/// do two orders of the sum. Sigmoid, softmax and Sinkhorn in fp32 with exact division; u in fp32,
/// i = 0..3, rounded to bf16 once; the rest as HcForwardRounding says.
/// Deterministic and batch-invariant: no atomics; every sum has one order that depends on neither T
/// nor the position of the token (16 slices of channels, in each 8 parts of 32 channels x 4
/// streams, in each one chain per product), so a token gives the same bytes in any batch.
/// Asynchronous; one memset and one cooperative kernel with a block on most multiprocessors, so it
/// waits for kernels of other streams to leave room. T = 0 is allowed. Needs at least 16
/// multiprocessors. Cost: see docs/performance.md.
HcCudaResult hc_forward(const HcForwardArgs& args,
                        void* workspace,
                        size_t workspace_bytes,
                        CUstream_st* stream);

/// Backward of the boundary that hc_forward computes, from the inputs of the forward call and the m
/// and r it returned; everything else is recomputed. Pointers as in HcForwardArgs.
///   first boundary (no mix): y, post, comb, dy, dpost and dcomb null; dx is then the gradient of
///   the streams that were collapsed;
///   last boundary (mix only): fn, base, scale, norm_weight, m, r, dx_normed, dpost_next,
///   dcomb_next and the gradients of parameters null.
struct HcBackwardArgs {
  int64_t tokens = 0;                  ///< T
  const uint16_t* x = nullptr;         ///< bf16 [T,4,4096]
  const uint16_t* y = nullptr;         ///< bf16 [T,4096]
  const float* post = nullptr;         ///< fp32 [T,4], of the previous boundary
  const float* comb = nullptr;         ///< fp32 [T,4,4], likewise
  const float* fn = nullptr;           ///< fp32 [24,16384]
  const float* base = nullptr;         ///< fp32 [24]
  const float* scale = nullptr;        ///< fp32 [3]
  const float* norm_weight = nullptr;  ///< fp32 [4096]
  float norm_eps = 1e-5f;
  float eps = 1e-6f;
  int sinkhorn_iters = 20;  ///< 1..64
  HcForwardRounding rounding;
  const float* m = nullptr;           ///< fp32 [T,24], m_next of the forward call
  const float* r = nullptr;           ///< fp32 [T], r_next of the forward call
  const uint16_t* dx_next = nullptr;  ///< bf16 [T,4,4096]: gradient of X' from what reads it later
  const uint16_t* dx_normed = nullptr;  ///< bf16 [T,4096]
  const float* dpost_next = nullptr;    ///< fp32 [T,4]
  const float* dcomb_next = nullptr;    ///< fp32 [T,4,4]
  uint16_t* dx = nullptr;               ///< bf16 [T,4,4096]; may not overlap an input
  uint16_t* dy = nullptr;               ///< bf16 [T,4096]; may not overlap an input
  float* dpost = nullptr;               ///< fp32 [T,4]
  float* dcomb = nullptr;               ///< fp32 [T,4,4]
  float* dfn = nullptr;                 ///< fp32 [24,16384], written (not added to)
  float* dbase = nullptr;               ///< fp32 [24]
  float* dscale = nullptr;              ///< fp32 [3]
  float* dnorm_weight = nullptr;        ///< fp32 [4096]
};

/// Bytes of device scratch that hc_backward needs (no initialisation): 29 MB and 14 bytes a token.
size_t hc_backward_workspace_bytes(int64_t tokens);

/// Numerics. Everything in fp32; X' and u as forward rounded them; dX' = dx_next + gradient through
/// the collapse and the coefficients stays in fp32 for dx and dy, and is rounded to bf16 for dpost
/// and dcomb, which the tensor cores add up. fn^T dm with both operands rounded to tf32 (11 bits,
/// fp32 sums); dfn = dm^T X' with dm as two bf16 terms (17 bits). dx and dy are rounded once.
/// Gradients of parameters treat the roundings of HcForwardRounding as the identity.
/// Deterministic: no atomics. dx, dy, dpost and dcomb of a token do not depend on the batch; sums
/// over tokens have an order that follows from T alone, not from the device.
/// Asynchronous. T = 0 is allowed and writes zero gradients of parameters. Cost:
/// docs/performance.md.
HcCudaResult hc_backward(const HcBackwardArgs& args,
                         void* workspace,
                         size_t workspace_bytes,
                         CUstream_st* stream);

}  // namespace lockstep::model
