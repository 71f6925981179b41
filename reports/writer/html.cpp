// The page from top to bottom: verdict, what differs (or what came closest), every scenario with
// its comparisons and charts, runs, environment.
#include <algorithm>
#include <cmath>
#include <utility>

#include "reports/writer/html_parts.hpp"
#include "reports/writer/style.hpp"
#include "reports/writer/text.hpp"
#include "reports/writer/writer.hpp"

namespace lockstep::reports {
namespace {

using harness::Comparison;
using harness::Counts;
using harness::Report;
using harness::ScenarioResult;
using harness::Status;

constexpr size_t kMaxDiffering = 100, kNumClosest = 5;
// Up to here every scenario is open from the start; above, those that need attention.
constexpr size_t kOpenScenarios = 8, kOpenComparisons = 60;

constexpr std::string_view kGlyphs =
    R"(<svg width="0" height="0" style="position:absolute" aria-hidden="true">)"
    R"(<symbol id="g-pass" viewBox="0 0 10 10"><path d="M1.2 5.4l2.6 2.8l5-6.4"/></symbol>)"
    R"(<symbol id="g-fail" viewBox="0 0 10 10"><path d="M1.8 1.8l6.4 6.4m0-6.4l-6.4 6.4"/></symbol>)"
    R"(<symbol id="g-skipped" viewBox="0 0 10 10"><path d="M1.5 5h7"/></symbol>)"
    R"(<symbol id="g-error" viewBox="0 0 10 10"><path d="M5 1v4.6m0 3v.2"/></symbol>)"
    R"(<symbol id="g-recorded" viewBox="0 0 10 10"><path d="M5 2.5a2.5 2.5 0 1 0 .01 0z"/></symbol></svg>)";

/// Escaped text in which names with hyphens, unless they are long, stay on one line.
std::string unbroken(std::string_view text) {
  constexpr size_t kLong = 32;
  std::string out;
  while (true) {
    const size_t end = text.find(' ');
    const std::string_view word = text.substr(0, end);
    const bool keep = word.size() <= kLong && word.find('-') != std::string_view::npos;
    out += keep ? fmt::format(R"(<span class="whole">{}</span>)", escape(word)) : escape(word);
    if (end == std::string_view::npos) return out;
    out += ' ';
    text.remove_prefix(end + 1);
  }
}

std::string tally(const Report& report) {
  const Counts c = harness::count_comparisons(report);
  std::string bar, counts;
  const auto add = [&](Status status, int64_t count, std::string_view word) {
    if (count == 0) return;
    bar += fmt::format(R"(<span class="{}" style="flex:{}"></span>)", name(status), count);
    counts += fmt::format("<span>{}{}</span>", mark(status, format_count(count)), word);
  };
  add(Status::kFail, c.fail, c.fail == 1 ? "differs" : "differ");
  add(Status::kError, c.error, "could not be computed");
  add(Status::kPass, c.pass, "within limits");
  add(Status::kRecorded, c.expected, "failed as asked");
  add(Status::kRecorded, c.recorded, "recorded without a limit");
  add(Status::kSkipped, c.skipped, "skipped");
  const Counts s = harness::count_scenarios(report);
  std::string scenarios;
  const auto part = [&](int64_t count, std::string_view word) {
    if (count > 0) scenarios += fmt::format("{}{} {}", scenarios.empty() ? "" : ", ", count, word);
  };
  part(s.fail, "failed");
  part(s.error, "stopped");
  part(s.pass, "passed");
  part(s.recorded, "recorded");
  part(s.skipped, "skipped");
  counts += fmt::format(R"(<span class="soft">{} scenario{}{}{}</span>)",
                        format_count(s.total()),
                        s.total() == 1 ? "" : "s",
                        scenarios.empty() ? "" : ": ",
                        scenarios);
  counts += fmt::format(R"(<span class="soft">exit code {}</span>)", report.exit_code);
  if (!bar.empty()) bar = fmt::format(R"(<div class="tally" aria-hidden="true">{}</div>)", bar);
  return fmt::format(R"({}<div class="counts">{}</div>)", bar, counts);
}

std::string verdict(const Report& report) {
  const harness::Environment& e = report.environment;
  std::string facts = escape(report.started);
  const auto add = [&](const std::string& fact) {
    if (!fact.empty()) facts += (facts.empty() ? "" : ", ") + fact;
  };
  if (report.seconds > 0) add("took " + format_seconds(report.seconds));
  if (!e.git_commit.empty()) add("commit " + escape(e.git_commit));
  return fmt::format(
      R"(<header class="verdict {}"><div class="name"><span><b>{}</b></span><span>{}</span></div>)"
      R"(<h1>{}</h1><p class="sentence">{}</p>{}</header>)"
      "\n",
      name(report.status),
      escape(report.title.empty() ? "Lockstep" : report.title),
      facts,
      headline(report),
      unbroken(sentence_below(report)),
      tally(report));
}

std::string differences(const Report& report) {
  std::string out;
  size_t told = 0, untold = 0;
  for (const ScenarioResult& s : report.scenarios) {
    const std::string message = scenario_message(s, true);
    if (message.empty()) continue;
    if (told == kMaxDiffering) {
      ++untold;
      continue;
    }
    ++told;
    out += message + "\n";
  }
  if (untold > 0) out += fmt::format(R"(<p class="note">and {} more below.</p>)", untold);

  std::vector<Row> rows = differing_rows(report);
  if (!rows.empty()) {
    const size_t total = rows.size();
    rows.resize(std::min(total, kMaxDiffering));
    out += fmt::format(R"(<div class="card table">{}</div>)",
                       comparison_table(rows, TableUse::kOverview, "Comparisons that differ"));
    if (total > rows.size()) {
      out +=
          fmt::format(R"(<p class="note">The first {} of {}; all are under their scenarios.</p>)",
                      rows.size(),
                      format_count(static_cast<int64_t>(total)));
    }
  }
  if (!out.empty()) {
    const bool only_skipped = rows.empty() && report.exit_code == 0;
    return fmt::format(R"(<section aria-labelledby="differs"><h2 id="differs">{}</h2>{}</section>)"
                       "\n",
                       only_skipped ? "What was skipped" : "What differs and where",
                       out);
  }

  std::vector<Row> closest;
  for (const ScenarioResult& s : report.scenarios) {
    if (!s.expected.empty()) continue;
    for (const Comparison& c : s.comparisons) {
      if (c.status == Status::kPass && c.ratio() > 0) closest.push_back({&s, &c});
    }
  }
  // On a short page the scenarios say it already.
  if (closest.size() <= kNumClosest) return "";
  std::stable_sort(closest.begin(), closest.end(), [](const Row& left, const Row& right) {
    return left.comparison->ratio() > right.comparison->ratio();
  });
  closest.resize(kNumClosest);
  return fmt::format(
      R"(<section aria-labelledby="differs"><h2 id="differs">Closest to their limits</h2><div class="card table">{}</div></section>)"
      "\n",
      comparison_table(closest, TableUse::kOverview, "Comparisons closest to their limits"));
}

std::string scenarios(const Report& report) {
  if (report.scenarios.empty()) return "";
  std::vector<const ScenarioResult*> order;
  size_t num_comparisons = 0;
  for (const ScenarioResult& s : report.scenarios) {
    order.push_back(&s);
    num_comparisons += s.comparisons.size();
  }
  std::stable_sort(order.begin(), order.end(), [](const auto* left, const auto* right) {
    return exit_code(*left) > exit_code(*right);
  });
  const bool all_open =
      order.size() == 1 || (order.size() <= kOpenScenarios && num_comparisons <= kOpenComparisons);
  std::string out =
      R"(<section aria-labelledby="scenarios"><h2 id="scenarios">Scenarios and comparisons</h2>)";
  const Counts counts = harness::count_comparisons(report);
  if (counts.pass + counts.fail + counts.expected > 0) {  // something has a limit
    out +=
        R"(<p class="key">Bars show value / limit on a log scale from 10⁻⁴ to 10², )"
        R"(with the limit at <i></i>and the noise floor at <i class="noise"></i>. Hatched: no place on that scale.</p>)";
  }
  if (num_comparisons > 8) {
    out +=
        R"(<div class="tools" id="tools" hidden><input type="search" placeholder="Filter" aria-label="Filter scenarios and comparisons">)";
    const Counts& c = counts;
    const auto button = [&](Status status, int64_t count) {
      if (count == 0 || count == c.total()) return;
      out += fmt::format(
          R"(<button type="button" data-status="{0}" aria-pressed="false">{1} {0}</button>)",
          name(status),
          format_count(count));
    };
    button(Status::kFail, c.fail);
    button(Status::kError, c.error);
    button(Status::kPass, c.pass);
    button(Status::kRecorded, c.recorded);
    button(Status::kSkipped, c.skipped);
    out +=
        R"(<button type="button" data-open="1">Open all</button><button type="button" data-open="0">Close all</button></div>)";
  }
  out += R"(<div class="card scenarios">)";
  for (const ScenarioResult* s : order) {
    const bool needs_attention = exit_code(*s) != 0;
    out += scenario_block(*s, scenario_id(report, *s), all_open || needs_attention);
  }
  return out + "</div></section>\n";
}

std::string environment(const Report& report) {
  std::string out =
      R"(<section aria-labelledby="environment"><h2 id="environment">Environment and provenance</h2>)";
  if (!report.command.empty()) {
    out += fmt::format(
        R"(<div class="card command"><pre aria-label="Command that repeats this run">{}</pre></div>)",
        escape(report.command));
  }
  return out + environment_list(report) + "</section>\n";
}

std::string navigation(std::string_view differs, bool has_runs) {
  std::string out = R"(<nav aria-label="Sections">)";
  if (!differs.empty()) {
    out += fmt::format(
        R"(<a href="#differs">{}</a>)",
        differs.find("Closest to") != std::string_view::npos         ? "Closest to their limits"
        : differs.find("What was skipped") != std::string_view::npos ? "What was skipped"
                                                                     : "What differs");
  }
  out += R"(<a href="#scenarios">Scenarios and comparisons</a>)";
  if (has_runs) out += R"(<a href="#runs">Runs</a>)";
  return out + R"(<a href="#environment">Environment</a></nav>)" + "\n";
}

}  // namespace

std::vector<Row> differing_rows(const Report& report) {
  std::vector<Row> rows;
  for (const ScenarioResult& s : report.scenarios) {
    if (!s.expected.empty()) continue;
    for (const Comparison& c : s.comparisons) {
      if (c.status == Status::kFail || c.status == Status::kError) rows.push_back({&s, &c});
    }
  }
  return rows;
}

std::string scenario_id(const Report& report, const ScenarioResult& scenario) {
  return fmt::format("s{}", &scenario - report.scenarios.data() + 1);
}

std::string render_html(const Report& report) {
  const std::string differs = differences(report);
  std::string runs = runs_table(report);
  if (!runs.empty()) {
    runs = fmt::format(R"(<section aria-labelledby="runs"><h2 id="runs">Runs</h2>{}</section>)"
                       "\n",
                       runs);
  }
  std::string out = fmt::format(
      "<!doctype html>\n"
      R"(<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">)"
      R"(<title>{}: {}</title><link rel="icon" href="data:,"><style>{}</style></head><body>{}<main>)"
      "\n",
      headline(report),
      escape(report.title.empty() ? "Lockstep" : report.title),
      kStyle,
      kGlyphs);
  out += verdict(report) + navigation(differs, !runs.empty()) + differs + scenarios(report) + runs +
         environment(report);
  out += fmt::format(
      "<footer>Written by Lockstep {}. Every number is in report.json at full "
      "precision.</footer></main>",
      escape(report.environment.lockstep_version));
  out += fmt::format("<script>{}</script></body></html>\n", kScript);
  return out;
}

}  // namespace lockstep::reports
