// Axes of charts: which numbers they span, where their ticks are, where a value lies.
#pragma once

#include <string>
#include <vector>

namespace lockstep::reports {

struct Tick {
  double value = 0;
  std::string label;  ///< plain text, not escaped; empty: a line without a label
};

/// Maps values to [0, 1], 0 at the left or bottom. On a logarithmic axis with `has_zero` the lowest
/// part of the axis stands for zero, which has no place of its own there.
struct Axis {
  bool is_log = false;
  bool has_zero = false;
  double low = 0, high = 1;  ///< decimal exponents when is_log
  std::vector<Tick> ticks;

  /// Position of a finite value, clamped to [0, 1]. Zero and less on a logarithmic axis: 0.
  [[nodiscard]] double position(double value) const;
};

/// Axis around finite values (others are ignored). Logarithmic ones span whole decades, at least
/// one, and show zero at the floor when a value is zero; with a negative value, or without any
/// positive one, the axis is linear. Linear ones start at 0 when `from_zero` and nothing is
/// negative.
Axis make_axis(const std::vector<double>& values, bool is_log, bool from_zero, int max_ticks);

}  // namespace lockstep::reports
