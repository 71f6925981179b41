#include <algorithm>
#include <utility>

#include "reports/writer/chart.hpp"
#include "reports/writer/html_parts.hpp"
#include "reports/writer/text.hpp"

namespace lockstep::reports {
namespace {

using harness::Comparison;
using harness::ScenarioResult;
using harness::Series;
using harness::Status;

std::string charts_of(const ScenarioResult& s, const std::string& id) {
  // Series of one kind and title share a chart; charts come in the order of kinds, then as given.
  std::vector<std::vector<const Series*>> charts;
  for (const Series& series : s.series) {
    const auto same = std::find_if(charts.begin(), charts.end(), [&](const auto& chart) {
      return !series.chart.empty() && chart[0]->kind == series.kind &&
             chart[0]->chart == series.chart;
    });
    if (same == charts.end()) {
      charts.push_back({&series});
    } else {
      same->push_back(&series);
    }
  }
  if (charts.empty()) return "";
  std::stable_sort(charts.begin(), charts.end(), [](const auto& left, const auto& right) {
    return left[0]->kind < right[0]->kind;
  });
  const bool is_wide = charts.size() <= 2;
  std::string out = fmt::format(R"(<div class="charts{}">)", is_wide ? " wide" : "");
  for (size_t i = 0; i < charts.size(); ++i) {
    out += render_chart(charts[i], fmt::format("{}-chart{}", id, i + 1), is_wide);
  }
  return out + "</div>\n";
}

std::string count_text(const ScenarioResult& s) {
  if (s.comparisons.empty()) return "";
  const auto count = [&](Status status) {
    return std::count_if(s.comparisons.begin(), s.comparisons.end(), [&](const Comparison& c) {
      return c.status == status;
    });
  };
  const auto total = s.comparisons.size();
  const auto differing = count(Status::kFail), broken = count(Status::kError);
  std::string text = differing > 0
                         ? fmt::format("{} of {} differ{}", differing, total, total == 1 ? "s" : "")
                         : fmt::format("{} comparison{}", total, total == 1 ? "" : "s");
  if (broken > 0) text += fmt::format(", {} error{}", broken, broken == 1 ? "" : "s");
  return text;
}

std::string meta_of(const ScenarioResult& s) {
  std::string out;
  const auto add = [&](std::string_view label, const std::string& value) {
    if (!value.empty()) {
      out += fmt::format("<span>{}{}</span>", label, value);
    }
  };
  add("", s.file.empty() ? "" : fmt::format("<code>{}</code>", escape(s.file)));
  std::string tags;
  for (const std::string& tag : s.tags) tags += (tags.empty() ? "" : ", ") + escape(tag);
  add("tags ", tags);
  std::string runs;
  for (const harness::RunRecord& r : s.runs) {
    runs += fmt::format("{}{} ({})",
                        runs.empty() ? "" : ", ",
                        escape(r.name),
                        escape(fmt::format("{} {}, {}", r.engine, r.policy, r.topology)));
    if (runs.size() > 600) {
      runs += fmt::format(" and more, {} in all", s.runs.size());
      break;
    }
  }
  add("runs ", runs);
  return out.empty() ? "" : fmt::format(R"(<div class="meta">{}</div>)", out);
}

}  // namespace

std::string scenario_message(const ScenarioResult& s, bool names_scenario) {
  const std::string subject =
      names_scenario ? fmt::format("<b>{}</b> ", escape(s.name)) : std::string();
  const auto tell = [&](std::string_view text) {
    return fmt::format(R"(<p class="tell {}">{}{}</p>)", name(s.status), subject, text);
  };
  const std::string reason = escape(s.reason.empty() ? "no reason was given" : s.reason);
  switch (s.status) {
    case Status::kError:
      return tell(fmt::format("{} in phase {} ({} error, exit code {}): {}",
                              names_scenario ? "stopped" : "Stopped",
                              name(s.phase),
                              kind_name(s.error_kind.value_or(ErrorKind::kInternal)),
                              exit_code(s),
                              reason));
    case Status::kSkipped:
      return tell(fmt::format(
          "{} in phase {}: {}", names_scenario ? "was skipped" : "Skipped", name(s.phase), reason));
    case Status::kFail: {
      if (!s.expected.empty()) {
        return tell(fmt::format("{} have ended with {}, but did not: {}",
                                names_scenario ? "should" : "Should",
                                escape(s.expected),
                                reason));
      }
      const bool is_told =
          std::any_of(s.comparisons.begin(), s.comparisons.end(), [](const Comparison& c) {
            return c.status == Status::kFail;
          });
      return is_told ? ""
                     : tell(fmt::format("{}: {}", names_scenario ? "failed" : "Failed", reason));
    }
    case Status::kPass:
      if (s.expected.empty() || names_scenario) return "";
      return tell(fmt::format("Was made to end with {}, and did.", escape(s.expected)));
    case Status::kRecorded:
      return "";
  }
  return "";
}

std::string scenario_block(const ScenarioResult& s, const std::string& id, bool is_open) {
  const Comparison* worst = harness::worst_comparison(s);
  const std::string bar = worst == nullptr ? "" : ratio_bar(*worst);
  std::string out = fmt::format(
      R"(<details class="scenario {}" id="{}"{}><summary>{}<span class="title"><b>{}</b><span>{}</span></span>)"
      R"(<span class="count n soft">{}</span><span class="worst {}">{}</span><span class="time n soft">{}</span></summary>)"
      R"(<div class="body">)",
      name(s.status),
      id,
      is_open ? " open" : "",
      mark(s.status),
      escape(s.name),
      escape(s.description),
      count_text(s),
      worst == nullptr                                      ? ""
      : worst->status == Status::kFail && exit_code(s) == 0 ? name(Status::kRecorded)
                                                            : name(worst->status),
      bar,
      s.seconds > 0 ? format_seconds(s.seconds) : "");
  out += meta_of(s) + scenario_message(s, false);
  std::vector<Row> rows;
  for (const Comparison& c : s.comparisons) rows.push_back({&s, &c});
  std::stable_sort(rows.begin(), rows.end(), [](const Row& left, const Row& right) {
    const auto bad = [](const Row& row) {
      return row.comparison->status == Status::kFail || row.comparison->status == Status::kError;
    };
    return bad(left) && !bad(right);
  });
  const std::string charts = charts_of(s, id);
  const std::string table =
      rows.empty()
          ? ""
          : comparison_table(rows, TableUse::kScenario, fmt::format("Comparisons of {}", s.name));
  // Where nothing is judged the curves are the answer; elsewhere the verdicts are.
  out += s.status == Status::kRecorded ? charts + table : table + charts;
  return out + "</div></details>\n";
}

}  // namespace lockstep::reports
