#include "reports/writer/chart_data.hpp"

#include <algorithm>
#include <cmath>
#include <map>

namespace lockstep::reports {
namespace {

using harness::format_number;
using harness::Series;

void add(Cell& cell, double y) {
  ++cell.count;
  if (std::isnan(y)) {
    ++cell.num_nan;
    return;
  }
  if (std::isinf(y)) {
    ++cell.num_infinite;
    return;
  }
  if (y == 0) ++cell.num_zero;
  const bool is_first = cell.count - cell.num_nan - cell.num_infinite == 1;
  cell.least = is_first ? y : std::min(cell.least, y);
  cell.most = is_first ? y : std::max(cell.most, y);
}

/// Row that holds x; rows are ascending and x is the start of its interval or before the next.
size_t row_of(const std::vector<double>& starts, double x) {
  const auto next = std::upper_bound(starts.begin(), starts.end(), x);
  return next == starts.begin() ? 0 : static_cast<size_t>(next - starts.begin()) - 1;
}

}  // namespace

ChartData gather(const std::vector<const Series*>& series, size_t max_rows) {
  ChartData data;
  std::map<double, std::string> names;  // distinct x, with a name where one is given
  for (const Series* s : series) {
    for (size_t i = 0; i < s->points.size(); ++i) {
      const double x = s->points[i].x;
      if (!std::isfinite(x)) continue;
      std::string& name = names[x == 0 ? 0 : x];
      if (name.empty() && i < s->x_names.size()) name = s->x_names[i];
    }
  }

  std::vector<double> starts;
  if (names.size() > max_rows) {
    data.is_reduced = true;
    const double low = names.begin()->first, high = names.rbegin()->first;
    // Intervals of whole numbers where x is whole (token positions), so that their ends are exact.
    const double width = std::max((high - low) / static_cast<double>(max_rows), 0.0);
    const bool whole = std::all_of(names.begin(), names.end(), [](const auto& item) {
      return item.first == std::floor(item.first);
    });
    const double step = whole ? std::ceil((high - low + 1) / static_cast<double>(max_rows)) : width;
    for (size_t i = 0; i < max_rows && low + static_cast<double>(i) * step <= high; ++i) {
      const double start = low + static_cast<double>(i) * step;
      const double end = std::min(high, start + step - (whole ? 1 : 0));
      starts.push_back(start);
      data.rows.push_back(
          {(start + end) / 2,
           fmt::format("{} to {}", format_number(start, 7), format_number(end, 7))});
    }
  } else {
    for (const auto& [x, name] : names) {
      starts.push_back(x);
      data.rows.push_back({x, name.empty() ? format_number(x, 7) : name});
    }
  }

  data.cells.assign(series.size(), std::vector<Cell>(data.rows.size()));
  data.floors.assign(series.size(), std::vector<double>(data.rows.size(), std::nan("")));
  for (size_t i = 0; i < series.size(); ++i) {
    const std::vector<double>& floors = series[i]->noise_floor;
    for (size_t j = 0; j < series[i]->points.size(); ++j) {
      const harness::Point& point = series[i]->points[j];
      ++data.num_points;
      if (!std::isfinite(point.x)) {
        ++data.num_bad_x;
        continue;
      }
      const size_t row = row_of(starts, point.x);
      add(data.cells[i][row], point.y);
      const double floor = floors.size() == 1  ? floors[0]
                           : j < floors.size() ? floors[j]
                                               : std::nan("");
      double& highest = data.floors[i][row];
      if (std::isfinite(floor) && !(highest >= floor)) highest = floor;
    }
    for (const Cell& cell : data.cells[i]) {
      data.points_per_row = std::max(data.points_per_row, cell.count);
      data.num_nan += cell.num_nan;
      data.num_infinite += cell.num_infinite;
      data.num_zero += cell.num_zero;
    }
  }
  return data;
}

}  // namespace lockstep::reports
