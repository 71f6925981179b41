// exp for loops that the compiler vectorises.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace lockstep::model {

/// exp(x) for x <= 88, within 2 ulp; exactly 1 at 0; 0 below -87, so that no denormal appears (and
/// for -infinity). NaN stays NaN. No branches and a fixed operation order: the same bits in a
/// vectorised and a scalar loop.
inline float exp_of(float x) {
  constexpr float kLog2E = 1.44269504088896341F;
  constexpr float kLn2High = 0.693359375F, kLn2Low = -2.12194440e-4F;
  constexpr float kShift = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer
  const float clamped = x < -87.0F ? -87.0F : x;
  const float shifted = std::fma(clamped, kLog2E, kShift);
  const float n = shifted - kShift;
  float r = std::fma(-n, kLn2High, clamped);
  r = std::fma(-n, kLn2Low, r);
  float p = 1.9875691500e-4F;
  p = std::fma(p, r, 1.3981999507e-3F);
  p = std::fma(p, r, 8.3334519073e-3F);
  p = std::fma(p, r, 4.1665795894e-2F);
  p = std::fma(p, r, 1.6666665459e-1F);
  p = std::fma(p, r, 5.0000001201e-1F);
  p = std::fma(p * r, r, r) + 1.0F;
  const uint32_t exponent = (std::bit_cast<uint32_t>(shifted) << 23) + (127U << 23);
  const float y = p * std::bit_cast<float>(exponent);
  return x < -87.0F ? 0.0F : y;
}

inline double exp_of(double x) { return std::exp(x); }

}  // namespace lockstep::model
