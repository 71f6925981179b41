#include "model/base/exact_add.hpp"

#include <algorithm>
#include <bit>

namespace lockstep {

float exact_add(int64_t count,
                const float* __restrict p,
                double* __restrict high,
                double* __restrict low) {
  uint32_t largest = 0;  // magnitudes order like their bits, NaN above all
  for (int64_t i = 0; i < count; ++i) {
    largest = std::max(largest, std::bit_cast<uint32_t>(p[i]) & 0x7fffffffU);
    const double v = static_cast<double>(p[i]);
    const double h = (v + kExactHigh) - kExactHigh;
    high[i] += h;
    low[i] += ((v - h) + kExactLow) - kExactLow;
  }
  return std::bit_cast<float>(largest);
}

void exact_carry(int64_t count, double* __restrict high, double* __restrict low) {
  for (int64_t i = 0; i < count; ++i) {
    const double h = (low[i] + kExactHigh) - kExactHigh;
    high[i] += h;
    low[i] -= h;
  }
}

}  // namespace lockstep
