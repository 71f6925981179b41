// Products of FP8 operands with block scales, as serving engines compute experts.
#pragma once

#include "model/config/numerics.hpp"

namespace lockstep::model {

/// Channels that share a scale in an activation row; rows and channels that share one in a weight.
inline constexpr int64_t kFp8Block = 128;

struct Fp8Blocks {
  Tensor bytes;  ///< uint8 [..., N, K]: e4m3fn codes
  Tensor scale;  ///< float32 [..., ceil(N / 128), ceil(K / 128)]
};

/// weight [..., N, K] floating, 2 or 3 dims: per block of 128 x 128 (edge blocks smaller) scale =
/// max(amax / 448, 1e-12), codes e4m3(clamp(w / scale, +-448)), nearest even.
Fp8Blocks quantise_blocks(const Tensor& weight);
/// float32 values of codes times their scales.
Tensor dequantise_blocks(const Fp8Blocks& blocks);

/// y = x W^T. x [T, K] act, of a policy that accumulates in float32; weight [N, K]. Every row of x
/// is quantised per 128 channels (scale = max(amax, 1e-4) / 448). Per block of channels the codes'
/// product in float32, times both scales; blocks added in ascending order in float32; one rounding
/// to act. No gradient. Throws kShape, kConfig.
Tensor linear_fp8(const Tensor& x, const Fp8Blocks& weight, const Numerics& num);
/// The same from dequantised operands in float64.
Tensor linear_fp8_reference(const Tensor& x, const Fp8Blocks& weight, const Numerics& num);

}  // namespace lockstep::model
