#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;  // cudaStream_t without a CUDA header

namespace lockstep::model {

enum class MoeCudaStatus { kOk, kBadArgument, kWorkspaceTooSmall, kUnsupportedDevice, kCudaError };

struct MoeCudaResult {
  MoeCudaStatus status = MoeCudaStatus::kOk;
  int cuda_error = 0;       ///< cudaError_t of the failing runtime call, 0 otherwise
  const char* detail = "";  ///< static text: what was wrong and what to pass instead
  explicit operator bool() const { return status == MoeCudaStatus::kOk; }
};

// All pointers below are device pointers, contiguous, 16-byte aligned. Every call is asynchronous,
// never waits for the device, and gives the same bytes in every run; counts of rows stay on the
// device. Cost: docs/performance.md.

// ---- router
// ---------------------------------------------------------------------------------------

struct MoeRouterArgs {
  int64_t tokens = 0;       ///< T
  int64_t experts = 0;      ///< E, 1..512
  int64_t slots = 0;        ///< k, 1..32, at most the experts of the kept groups
  int64_t groups = 1;       ///< 1..32 groups of E / groups neighbours (at least 2 if limited)
  int64_t groups_kept = 1;  ///< by the sum of a group's two largest choices
  bool normalise = true;    ///< D50 and its epsilon
  float epsilon = 1e-20f;
  float scaling = 1;
  bool softmax = false;           ///< scores softmax(logits) instead of sigmoid(logits)
  bool round_scores = false;      ///< D47: scores rounded to bf16
  bool replay = false;            ///< `chosen` is read instead of written
  const float* logits = nullptr;  ///< fp32 [T,E]
  const float* bias = nullptr;    ///< fp32 [E], only for choosing
  int64_t* chosen = nullptr;      ///< [T,k] by descending score + bias, ties to the lower expert
};
/// weights [T,k] = scaling * score / (sum of the token's scores, in their order, + epsilon). NaN
/// counts as smallest. A replayed id outside [0, E) counts as the nearest inside.
MoeCudaResult moe_route(const MoeRouterArgs& args, float* weights, CUstream_st* stream);
/// dlogits [T,E] from dweights [T,k] and `chosen`; rounding of scores counts as the identity.
MoeCudaResult moe_route_backward(const MoeRouterArgs& args,
                                 const float* dweights,
                                 float* dlogits,
                                 CUstream_st* stream);

// ---- order, rows, combination -------------------------------------------------------------------

/// T tokens with k experts each, sorted by (expert, token): S = T k rows.
struct MoeOrderArgs {
  int64_t tokens = 0;               ///< T
  int64_t slots = 0;                ///< k, 1..32
  int64_t experts = 0;              ///< E, 1..512
  const int64_t* chosen = nullptr;  ///< [T,k]; an id outside [0, E) counts as the nearest inside
  int64_t* token = nullptr;         ///< [S] source token of each row
  int64_t* slot = nullptr;          ///< [S] t k + slot of each row
  int64_t* place = nullptr;         ///< [T,k] rows of each token, ascending
  int64_t* offsets = nullptr;       ///< [E + 1] first row of each expert
};
size_t moe_order_workspace_bytes(int64_t tokens, int64_t slots, int64_t experts);
/// Stable counting sort.
MoeCudaResult moe_order(const MoeOrderArgs& args,
                        void* workspace,
                        size_t workspace_bytes,
                        CUstream_st* stream);

/// What the calls between token order and expert order share; arrays as moe_order writes them.
struct MoeRowsArgs {
  int64_t tokens = 0;  ///< T
  int64_t slots = 0;   ///< k
  int64_t width = 0;   ///< D, a multiple of 8
  const int64_t* slot = nullptr;
  const int64_t* place = nullptr;
};
/// rows[place[t][.]] = x[t]; x bf16 [T,D], rows bf16 [S,D].
MoeCudaResult moe_gather(const MoeRowsArgs& args,
                         const uint16_t* x,
                         uint16_t* rows,
                         CUstream_st* stream);
/// dx[t] = sum of drows[place[t][.]] in order, in fp32, rounded once.
MoeCudaResult moe_gather_backward(const MoeRowsArgs& args,
                                  const uint16_t* drows,
                                  uint16_t* dx,
                                  CUstream_st* stream);

struct MoeCombineRounding {
  bool weighed = true;  ///< D54: bf16(w row) for each expert
  bool sum = true;      ///< D55: every addition rounded to bf16
};
/// y[t] = sum over place[t][.] in order of weights[slot[row]] rows[row]; weights fp32 [T,k], rows
/// bf16 [S,D], y bf16 [T,D]. In fp32, rounded as asked and once at the end.
MoeCudaResult moe_combine(const MoeRowsArgs& args,
                          const uint16_t* rows,
                          const float* weights,
                          MoeCombineRounding rounding,
                          uint16_t* y,
                          CUstream_st* stream);
/// drows[row] = bf16(w dy[t]); dweights[slot[row]] = dy[t] . rows[row] in fp32, one order that
/// depends on D alone. Roundings of the combination count as the identity.
MoeCudaResult moe_combine_backward(const MoeRowsArgs& args,
                                   const uint16_t* rows,
                                   const float* weights,
                                   const uint16_t* dy,
                                   uint16_t* drows,
                                   float* dweights,
                                   CUstream_st* stream);

// ---- experts
// --------------------------------------------------------------------------------------

/// Rows [offsets[e], offsets[e + 1]) belong to expert e, which may have none. Rows at and beyond
/// offsets[E] are neither read nor written.
struct MoeShape {
  int64_t rows = 0;                  ///< R >= offsets[E], below 2^31
  int64_t experts = 0;               ///< E, 1..512
  int64_t width = 0;                 ///< D, a multiple of 128
  int64_t inner = 0;                 ///< I, a multiple of 128
  const int64_t* offsets = nullptr;  ///< [E + 1], not decreasing, offsets[0] >= 0
  float limit = 10;                  ///< clamp of gate (above) and up (both sides); infinity: none
  int roundings = 2;                 ///< D53: 1, 2 or 3
};

struct MoeExpertsForwardArgs {
  MoeShape shape;
  const uint16_t* x = nullptr;        ///< bf16 [R,D]
  const uint16_t* gate_up = nullptr;  ///< bf16 [E,2I,D], gate rows first
  const uint16_t* down = nullptr;     ///< bf16 [E,D,I]
  uint16_t* products = nullptr;       ///< bf16 [R,2I], gate then up, for the backward call; or null
  uint16_t* out = nullptr;            ///< bf16 [R,D]
};
/// Bytes of device scratch (contents need no initialisation, 128-byte aligned): h and tensor maps.
size_t moe_experts_forward_workspace_bytes(const MoeShape& shape);
/// out = down h, h = clamped SwiGLU of the products. Operands bf16, sums fp32 with k ascending;
/// gate, up, h and out are rounded to bf16, SwiGLU in fp32 with the roundings of D53 (sigmoid to
/// 2^-21; D16 makes no difference in fp32 beyond that). A row's bytes depend on the row and its
/// expert alone.
MoeCudaResult moe_experts_forward(const MoeExpertsForwardArgs& args,
                                  void* workspace,
                                  size_t workspace_bytes,
                                  CUstream_st* stream);

struct MoeExpertsBackwardArgs {
  MoeShape shape;
  const uint16_t* x = nullptr;         ///< bf16 [R,D]
  const uint16_t* gate_up = nullptr;   ///< bf16 [E,2I,D]
  const uint16_t* down = nullptr;      ///< bf16 [E,D,I]
  const uint16_t* products = nullptr;  ///< bf16 [R,2I] of the forward call
  const uint16_t* dout = nullptr;      ///< bf16 [R,D]
  uint16_t* dx = nullptr;              ///< bf16 [R,D], or null when not wanted
  uint16_t* dgate_up = nullptr;        ///< bf16 [E,2I,D], written (not added to); or null
  uint16_t* ddown = nullptr;           ///< bf16 [E,D,I], likewise
};
/// h and the gradients of the products, bf16, and tensor maps.
size_t moe_experts_backward_workspace_bytes(const MoeShape& shape);
/// dh = dout down, rounded; gradients of gate and up in fp32 from it and the kept products, zero
/// where clamped, rounded; dx and gradients of weights from those and the recomputed h, fp32 sums
/// (of weights: over the expert's rows in their order), rounded once. Zeros for an expert without
/// rows.
MoeCudaResult moe_experts_backward(const MoeExpertsBackwardArgs& args,
                                   void* workspace,
                                   size_t workspace_bytes,
                                   CUstream_st* stream);

}  // namespace lockstep::model
