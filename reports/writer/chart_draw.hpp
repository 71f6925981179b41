// Drawing primitives of charts, in SVG units. Colours and text sizes are in the page's style sheet;
// a series is told apart by colour and by the shape of its markers.
#pragma once

#include <string>
#include <string_view>

#include "reports/writer/axis.hpp"
#include "reports/writer/chart_data.hpp"

namespace lockstep::reports {

/// Where the axes lie inside the drawing.
struct Frame {
  static constexpr double kLeft = 42, kTop = 22, kPlotHeight = 158, kBottom = kTop + kPlotHeight;

  Axis x, y;
  double right = 400;
  double edge = 7;  ///< keeps the first and last marker, or their names, off the frame
  bool is_bars = false;
  bool is_dots = false;  ///< categories: markers without a line that would join them
  size_t num_rows = 0;
  [[nodiscard]] bool has_markers() const { return num_rows <= 48; }
  [[nodiscard]] double px(double value) const {
    return kLeft + edge + x.position(value) * (right - kLeft - 2 * edge);
  }
  [[nodiscard]] double py(double value) const { return kBottom - y.position(value) * kPlotHeight; }
};

/// Sample of a series for the legend, as it is drawn.
std::string legend_swatch(const Frame& frame, size_t index);

/// Horizontal lines and labels at the ticks of the y axis.
std::string draw_grid(const Frame& frame);

/// Ticks of the x axis: names where they are given and find room, slanted if need be, else numbers.
/// Sets `height` to what they take below the axis.
std::string draw_x_ticks(const Frame& frame, const ChartData& data, bool has_names, double& height);

std::string draw_limit(const Frame& frame, double limit);

/// Noise floor of a series: a dashed line in its colour; empty if it has none.
std::string draw_floor(const Frame& frame,
                       const harness::Series& series,
                       const ChartData& data,
                       size_t index);

/// Line with markers, and for reduced data a band from the smallest to the largest value. A row
/// without finite values breaks the line; NaN and infinity are marked at the top edge.
std::string draw_line(const Frame& frame, const ChartData& data, size_t index);

/// Bars of one of `num_series` series side by side.
std::string draw_bars(const Frame& frame, const ChartData& data, size_t index, size_t num_series);

}  // namespace lockstep::reports
