// FP8 rows with one scale each, and the Walsh-Hadamard rotation that precedes them.
#pragma once

#include "model/config/numerics.hpp"
#include "model/ops/fp8_kernel.hpp"

namespace lockstep::model {

struct Fp8Rows {
  Tensor bytes;  ///< uint8, shape of the input: e4m3fn codes
  Tensor scale;  ///< float32, input shape without its last dimension
};

/// Which scale the policy asks for (D32).
Fp8Scale fp8_scale_mode(const Numerics& num);

/// Walsh-Hadamard transform of the last dim (a power of two), scaled by dim^-1/2. x bfloat16 or
/// float32; returns bfloat16. Stages in float32 with stride 1, 2, 4, ..., one multiplication, one
/// rounding. Applying it twice is the identity up to rounding; dot products are preserved.
/// Throws kShape for another dtype or dim.
Tensor hadamard(const Tensor& x);
Tensor hadamard_reference(const Tensor& x);

/// Last dim of x (bfloat16 or float32) to e4m3fn with one scale per row: amax floored at 1e-4,
/// scale amax/448 or the next power of two, y = clamp(x / scale, +-448), nearest even.
Fp8Rows quantise_rows(const Tensor& x, Fp8Scale mode);
Fp8Rows quantise_rows_reference(const Tensor& x, Fp8Scale mode);

/// float32 values of bytes times their scale.
Tensor dequantise_rows(const Fp8Rows& rows);

}  // namespace lockstep::model
