// Scalar and row-wise FP8 (e4m3fn) and Walsh-Hadamard arithmetic, without torch headers.
#pragma once

#include <bit>
#include <cstdint>

namespace lockstep::model {

inline constexpr float kFp8Max = 448.0F;
/// Smallest amax that a scale is derived from.
inline constexpr float kFp8AmaxFloor = 1e-4F;

/// Nearest bfloat16, ties to even; NaN stays NaN.
inline float round_bf16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) & 0xffff0000U;
  return x == x ? std::bit_cast<float>(rounded) : x;
}

/// Byte of the nearest e4m3fn value, ties to even, values beyond +-448 clamped; NaN gives 0x7f.
inline uint8_t e4m3_encode(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 24) & 0x80U;
  float magnitude = std::bit_cast<float>(bits & 0x7fffffffU);
  magnitude = magnitude > kFp8Max ? kFp8Max : magnitude;
  const auto m = std::bit_cast<uint32_t>(magnitude);
  // Normal values: round the mantissa to 3 bits in place and move the exponent bias from 127 to 7.
  const uint32_t normal = ((m + 0x7ffffU + ((m >> 20) & 1U)) >> 20) - (120U << 3);
  // Below 2^-6 the spacing is 2^-9, which is the unit in the last place of numbers near 2^14.
  const uint32_t subnormal = std::bit_cast<uint32_t>(magnitude + 16384.0F) & 0xffU;
  const uint32_t code = magnitude < 0.015625F ? subnormal : normal;
  return static_cast<uint8_t>(x == x ? (sign | code) : 0x7fU);
}

/// e4m3_decode(e4m3_encode(x)) without the code between, for loops that the compiler vectorises.
inline float e4m3_round(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  float magnitude = std::bit_cast<float>(bits & 0x7fffffffU);
  magnitude = magnitude > kFp8Max ? kFp8Max : magnitude;
  const auto m = std::bit_cast<uint32_t>(magnitude);
  const auto normal = std::bit_cast<float>((m + 0x7ffffU + ((m >> 20) & 1U)) & 0xfff00000U);
  const float subnormal = (magnitude + 16384.0F) - 16384.0F;
  const float value = magnitude < 0.015625F ? subnormal : normal;
  const auto with_sign =
      std::bit_cast<float>(std::bit_cast<uint32_t>(value) | (bits & 0x80000000U));
  return x == x ? with_sign : x;
}

/// Value of an e4m3fn byte; 0x7f and 0xff are NaN.
float e4m3_decode(uint8_t byte);

/// How a row's scale follows from its largest magnitude.
enum class Fp8Scale : uint8_t { kExact, kPow2 };

/// kExact: max(amax, 1e-4) / 448. kPow2: 2^ceil(log2(max(amax, 1e-4) * fp32(1/448))), evaluated on
/// the exponent bits, hence exact.
inline float fp8_scale(float amax, Fp8Scale mode) {
  const float floored = amax > kFp8AmaxFloor ? amax : kFp8AmaxFloor;
  if (mode == Fp8Scale::kExact) return floored / kFp8Max;
  const auto bits = std::bit_cast<uint32_t>(floored * (1.0F / 448.0F));
  const uint32_t up = (bits & 0x7fffffU) != 0 ? 1U : 0U;
  return std::bit_cast<float>(((bits >> 23) + up) << 23);
}

/// In place on x [rows, dim], dim a power of two: natural-order Walsh-Hadamard in float32, stages
/// of stride 1, 2, 4, ..., each pair (a, b) -> (a + b, a - b), then times fp32(dim^-1/2), then
/// rounded to bfloat16.
void hadamard_rows(float* x, int64_t rows, int64_t dim);

/// One scale per row of x [rows, dim]; bytes = e4m3(clamp(x / scale, -448, 448)). scales [rows].
void quantise_rows(
    const float* x, int64_t rows, int64_t dim, Fp8Scale mode, uint8_t* bytes, float* scales);

/// values = decoded bytes of quantise_rows, without the scale: what an fp8 product multiplies.
void quantise_rows_to_values(
    const float* x, int64_t rows, int64_t dim, Fp8Scale mode, float* values, float* scales);

}  // namespace lockstep::model
