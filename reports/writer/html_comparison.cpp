#include <algorithm>
#include <cmath>

#include "reports/writer/html_parts.hpp"
#include "reports/writer/text.hpp"

namespace lockstep::reports {
namespace {

using harness::Comparison;
using harness::Detail;
using harness::format_number;
using harness::RankValue;
using harness::Status;

constexpr size_t kMaxInnerRows = 400;  // of one comparison; the rest is in report.json
constexpr size_t kOpenInnerRows = 12;

/// A row below a comparison in the shape of one, for the same bars and ratios.
Comparison as_comparison(const Detail& d, harness::Bound bound) {
  Comparison c;
  c.value = d.value;
  c.limit = d.limit;
  c.noise_floor = d.noise_floor;
  c.bound = bound;
  c.status = d.status;
  return c;
}

std::string unit_suffix(const std::string& unit) {
  return unit.empty() ? "" : fmt::format(R"( <span class="soft">{}</span>)", escape(unit));
}

std::string limit_sign(harness::Bound bound) {
  return bound == harness::Bound::kAtLeast ? "\u2265 " : "";
}

/// Key of a cell for sorting; what has none sorts last.
std::string key(double value) {
  if (std::isnan(value)) return "Infinity";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return fmt::format("{}", value);
}

std::string ranks_table(const Comparison& c) {
  std::vector<const RankValue*> order;
  for (const RankValue& r : c.ranks) order.push_back(&r);
  const size_t num_left_out = order.size() > kMaxInnerRows ? order.size() - kMaxInnerRows : 0;
  if (num_left_out > 0) {
    std::stable_sort(order.begin(), order.end(), [](const auto* left, const auto* right) {
      return left->value > right->value;
    });
    order.resize(kMaxInnerRows);
  }
  const bool has_notes =
      std::any_of(order.begin(), order.end(), [](const auto* r) { return !r->note.empty(); });
  std::string out = R"(<h3>Ranks</h3><table><thead><tr><th scope="col">world rank</th>)"
                    R"(<th scope="col">place</th><th scope="col" class="n">value</th>)";
  if (c.limit) out += R"(<th scope="col">value / limit</th>)";
  if (has_notes) out += R"(<th scope="col">note</th>)";
  out += "</tr></thead><tbody>";
  for (const RankValue* r : order) {
    Comparison at_rank;
    at_rank.value = r->value;
    at_rank.limit = c.limit;
    at_rank.noise_floor = c.noise_floor;
    at_rank.bound = c.bound;
    judge(at_rank);
    out += fmt::format(
        R"(<tr class="{}"><th scope="row">{}{}</th><td>{}</td><td class="n value">{}</td>)",
        name(at_rank.status),
        r->world_rank,
        c.rank == r->world_rank ? R"( <span class="soft">worst</span>)" : "",
        escape(r->place),
        format_number(r->value));
    if (c.limit) out += fmt::format("<td>{}</td>", ratio_bar(at_rank));
    if (has_notes) out += fmt::format("<td>{}</td>", escape(r->note));
    out += "</tr>";
  }
  out += "</tbody></table>";
  if (num_left_out > 0) {
    out += fmt::format(R"(<p class="note">The {} largest; {} more are in report.json.</p>)",
                       kMaxInnerRows,
                       format_count(static_cast<int64_t>(num_left_out)));
  }
  return out;
}

bool is_bad(const Detail& d) { return d.status == Status::kFail || d.status == Status::kError; }

std::string details_table(const Comparison& c) {
  std::vector<const Detail*> order;
  for (const Detail& d : c.details) order.push_back(&d);
  std::stable_sort(order.begin(), order.end(), [](const auto* left, const auto* right) {
    return is_bad(*left) && !is_bad(*right);
  });
  const size_t num_left_out = order.size() > kMaxInnerRows ? order.size() - kMaxInnerRows : 0;
  order.resize(order.size() - num_left_out);
  bool has_limit = false, has_floor = false, has_metric = false, has_note = false;
  for (const Detail* d : order) {
    has_limit = has_limit || d->limit.has_value();
    has_floor = has_floor || d->noise_floor.has_value();
    has_metric = has_metric || !d->metric.empty();
    has_note = has_note || !d->note.empty();
  }
  std::string out = R"(<h3>Rows</h3><table><thead><tr><th scope="col">name</th>)";
  if (has_metric) out += R"(<th scope="col">metric</th>)";
  out += R"(<th scope="col" class="n">value</th>)";
  if (has_limit) {
    out += R"(<th scope="col" class="n">limit</th><th scope="col">value / limit</th>)";
  }
  if (has_floor) out += R"(<th scope="col" class="n">noise floor</th>)";
  out += R"(<th scope="col">status</th>)";
  if (has_note) out += R"(<th scope="col">note</th>)";
  out += "</tr></thead><tbody>";
  for (const Detail* d : order) {
    const auto [value, limit] =
        d->limit ? format_pair(d->value, *d->limit) : std::pair(format_number(d->value), "");
    out += fmt::format(
        R"(<tr class="{}"><th scope="row" class="mono">{}</th>)", name(d->status), escape(d->name));
    if (has_metric) out += fmt::format("<td>{}</td>", escape(d->metric));
    out += fmt::format(R"(<td class="n value">{}{}</td>)", value, unit_suffix(d->unit));
    if (has_limit) {
      out += fmt::format(R"(<td class="n">{}</td><td>{}</td>)",
                         d->limit ? limit_sign(c.bound) + limit : "",
                         ratio_bar(as_comparison(*d, c.bound)));
    }
    if (has_floor) {
      out += fmt::format(R"(<td class="n">{}</td>)",
                         d->noise_floor ? format_number(*d->noise_floor) : "");
    }
    out += fmt::format("<td>{}</td>", mark(d->status));
    if (has_note) out += fmt::format("<td>{}</td>", escape(d->note));
    out += "</tr>";
  }
  out += "</tbody></table>";
  if (num_left_out > 0) {
    out += fmt::format(R"(<p class="note">{} more are in report.json.</p>)",
                       format_count(static_cast<int64_t>(num_left_out)));
  }
  return out;
}

/// One line about what the expanded part holds: "4 ranks, 0 to 16; 38 rows, 2 failed".
std::string inner_summary(const Comparison& c) {
  std::string out;
  if (!c.ranks.empty()) {
    double low = NAN, high = NAN;
    for (const RankValue& r : c.ranks) {
      low = std::isnan(low) ? r.value : std::fmin(low, r.value);
      high = std::isnan(high) ? r.value : std::fmax(high, r.value);
    }
    out += fmt::format("{} rank{}", c.ranks.size(), c.ranks.size() == 1 ? "" : "s");
    out += low == high ? fmt::format(", {} on each", format_number(low))
                       : fmt::format(", {} to {}", format_number(low), format_number(high));
  }
  if (!c.details.empty()) {
    const auto failed = std::count_if(c.details.begin(), c.details.end(), is_bad);
    if (!out.empty()) out += "; ";
    out += fmt::format("{} row{}",
                       format_count(static_cast<int64_t>(c.details.size())),
                       c.details.size() == 1 ? "" : "s");
    if (failed > 0) out += fmt::format(", {} failed", failed);
  }
  return out;
}

/// Columns that some row of a table fills; the others would only take its width.
struct Columns {
  bool limit = false, floor = false, rank = false;
  [[nodiscard]] int count() const { return 4 + (limit ? 2 : 0) + (floor ? 1 : 0) + (rank ? 1 : 0); }
};

std::string more_row(const Comparison& c, TableUse use, const Columns& columns) {
  std::string inner;
  const bool has_story =
      c.status == Status::kFail || c.status == Status::kError || c.status == Status::kSkipped;
  // The numbers of the reason are in the row already.
  if (has_story && !c.reason.empty() &&
      !c.reason.starts_with(c.metric + " " + format_number(c.value))) {
    inner += fmt::format(R"(<span class="reason">{}</span>)", escape(c.reason));
  }
  if (!c.first_divergence.empty()) {
    inner += fmt::format(
        R"(<span class="divergence">{}: {}</span>)", first_label(c), escape(c.first_divergence));
  }
  if (!c.worst.empty()) {
    inner += fmt::format(R"(<span class="divergence">worst: {}</span>)", escape(c.worst));
  }
  if (!c.ranks.empty() || !c.details.empty()) {
    const bool is_open = use == TableUse::kOverview && c.status == Status::kFail &&
                         c.ranks.size() + c.details.size() <= kOpenInnerRows;
    inner +=
        fmt::format(R"(<details{}><summary>{}</summary><div class="inner">{}{}</div></details>)",
                    is_open ? " open" : "",
                    inner_summary(c),
                    c.ranks.empty() ? "" : ranks_table(c),
                    c.details.empty() ? "" : details_table(c));
  }
  if (inner.empty()) return "";
  return fmt::format(
      R"(<tr class="more {}"><td class="k-status"></td><td colspan="{}">{}</td></tr>)",
      name(c.status),
      columns.count() - 1,
      inner);
}

std::string comparison_row(const Row& row, TableUse use, const Columns& columns) {
  const Comparison& c = *row.comparison;
  const harness::ScenarioResult& s = *row.scenario;
  // A failure that was asked for is neither good nor bad.
  const bool as_asked = !s.expected.empty() && s.status == Status::kPass &&
                        (c.status == Status::kFail || c.status == Status::kError);
  const Status shown = as_asked ? Status::kRecorded : c.status;
  const bool has_value = c.status != Status::kSkipped && c.status != Status::kError;
  const auto [value, limit] =
      c.limit ? format_pair(c.value, *c.limit) : std::pair(format_number(c.value), "");
  std::string sides = escape(c.left);
  if (!c.right.empty()) sides += (sides.empty() ? "" : " vs ") + escape(c.right);
  if (use == TableUse::kOverview) sides = fmt::format("{}: {}", escape(s.name), sides);
  const double ratio = c.ratio();
  return fmt::format(
      R"(<tr class="{0}"><td class="k-status">{1}</td>)"
      R"(<th scope="row" class="k-what"><span class="what">{2}</span> <span class="metric">{3}</span></th>)"
      R"(<td class="k-sides sides">{4}</td>)"
      R"(<td class="k-value n value" data-key="{5}">{6}</td>)"
      R"(<td class="k-limit n" data-label="limit">{7}</td>)"
      R"(<td class="k-ratio" data-key="{8}">{9}</td>)"
      R"(<td class="k-floor n" data-label="noise">{10}</td>)"
      R"(<td class="k-rank n" data-label="rank">{11}</td></tr>{12})",
      name(shown),
      mark(shown, as_asked ? "as asked" : ""),
      escape(c.what),
      escape(c.metric),
      sides,
      has_value ? key(c.value) : "NaN",
      has_value ? value + unit_suffix(c.unit) : "",
      c.limit ? limit_sign(c.bound) + limit : "",
      has_value && (c.limit || std::isnan(c.value)) ? key(ratio) : "NaN",
      has_value ? ratio_bar(c) : "",
      c.noise_floor ? format_number(*c.noise_floor) : "",
      c.rank ? fmt::format("{}", *c.rank) : "",
      more_row(c, use, columns));
}

}  // namespace

std::string mark(Status status, std::string_view word) {
  return fmt::format(
      R"(<span class="mark {0}"><svg viewBox="0 0 10 10" aria-hidden="true"><use href="#g-{0}"/></svg>{1}</span>)",
      name(status),
      word.empty() ? name(status) : word);
}

std::string ratio_bar(const Comparison& c) {
  if (!c.limit) return "";
  const auto place = [](double ratio) {
    return ratio <= 0 ? 0 : std::clamp((std::log10(ratio) + 4) / 6, 0.0, 1.0) * 100;
  };
  const double ratio = c.ratio();
  std::string noise;
  if (c.noise_floor && *c.limit > 0 && c.bound == harness::Bound::kAtMost) {
    noise = fmt::format(R"(<b style="--f:{:.1f}%"></b>)", place(*c.noise_floor / *c.limit));
  }
  const bool is_off = std::isnan(ratio) || std::isinf(ratio);
  return fmt::format(
      R"(<span class="ratio"><span class="bar{}" aria-hidden="true"><i style="--v:{:.1f}%"></i>{}</span><span>{}</span></span>)",
      is_off          ? " off"
      : *c.limit == 0 ? " nil"
                      : "",
      is_off ? 100 : place(ratio),
      noise,
      escape(format_ratio(c)));
}

std::string comparison_table(const std::vector<Row>& rows, TableUse use, std::string_view caption) {
  Columns columns;
  for (const Row& row : rows) {
    columns.limit = columns.limit || row.comparison->limit.has_value();
    columns.floor = columns.floor || row.comparison->noise_floor.has_value();
    columns.rank = columns.rank || row.comparison->rank.has_value();
  }
  std::string out = fmt::format(
      R"(<table class="compare sortable{}{}{}"><caption class="visually-hidden">{}</caption><thead><tr>)"
      R"(<th scope="col" class="k-status" data-sort="text">Status</th>)"
      R"(<th scope="col" class="k-what" data-sort="text">What</th>)"
      R"(<th scope="col" class="k-sides" data-sort="text">{}</th>)"
      R"(<th scope="col" class="k-value n" data-sort="number">Value</th>)"
      R"(<th scope="col" class="k-limit n">Limit</th>)"
      R"(<th scope="col" class="k-ratio" data-sort="number">Value / limit)"
      R"(<span class="scale" aria-hidden="true"><span style="left:0">10⁻⁴</span><span style="left:33.3%">10⁻²</span>)"
      R"(<span style="left:66.7%">1</span><span style="left:100%">10²</span></span></th>)"
      R"(<th scope="col" class="k-floor n">Noise floor</th>)"
      R"(<th scope="col" class="k-rank n">Rank</th></tr></thead><tbody>)",
      columns.limit ? "" : " no-limit",
      columns.floor ? "" : " no-floor",
      columns.rank ? "" : " no-rank",
      escape(caption),
      use == TableUse::kOverview ? "Scenario and sides" : "Sides");
  for (const Row& row : rows) out += comparison_row(row, use, columns) + "\n";
  return out + "</tbody></table>\n";
}

}  // namespace lockstep::reports
