#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;  // cudaStream_t without a CUDA header

namespace lockstep::model {

enum class ConvCudaStatus { kOk, kBadArgument, kWorkspaceTooSmall, kUnsupportedDevice, kCudaError };

struct ConvCudaResult {
  ConvCudaStatus status = ConvCudaStatus::kOk;
  int cuda_error = 0;       ///< cudaError_t of the failing runtime call, 0 otherwise
  const char* detail = "";  ///< static text: what was wrong and what to pass instead
  explicit operator bool() const { return status == ConvCudaStatus::kOk; }
};

/// Causal depthwise convolution of width 4 with silu over packed documents. Device pointers,
/// 16-byte aligned; channels and x_stride multiples of 8.
struct ConvArgs {
  int64_t tokens = 0;    ///< T
  int64_t channels = 0;  ///< C
  int64_t documents = 0;
  const int64_t* cu =
      nullptr;  ///< [documents + 1]: 0, ..., T, not decreasing; documents may be empty
  const uint16_t* x = nullptr;  ///< bf16 [T,C], rows x_stride apart
  int64_t x_stride = 0;
  const float* weight = nullptr;   ///< fp32 [C,4]; [c][3] multiplies the token itself
  const uint16_t* halo = nullptr;  ///< bf16 [documents,3,C]: rows before each document, oldest
                                   ///< first; null: zeros
  bool bf16_weight = true;         ///< D14: weight rounded to bf16 before use
};

/// y[t,c] = silu(sum_j weight[c,j] x[t-3+j,c]) within each document, bf16 [T,C] contiguous. fp32
/// fused multiply-adds from j = 0 up, silu in fp32 (2^-22 relative), one rounding. A token's bytes
/// depend only on its document. Asynchronous; T = 0 is allowed. Cost: docs/performance.md.
ConvCudaResult conv_silu_forward(const ConvArgs& args, uint16_t* y, CUstream_st* stream);

struct ConvGradients {
  const uint16_t* dy = nullptr;  ///< bf16 [T,C]
  uint16_t* dx = nullptr;        ///< bf16 [T,C], may not overlap x or dy
  uint16_t* dhalo = nullptr;     ///< bf16 [documents,3,C]; null exactly when halo is
  float* dweight = nullptr;      ///< fp32 [C,4], written (not added to)
};

/// Bytes of device scratch of the backward call: 16 per channel and 128 tokens.
size_t conv_silu_backward_workspace_bytes(int64_t tokens, int64_t channels);

/// Everything but dy is recomputed. dx and dhalo in fp32, rounded once; dweight as fp32 sums over
/// blocks of 128 tokens, rows ascending, blocks added in order: no atomics, the order depends on T
/// alone. Asynchronous; T = 0 writes zeros.
ConvCudaResult conv_silu_backward(const ConvArgs& args,
                                  const ConvGradients& grads,
                                  void* workspace,
                                  size_t workspace_bytes,
                                  CUstream_st* stream);

}  // namespace lockstep::model
