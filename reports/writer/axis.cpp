#include "reports/writer/axis.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>

#include "harness/result/result.hpp"

namespace lockstep::reports {
namespace {

// Share of a logarithmic axis that stands for zero, in parts of the span above it.
constexpr double kZeroBand = 0.13;

std::string power_of_ten(int exponent) {
  if (exponent == 0) return "1";
  if (exponent == 1) return "10";
  constexpr std::array<std::string_view, 10> kDigits{"\u2070",
                                                     "\u00B9",
                                                     "\u00B2",
                                                     "\u00B3",
                                                     "\u2074",
                                                     "\u2075",
                                                     "\u2076",
                                                     "\u2077",
                                                     "\u2078",
                                                     "\u2079"};
  std::string text = "10";
  for (const char c : fmt::format("{}", exponent)) {
    text += c == '-' ? std::string_view("\u207B") : kDigits[static_cast<size_t>(c - '0')];
  }
  return text;
}

Axis log_axis(double smallest, double largest, bool has_zero, int max_ticks) {
  Axis axis;
  axis.is_log = true;
  axis.has_zero = has_zero;
  const int low = static_cast<int>(std::floor(std::log10(smallest)));
  int high = static_cast<int>(std::ceil(std::log10(largest)));
  if (high == low) ++high;
  const int step = (high - low + max_ticks - 1) / max_ticks;
  for (int exponent = low; exponent <= high; ++exponent) {
    const bool labelled = (exponent - low) % std::max(1, step) == 0;
    const double value = std::pow(10.0, exponent);
    axis.ticks.push_back({value, labelled ? power_of_ten(exponent) : ""});
    if (high - low <= 2 && exponent < high) {
      axis.ticks.push_back({2 * value, ""});
      axis.ticks.push_back({5 * value, ""});
    }
  }
  axis.high = high;
  axis.low = has_zero ? low - kZeroBand * (high - low) : low;
  if (has_zero) axis.ticks.insert(axis.ticks.begin(), {0, "0"});
  return axis;
}

Axis linear_axis(double smallest, double largest, bool from_zero, int max_ticks) {
  Axis axis;
  if (from_zero && smallest >= 0) smallest = 0;
  if (smallest == largest) {
    const double around = smallest == 0 ? 1 : std::abs(smallest) * 0.5;
    if (smallest > 0 || !from_zero) smallest -= from_zero ? smallest : around;
    largest += around;
  }
  const double rough = (largest - smallest) / max_ticks;
  const double unit = std::pow(10.0, std::floor(std::log10(rough)));
  double step = unit;
  for (const double factor : {1.0, 2.0, 5.0, 10.0}) {
    step = factor * unit;
    if (step >= rough) break;
  }
  axis.low = std::floor(smallest / step + 1e-9) * step;
  axis.high = std::ceil(largest / step - 1e-9) * step;
  const auto count = static_cast<int>(std::llround((axis.high - axis.low) / step));
  for (int i = 0; i <= count; ++i) {
    double value = axis.low + i * step;
    if (std::abs(value) < step * 1e-6) value = 0;
    axis.ticks.push_back({value, harness::format_number(value, 4)});
  }
  return axis;
}

}  // namespace

double Axis::position(double value) const {
  if (is_log) {
    if (value <= 0) return 0;
    value = std::log10(value);
  }
  if (!(high > low)) return 0;
  return std::clamp((value - low) / (high - low), 0.0, 1.0);
}

Axis make_axis(const std::vector<double>& values, bool is_log, bool from_zero, int max_ticks) {
  double smallest = INFINITY, largest = -INFINITY, smallest_positive = INFINITY;
  for (const double value : values) {
    if (!std::isfinite(value)) continue;
    smallest = std::min(smallest, value);
    largest = std::max(largest, value);
    if (value > 0) smallest_positive = std::min(smallest_positive, value);
  }
  if (smallest > largest) return linear_axis(0, 1, true, max_ticks);
  if (is_log && smallest >= 0 && largest > 0) {
    return log_axis(smallest_positive, largest, smallest == 0, max_ticks);
  }
  return linear_axis(smallest, largest, from_zero, max_ticks);
}

}  // namespace lockstep::reports
