#include "reports/writer/chart_draw.hpp"

#include <algorithm>
#include <cmath>
#include <optional>

#include "reports/writer/text.hpp"

namespace lockstep::reports {
namespace {

constexpr size_t kNumColours = 8;
constexpr double kLeft = Frame::kLeft, kTop = Frame::kTop, kBottom = Frame::kBottom,
                 kPlotHeight = Frame::kPlotHeight;

std::string marker(size_t index, double x, double y, bool hollow) {
  const std::string css = fmt::format("m c{}{}", index % kNumColours, hollow ? " hollow" : "");
  constexpr double kRadius = 3;
  switch (index % 4) {
    case 0:
      return fmt::format(
          R"(<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="{}"/>)", css, x, y, kRadius);
    case 1:
      return fmt::format(R"(<rect class="{}" x="{:.1f}" y="{:.1f}" width="5.4" height="5.4"/>)",
                         css,
                         x - 2.7,
                         y - 2.7);
    case 2:
      return fmt::format(
          R"(<path class="{}" d="M{:.1f} {:.1f}l3.6 3.6l-3.6 3.6l-3.6-3.6z"/>)", css, x, y - 3.6);
    default:
      return fmt::format(R"(<path class="{}" d="M{:.1f} {:.1f}l3.5 6h-7z"/>)", css, x, y - 3.8);
  }
}

/// Colours start over after eight series, then dotted.
std::string line_css(size_t index) {
  return fmt::format("l c{}{}", index % kNumColours, index >= kNumColours ? " again" : "");
}

}  // namespace

std::string legend_swatch(const Frame& frame, size_t index) {
  std::string inner;
  if (frame.is_bars) {
    inner = fmt::format(R"(<rect class="col c{}" x="5" y="1" width="10" height="10"/>)",
                        index % kNumColours);
  } else {
    if (!frame.is_dots) inner = fmt::format(R"(<path class="{}" d="M0 6h20"/>)", line_css(index));
    if (frame.is_dots || frame.has_markers()) inner += marker(index, 10, 6, false);
  }
  return fmt::format(
      R"(<svg class="swatch" viewBox="0 0 20 12" width="20" height="12" aria-hidden="true">{}</svg>)",
      inner);
}

std::string draw_grid(const Frame& frame) {
  std::string out;
  for (const Tick& tick : frame.y.ticks) {
    const double y = frame.py(tick.value);
    out += fmt::format(R"(<path class="grid{}" d="M{} {:.1f}H{}"/>)",
                       tick.label.empty() ? " minor" : "",
                       kLeft,
                       y,
                       frame.right);
    if (tick.label.empty()) continue;
    out += fmt::format(R"(<text class="tick" x="{}" y="{:.1f}" text-anchor="end">{}</text>)",
                       kLeft - 5,
                       y + 3.5,
                       escape(tick.label));
  }
  if (frame.y.is_log && frame.y.has_zero) {
    // The axis is broken between zero and its lowest decade.
    const double y = kBottom - 8;
    out +=
        fmt::format(R"(<path class="break" d="M{0} {1}l8-3M{0} {2}l8-3"/>)", kLeft - 4, y + 3, y);
  }
  return out;
}

std::string draw_x_ticks(const Frame& frame,
                         const ChartData& data,
                         bool has_names,
                         double& height) {
  std::string out;
  size_t longest = 0;
  for (const ChartRow& row : data.rows) longest = std::max(longest, row.label.size());
  const auto count = static_cast<double>(data.rows.size());
  const double room = (frame.right - kLeft) / std::max(1.0, count);
  constexpr double kCharacter = 5.6;
  height = 14;
  if (has_names && !data.is_reduced && room >= 13) {
    const bool fits = static_cast<double>(longest) * kCharacter + 6 <= room;
    const size_t shown = std::min<size_t>(longest, 22);
    if (!fits) height = 12 + static_cast<double>(shown) * kCharacter * 0.6;
    for (const ChartRow& row : data.rows) {
      const double x = frame.px(row.x);
      std::string label = row.label;
      if (label.size() > 22) {
        size_t cut = 20;
        while (cut > 0 && (static_cast<unsigned char>(label[cut]) & 0xC0U) == 0x80U) --cut;
        label = label.substr(0, cut) + "\u2026";
      }
      out +=
          fits
              ? fmt::format(
                    R"(<text class="tick" x="{:.1f}" y="{}" text-anchor="middle">{}</text>)",
                    x,
                    kBottom + 13,
                    escape(label))
              : fmt::format(
                    R"-(<text class="tick" transform="translate({:.1f} {}) rotate(-36)" text-anchor="end">{}</text>)-",
                    x + 3,
                    kBottom + 11,
                    escape(label));
      out += fmt::format(R"(<path class="axis" d="M{:.1f} {}v3"/>)", x, kBottom);
      if (frame.is_dots) {
        out += fmt::format(R"(<path class="grid minor" d="M{:.1f} {}V{}"/>)", x, kTop, kBottom);
      }
    }
    return out;
  }
  for (const Tick& tick : frame.x.ticks) {
    if (tick.label.empty()) continue;
    const double x = frame.px(tick.value);
    out += fmt::format(
        R"(<path class="axis" d="M{0:.1f} {1}v3"/><text class="tick" x="{0:.1f}" y="{2}" text-anchor="middle">{3}</text>)",
        x,
        kBottom,
        kBottom + 13,
        escape(tick.label));
  }
  return out;
}

std::string draw_limit(const Frame& frame, double limit) {
  const double y = frame.py(limit);
  const double text_y = y - kTop < 12 ? y + 10 : y - 3.5;
  return fmt::format(
      R"(<path class="limit" d="M{0} {1:.1f}H{2}"/><text class="limit" x="{3}" y="{4:.1f}" text-anchor="end">limit {5}</text>)",
      kLeft,
      y,
      frame.right,
      frame.right - 3,
      text_y,
      harness::format_number(limit));
}

std::string draw_floor(const Frame& frame,
                       const harness::Series& s,
                       const ChartData& data,
                       size_t index) {
  std::string path;
  double level = 0;
  for (size_t row = 0; row < data.rows.size(); ++row) {
    if (!std::isfinite(data.floors[index][row])) continue;
    level = data.floors[index][row];
    path += fmt::format(
        "{}{:.1f} {:.1f}", path.empty() ? "M" : "L", frame.px(data.rows[row].x), frame.py(level));
  }
  if (path.empty()) return "";
  // One level for all: over the whole width, also when there is a single point.
  if (s.noise_floor.size() == 1)
    path = fmt::format("M{} {:.1f}H{}", kLeft, frame.py(level), frame.right);
  return fmt::format(R"(<path class="floor c{}" d="{}"/>)", index % kNumColours, path);
}

std::string draw_line(const Frame& frame, const ChartData& data, size_t index) {
  const std::vector<Cell>& cells = data.cells[index];
  std::string line, markers, upper, bands;
  std::string lower;
  bool is_open = false;
  const auto close_band = [&] {
    if (data.is_reduced && !upper.empty()) {
      bands += fmt::format(
          R"(<path class="band c{}" d="M{}{}z"/>)", index % kNumColours, upper.substr(1), lower);
    }
    upper.clear();
    lower.clear();
  };
  for (size_t row = 0; row < cells.size(); ++row) {
    const Cell& cell = cells[row];
    if (cell.count == 0) continue;  // no point here: the line runs on to the next one
    const double x = frame.px(data.rows[row].x);
    if (cell.num_nan + cell.num_infinite > 0) {
      markers +=
          cell.num_nan > 0
              ? fmt::format(R"(<path class="bad" d="M{:.1f} {}l6 6m0-6l-6 6"/>)", x - 3, kTop + 1)
              : fmt::format(
                    R"(<path class="bad" d="M{:.1f} {}l3.5-6l3.5 6z"/>)", x - 3.5, kTop + 8);
    }
    if (!cell.has_finite()) {
      is_open = false;
      close_band();
      continue;
    }
    const double y = frame.py(cell.most);
    line += fmt::format("{}{:.1f} {:.1f}", is_open ? "L" : "M", x, y);
    is_open = true;
    upper += fmt::format("L{:.1f} {:.1f}", x, y);
    lower.insert(0, fmt::format("L{:.1f} {:.1f}", x, frame.py(cell.least)));
    if (frame.has_markers()) markers += marker(index, x, y, frame.y.is_log && cell.most == 0);
  }
  close_band();
  if (line.empty() || frame.is_dots) return markers;
  return bands + fmt::format(R"(<path class="{}" d="{}"/>)", line_css(index), line) + markers;
}

std::string draw_bars(const Frame& frame, const ChartData& data, size_t index, size_t num_series) {
  std::string out;
  const double slot = (frame.right - kLeft - 2 * frame.edge) /
                      static_cast<double>(std::max<size_t>(1, frame.num_rows));
  const double group = std::min(40.0, slot * 0.8), width = group / static_cast<double>(num_series);
  for (size_t row = 0; row < data.rows.size(); ++row) {
    const Cell& cell = data.cells[index][row];
    if (!cell.has_finite()) continue;
    const double x = frame.px(data.rows[row].x) - group / 2 + width * static_cast<double>(index);
    const double y = frame.py(cell.most);
    const double base = frame.y.is_log ? kBottom : frame.py(std::max(0.0, frame.y.low));
    out += fmt::format(
        R"(<rect class="col c{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>)",
        index % kNumColours,
        x,
        std::min(y, base),
        std::max(0.8, width - 0.6),
        std::abs(base - y));
  }
  return out;
}

}  // namespace lockstep::reports
