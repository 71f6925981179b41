#include "model/ops/fp8_kernel.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "model/ops/chain_gemm.hpp"

namespace lockstep::model {
namespace {

std::array<float, 256> decode_table() {
  std::array<float, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const int exponent = static_cast<int>((byte >> 3) & 15U),
              mantissa = static_cast<int>(byte & 7U);
    float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
    if (exponent == 15 && mantissa == 7) value = std::numeric_limits<float>::quiet_NaN();
    table[byte] = (byte & 0x80U) != 0 ? -value : value;
  }
  return table;
}

const std::array<float, 256> kDecode = decode_table();

/// Rows transformed side by side, so that every stage works on whole vectors.
constexpr int64_t kLanes = 8;

float row_scale(const float* x, int64_t dim, Fp8Scale mode) {
  float top[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) top[l] = std::max(top[l], std::fabs(x[i + l]));
  }
  for (; i < dim; ++i) top[0] = std::max(top[0], std::fabs(x[i]));
  return fp8_scale(*std::max_element(top, top + kLanes), mode);
}

}  // namespace

float e4m3_decode(uint8_t byte) { return kDecode[byte]; }

void hadamard_rows(float* x, int64_t rows, int64_t dim) {
  const auto scale = static_cast<float>(std::pow(static_cast<double>(dim), -0.5));
  std::vector<float> buffer(static_cast<size_t>(dim * kLanes), 0.0F);
  float* w = buffer.data();
  for (int64_t r = 0; r < rows; r += kLanes) {
    const int64_t n = std::min(kLanes, rows - r);
    gather_transposed<float>(x + r * dim, dim, nullptr, n, dim, w, kLanes);
    for (int64_t stride = 1; stride < dim; stride *= 2) {
      for (int64_t base = 0; base < dim; base += 2 * stride) {
        float* lo = w + base * kLanes;
        float* hi = lo + stride * kLanes;
        for (int64_t i = 0; i < stride * kLanes; ++i) {
          const float a = lo[i], b = hi[i];
          lo[i] = a + b;
          hi[i] = a - b;
        }
      }
    }
    for (int64_t i = 0; i < dim * kLanes; ++i) w[i] = round_bf16(w[i] * scale);
    gather_transposed<float>(w, kLanes, nullptr, dim, n, x + r * dim, dim);
  }
}

void quantise_rows(
    const float* x, int64_t rows, int64_t dim, Fp8Scale mode, uint8_t* bytes, float* scales) {
  for (int64_t r = 0; r < rows; ++r) {
    const float scale = row_scale(x + r * dim, dim, mode);
    scales[r] = scale;
    for (int64_t i = 0; i < dim; ++i) bytes[r * dim + i] = e4m3_encode(x[r * dim + i] / scale);
  }
}

void quantise_rows_to_values(
    const float* x, int64_t rows, int64_t dim, Fp8Scale mode, float* values, float* scales) {
  for (int64_t r = 0; r < rows; ++r) {
    const float scale = row_scale(x + r * dim, dim, mode);
    scales[r] = scale;
    for (int64_t i = 0; i < dim; ++i) {
      values[r * dim + i] = e4m3_round(x[r * dim + i] / scale);
    }
  }
}

}  // namespace lockstep::model
