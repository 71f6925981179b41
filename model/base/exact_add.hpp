// Sums whose bits do not depend on the order of the addends: float32 numbers are split into two
// fixed-point parts, and each part's float64 sum is exact. No torch header.
#pragma once

#include <cstdint>

namespace lockstep {

/// Adding and subtracting this constant rounds to a multiple of 2^-32 (below 2^19 in magnitude) ...
inline constexpr double kExactHigh = 1.5 * (1 << 20);
/// ... and this one to a multiple of 2^-64.
inline constexpr double kExactLow = 1.5 / (1 << 12);

/// high[i] += p[i] rounded to a multiple of 2^-32, low[i] += the rest rounded to a multiple of
/// 2^-64. Both sums are exact, hence the same in any order, while |high| < 2^21 and fewer than 2^22
/// numbers were added. A number of at least 2^-41 in magnitude is represented exactly, a smaller
/// one within 2^-65. Returns the largest magnitude (NaN if there is one).
float exact_add(int64_t count, const float* p, double* high, double* low);

/// Moves what low holds of 2^-32 and more to high, so that as many numbers can be added again.
void exact_carry(int64_t count, double* high, double* low);

}  // namespace lockstep
