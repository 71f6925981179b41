// What a chart draws, before any drawing: points of several series brought onto common rows.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "harness/result/result.hpp"

namespace lockstep::reports {

/// Points of one series that fall on one row. Without any point `count` is 0.
struct Cell {
  int64_t count = 0, num_nan = 0, num_infinite = 0, num_zero = 0;
  double least = 0, most = 0;  ///< over the finite ones, if has_finite()
  [[nodiscard]] bool has_finite() const { return count > num_nan + num_infinite; }
};

struct ChartRow {
  double x = 0;       ///< where it is drawn
  std::string label;  ///< "layers.2 KDA", "4096", "4096 to 4351"
};

struct ChartData {
  std::vector<ChartRow> rows;            ///< ascending x
  std::vector<std::vector<Cell>> cells;  ///< [series][row]
  /// [series][row], the highest noise floor of the row's points; NaN where there is none.
  std::vector<std::vector<double>> floors;
  bool is_reduced = false;     ///< rows are intervals of x, not single x
  int64_t points_per_row = 1;  ///< largest count of a cell
  int64_t num_bad_x = 0;       ///< points left out because their x is not finite
  int64_t num_nan = 0, num_infinite = 0, num_zero = 0, num_points = 0;
};

/// One row per distinct x, or at most `max_rows` equal intervals when there are more of them.
ChartData gather(const std::vector<const harness::Series*>& series, size_t max_rows);

}  // namespace lockstep::reports
