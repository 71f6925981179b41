#include "reports/writer/chart.hpp"

#include <algorithm>
#include <cmath>

#include "reports/writer/axis.hpp"
#include "reports/writer/chart_data.hpp"
#include "reports/writer/chart_draw.hpp"
#include "reports/writer/text.hpp"

namespace lockstep::reports {
namespace {

using harness::ChartKind;
using harness::format_number;
using harness::Series;

constexpr size_t kMaxRows = 160;
constexpr double kCompactWidth = 410, kWideWidth = 590;

std::string cell_text(const Cell& cell) {
  if (cell.count == 0) return "";
  std::string text = cell.has_finite() ? format_number(cell.most) : "";
  if (cell.num_infinite > 0) text += text.empty() ? "inf" : " (and inf)";
  if (cell.num_nan > 0) text += text.empty() ? "NaN" : " (and NaN)";
  return text;
}

std::string data_table(const std::vector<const Series*>& series,
                       const ChartData& data,
                       const Frame& frame) {
  const Series& first = *series[0];
  std::string out = fmt::format(
      R"(<details class="data"><summary>Numbers</summary><div class="scroll"><table><thead><tr><th scope="col">{}</th>)",
      escape(first.x_label.empty() ? "x" : first.x_label));
  for (const Series* s : series)
    out += fmt::format(R"(<th scope="col" class="n">{}</th>)", escape(s->name));
  out += "</tr></thead><tbody>";
  for (size_t row = 0; row < data.rows.size(); ++row) {
    out += fmt::format(R"(<tr data-px="{:.1f}"><th scope="row">{}</th>)",
                       frame.px(data.rows[row].x),
                       escape(data.rows[row].label));
    for (size_t i = 0; i < series.size(); ++i) {
      out += fmt::format(R"(<td class="n">{}</td>)", cell_text(data.cells[i][row]));
    }
    out += "</tr>";
  }
  return out + "</tbody></table></div></details>";
}

std::string points_text(int64_t count, std::string_view singular, std::string_view plural) {
  return fmt::format("{} {}", format_count(count), count == 1 ? singular : plural);
}

std::vector<std::string> notes_of(const ChartData& data,
                                  const Frame& frame,
                                  bool has_floor,
                                  const std::vector<std::string>& far_levels) {
  std::vector<std::string> notes;
  const int64_t num_drawn = data.num_points - data.num_bad_x;
  if (num_drawn == 0) {
    notes.emplace_back("There are no points to draw.");
    return notes;
  }
  if (data.num_zero == num_drawn) {
    notes.emplace_back("Every value is exactly 0.");
  } else if (data.num_zero > 0 && frame.y.is_log) {
    notes.push_back(points_text(data.num_zero, "value is", "values are") +
                    " exactly 0 and drawn hollow on the floor of the axis.");
  }
  if (data.num_nan > 0) {
    notes.push_back(points_text(data.num_nan, "value is", "values are") +
                    " not a number, marked \u2715 at the top edge.");
  }
  if (data.num_infinite > 0) {
    notes.push_back(points_text(data.num_infinite, "value is", "values are") +
                    " infinite, marked \u25B3 at the top edge.");
  }
  if (data.is_reduced) {
    notes.push_back(fmt::format(
        "{} points: each line is the largest of up to {} neighbours, the band reaches down to "
        "the smallest.",
        format_count(num_drawn),
        format_count(data.points_per_row)));
  }
  if (data.num_bad_x > 0) {
    notes.push_back(points_text(data.num_bad_x, "point has", "points have") +
                    " no finite place on the x axis and cannot be drawn.");
  }
  if (has_floor) notes.emplace_back("Dashed: noise floor.");
  for (const std::string& level : far_levels) notes.push_back(level);
  return notes;
}

/// Values that the y axis has to hold. Limits far from everything drawn stay outside and are told.
std::vector<double> y_values(const std::vector<const Series*>& series,
                             const ChartData& data,
                             bool is_log,
                             std::vector<double>& limits,
                             std::vector<std::string>& far_levels) {
  std::vector<double> values;
  for (size_t i = 0; i < series.size(); ++i) {
    for (size_t row = 0; row < data.rows.size(); ++row) {
      const Cell& cell = data.cells[i][row];
      if (!cell.has_finite()) continue;
      values.push_back(cell.most);
      if (data.is_reduced) values.push_back(cell.least);
      if (std::isfinite(data.floors[i][row])) values.push_back(data.floors[i][row]);
    }
  }
  double largest = 0, smallest = INFINITY;
  for (const double value : values) {
    largest = std::max(largest, value);
    if (value > 0) smallest = std::min(smallest, value);
  }
  for (const Series* s : series) {
    if (!s->limit || !std::isfinite(*s->limit)) continue;
    const double limit = *s->limit;
    if (std::find(limits.begin(), limits.end(), limit) != limits.end()) continue;
    const bool is_far =
        is_log ? limit > 0 && largest > 0 && (limit > largest * 3e3 || limit < smallest / 3e3)
               : std::abs(limit) > 3 * largest;
    if (is_far && largest > 0) {
      const std::string text = fmt::format("The limit, {}, lies {} the drawing.",
                                           format_number(limit),
                                           limit > largest ? "above" : "below");
      if (std::find(far_levels.begin(), far_levels.end(), text) == far_levels.end())
        far_levels.push_back(text);
      continue;
    }
    limits.push_back(limit);
    values.push_back(limit);
  }
  return values;
}

std::string y_title(const Series& s, const Axis& axis) {
  std::string text = s.y_label;
  if (!s.unit.empty()) text += text.empty() ? s.unit : fmt::format(" ({})", s.unit);
  if (axis.is_log) text += text.empty() ? "log scale" : ", log scale";
  return text;
}

}  // namespace

std::string render_chart(const std::vector<const Series*>& series,
                         const std::string& id,
                         bool is_wide) {
  const Series& first = *series[0];
  const ChartData data = gather(series, kMaxRows);
  Frame frame;
  frame.is_bars = first.kind == ChartKind::kHistogram;
  frame.num_rows = data.rows.size();
  const double width = is_wide ? kWideWidth : kCompactWidth;
  frame.right = width - 10;

  std::vector<double> limits;
  std::vector<std::string> far_levels;
  const std::vector<double> ys = y_values(series, data, first.log_y, limits, far_levels);
  frame.y = make_axis(ys, first.log_y, true, first.log_y ? 6 : 5);
  if (ys.empty()) frame.y.ticks.clear();
  std::vector<double> xs;
  bool has_names = false;
  for (const ChartRow& row : data.rows) xs.push_back(row.x);
  for (const Series* s : series) has_names = has_names || !s->x_names.empty();
  if (has_names || frame.is_bars) frame.edge = 18;
  frame.is_dots = first.kind == ChartKind::kSweep && has_names && !data.is_reduced;
  frame.x = make_axis(xs, first.log_x, false, 6);
  if (!frame.x.is_log && !xs.empty()) {
    // x runs exactly over the data: no empty ends beyond the first and last point.
    const double margin = xs.front() == xs.back() ? 1
                          : frame.is_bars
                              ? 0.5 * (xs.back() - xs.front()) /
                                    static_cast<double>(std::max<size_t>(1, xs.size() - 1))
                              : 0;
    frame.x.low = xs.front() - margin;
    frame.x.high = xs.back() + margin;
    const bool whole =
        std::all_of(xs.begin(), xs.end(), [](double x) { return x == std::floor(x); });
    std::erase_if(frame.x.ticks, [&](const Tick& tick) {
      return tick.value < xs.front() || tick.value > xs.back() ||
             (whole && tick.value != std::floor(tick.value));
    });
    if (frame.x.ticks.empty()) frame.x.ticks.push_back({xs.front(), format_number(xs.front(), 7)});
  }

  if (data.rows.empty()) frame.x.ticks.clear();
  double ticks_height = 14;
  std::string plot = draw_grid(frame) + draw_x_ticks(frame, data, has_names, ticks_height);
  bool has_floor = false;
  for (size_t i = 0; i < series.size(); ++i) {
    const std::string path = data.rows.empty() ? "" : draw_floor(frame, *series[i], data, i);
    has_floor = has_floor || !path.empty();
    plot += path;
  }
  for (const double limit : limits) plot += draw_limit(frame, limit);
  for (size_t i = 0; i < series.size(); ++i) {
    plot += frame.is_bars ? draw_bars(frame, data, i, series.size()) : draw_line(frame, data, i);
  }
  plot += fmt::format(
      R"(<path class="axis" d="M{} {}H{}"/>)", Frame::kLeft, Frame::kBottom, frame.right);
  if (data.rows.empty()) {
    plot += fmt::format(R"(<text class="tick" x="{}" y="{}" text-anchor="middle">no points</text>)",
                        (Frame::kLeft + frame.right) / 2,
                        Frame::kTop + Frame::kPlotHeight / 2);
  }
  const double height = Frame::kBottom + ticks_height + (first.x_label.empty() ? 6 : 18);
  const std::string y_text = y_title(first, frame.y);
  plot += fmt::format(R"(<text class="label" x="2" y="11">{}</text>)", escape(y_text));
  if (!first.x_label.empty()) {
    plot += fmt::format(R"(<text class="label" x="{}" y="{:.0f}" text-anchor="end">{}</text>)",
                        frame.right,
                        height - 4,
                        escape(first.x_label));
  }

  std::string out = fmt::format(R"(<figure class="chart{}" id="{}">)", is_wide ? " wide" : "", id);
  const std::string title = first.chart.empty() ? first.name : first.chart;
  out += fmt::format("<figcaption><b>{}</b>", escape(title));
  if (series.size() > 1 || (!first.name.empty() && first.name != title)) {
    out += R"(<span class="legend">)";
    for (size_t i = 0; i < series.size(); ++i) {
      out += fmt::format("<span>{}{}</span>", legend_swatch(frame, i), escape(series[i]->name));
    }
    out += "</span>";
  }
  const std::vector<std::string> notes = notes_of(data, frame, has_floor, far_levels);
  std::string summary = fmt::format("{}, {} over {}.",
                                    title,
                                    y_text.empty() ? "values" : y_text,
                                    first.x_label.empty() ? "x" : first.x_label);
  out += fmt::format(
      R"(</figcaption><svg viewBox="0 0 {} {:.0f}" role="img" aria-label="{}" data-left="{}" data-right="{}" data-top="{}" data-bottom="{}">{}</svg>)",
      width,
      height,
      escape(summary),
      Frame::kLeft,
      frame.right,
      Frame::kTop,
      Frame::kBottom,
      plot);
  if (!notes.empty()) {
    out += R"(<p class="note">)";
    for (const std::string& note : notes) out += escape(note) + " ";
    out.back() = '<';
    out += "/p>";
  }
  if (!data.rows.empty()) out += data_table(series, data, frame);
  return out + "</figure>\n";
}

}  // namespace lockstep::reports
