#include "harness/result/result.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

namespace lockstep::harness {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::string plural(int64_t count, std::string_view noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

/// The error class whose exit code is higher; an unset one loses.
std::optional<ErrorKind> more_severe(std::optional<ErrorKind> left,
                                     std::optional<ErrorKind> right) {
  if (!left) return right;
  if (!right) return left;
  return lockstep::exit_code(*right) > lockstep::exit_code(*left) ? right : left;
}

void add(Counts& counts, Status status) {
  switch (status) {
    case Status::kPass:
      ++counts.pass;
      break;
    case Status::kFail:
      ++counts.fail;
      break;
    case Status::kSkipped:
      ++counts.skipped;
      break;
    case Status::kError:
      ++counts.error;
      break;
    case Status::kRecorded:
      ++counts.recorded;
      break;
  }
}

std::string pair_text(const Worst& worst) {
  const Comparison& c = *worst.comparison;
  return fmt::format("{} of {} and {} in {}", c.what, c.left, c.right, worst.scenario->name);
}

std::string numbers_text(const Comparison& c) {
  std::string unit = c.unit.empty() || c.unit == "1" ? "" : " " + c.unit;
  if (!c.limit) return fmt::format("{} {}{}", c.metric, format_number(c.value), unit);
  std::string value = format_number(c.value), limit = format_number(*c.limit);
  for (int digits = 4; value == limit && c.value != *c.limit && digits <= 17; ++digits) {
    value = format_number(c.value, digits);
    limit = format_number(*c.limit, digits);
  }
  return fmt::format("{} {}{} where at {} {} is allowed",
                     c.metric,
                     value,
                     unit,
                     c.bound == Bound::kAtMost ? "most" : "least",
                     limit);
}

std::string skipped_text(const Counts& scenarios, const Counts& comparisons) {
  if (scenarios.skipped > 0) {
    return fmt::format("; {} {} skipped",
                       plural(scenarios.skipped, "scenario"),
                       scenarios.skipped == 1 ? "was" : "were");
  }
  if (comparisons.skipped > 0) {
    return fmt::format("; {} {} skipped",
                       plural(comparisons.skipped, "comparison"),
                       comparisons.skipped == 1 ? "was" : "were");
  }
  return "";
}

/// Rows of the table that no limit judges, so that its rows add up.
std::string recorded_text(const Counts& comparisons) {
  if (comparisons.recorded == 0) return "";
  return fmt::format("; {} without a limit {} recorded",
                     plural(comparisons.recorded, "comparison"),
                     comparisons.recorded == 1 ? "is" : "are");
}

std::string stopped_text(const Report& report, int64_t errors) {
  const ScenarioResult* worst = nullptr;
  for (const ScenarioResult& s : report.scenarios) {
    if (s.status != Status::kError) continue;
    if (worst == nullptr || exit_code(s) > exit_code(*worst)) worst = &s;
  }
  std::string text = fmt::format("{} of {} could not be finished",
                                 errors,
                                 plural(static_cast<int64_t>(report.scenarios.size()), "scenario"));
  if (worst == nullptr) return text;
  return fmt::format("{}{}{} stopped in phase {} ({} error)",
                     text,
                     errors == 1 ? ": " : "; first ",
                     worst->name,
                     name(worst->phase),
                     kind_name(worst->error_kind.value_or(ErrorKind::kInternal)));
}

/// Failures before passes, then by ratio; a NaN value is worse than any number.
bool is_worse(const Comparison& left, const Comparison& right) {
  const bool left_fails = left.status == Status::kFail, right_fails = right.status == Status::kFail;
  if (left_fails != right_fails) return left_fails;
  const bool left_nan = std::isnan(left.value), right_nan = std::isnan(right.value);
  if (left_nan || right_nan) return left_nan && !right_nan;
  return left.ratio() > right.ratio();
}

std::string trimmed(std::string digits) {
  if (digits.find('.') == std::string::npos) return digits;
  while (digits.back() == '0') digits.pop_back();
  if (digits.back() == '.') digits.pop_back();
  return digits;
}

}  // namespace

std::string_view name(Status status) noexcept {
  switch (status) {
    case Status::kPass:
      return "pass";
    case Status::kFail:
      return "fail";
    case Status::kSkipped:
      return "skipped";
    case Status::kError:
      return "error";
    case Status::kRecorded:
      return "recorded";
  }
  return "error";
}

std::string_view name(Phase phase) noexcept {
  switch (phase) {
    case Phase::kLoad:
      return "load";
    case Phase::kSetup:
      return "setup";
    case Phase::kRun:
      return "run";
    case Phase::kCompare:
      return "compare";
    case Phase::kRecord:
      return "record";
  }
  return "record";
}

std::string_view name(Bound bound) noexcept {
  return bound == Bound::kAtMost ? "at_most" : "at_least";
}

std::string_view name(ChartKind kind) noexcept {
  switch (kind) {
    case ChartKind::kLayer:
      return "layer";
    case ChartKind::kToken:
      return "token";
    case ChartKind::kSweep:
      return "sweep";
    case ChartKind::kTiming:
      return "timing";
    case ChartKind::kHistogram:
      return "histogram";
    case ChartKind::kOther:
      return "other";
  }
  return "other";
}

double Comparison::ratio() const {
  if (!limit || std::isnan(value) || std::isnan(*limit)) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  const auto ratio_of = [](double part, double whole) {
    if (whole <= 0) return part <= whole ? 0 : kInfinity;
    return std::max(0.0, part / whole);
  };
  if (bound == Bound::kAtMost) return ratio_of(value, *limit);
  if (*limit <= 1) return ratio_of(1 - value, 1 - *limit);
  return value <= 0 ? kInfinity : *limit / value;
}

void judge(Comparison& comparison) {
  Comparison& c = comparison;
  c.status = c.limit ? Status::kPass : Status::kRecorded;
  if (std::isnan(c.value) || (c.limit && std::isnan(*c.limit))) {
    c.status = Status::kFail;
    if (c.reason.empty()) {
      c.reason = std::isnan(c.value) ? "the value is not a number" : "the limit is not a number";
    }
    return;
  }
  if (c.limit && (c.bound == Bound::kAtMost ? c.value > *c.limit : c.value < *c.limit)) {
    c.status = Status::kFail;
    if (c.reason.empty()) c.reason = numbers_text(c);
    return;
  }
  const auto failed = std::count_if(c.details.begin(), c.details.end(), [](const Detail& detail) {
    return detail.status == Status::kFail || detail.status == Status::kError;
  });
  if (failed > 0) {
    c.status = Status::kFail;
    if (c.reason.empty()) {
      c.reason = fmt::format("{} of its {} rows failed", failed, c.details.size());
    }
  }
}

void conclude(ScenarioResult& scenario) {
  ScenarioResult& s = scenario;
  if (s.status == Status::kSkipped && s.reason.empty()) s.reason = "no reason was given";
  if (s.status == Status::kError && !s.error_kind) s.error_kind = ErrorKind::kInternal;
  if (!s.expected.empty()) return;

  Counts counts;
  std::optional<ErrorKind> kind = s.error_kind;
  std::string failed, stopped, skipped;
  const auto keep_first = [](std::string& text, const std::string& reason) {
    if (text.empty()) text = reason;
  };
  for (const Comparison& c : s.comparisons) {
    add(counts, c.status);
    if (c.status == Status::kFail) {
      keep_first(failed, fmt::format("{} of {} and {}: {}", c.what, c.left, c.right, c.reason));
    } else if (c.status == Status::kError) {
      kind = more_severe(kind, c.error_kind.value_or(ErrorKind::kInternal));
      keep_first(stopped, fmt::format("{} of {} and {}: {}", c.what, c.left, c.right, c.reason));
    } else if (c.status == Status::kSkipped) {
      keep_first(skipped, c.reason);
    }
  }
  for (const RunRecord& r : s.runs) {
    if (r.status == Status::kFail || r.status == Status::kError) {
      add(counts, r.status);
      keep_first(r.status == Status::kFail ? failed : stopped,
                 fmt::format("run {}: {}", r.name, r.reason));
    } else if (r.status == Status::kSkipped) {
      add(counts, r.status);
      keep_first(skipped, r.reason);
    }
  }

  // Where it went wrong, unless the runner knows better.
  const bool run_failed = std::any_of(s.runs.begin(), s.runs.end(), [](const RunRecord& r) {
    return r.status == Status::kFail || r.status == Status::kError;
  });
  if (s.phase == Phase::kRecord && counts.fail + counts.error > 0) {
    s.phase = run_failed ? Phase::kRun : Phase::kCompare;
  }

  if (s.status == Status::kError || counts.error > 0) {
    s.status = Status::kError;
    s.error_kind = kind.value_or(ErrorKind::kInternal);
    keep_first(s.reason, stopped);
  } else if (s.status == Status::kFail || counts.fail > 0) {
    s.status = Status::kFail;
    keep_first(s.reason, failed);
  } else if (s.status == Status::kSkipped) {
    return;
  } else if (counts.pass > 0) {
    s.status = Status::kPass;
  } else if (counts.skipped > 0 && counts.recorded == 0) {
    s.status = Status::kSkipped;
    keep_first(s.reason, skipped.empty() ? "no reason was given" : skipped);
  } else {
    s.status = Status::kRecorded;
  }
}

int exit_code(const ScenarioResult& scenario) {
  if (scenario.status == Status::kFail) return 1;
  if (scenario.status != Status::kError) return 0;
  return lockstep::exit_code(scenario.error_kind.value_or(ErrorKind::kInternal));
}

int exit_code(const Report& report) {
  int code = 0;
  for (const ScenarioResult& s : report.scenarios) code = std::max(code, exit_code(s));
  return code;
}

void conclude(Report& report) {
  for (ScenarioResult& s : report.scenarios) conclude(s);
  const Counts counts = count_scenarios(report);
  if (counts.error > 0) {
    report.status = Status::kError;
  } else if (counts.fail > 0) {
    report.status = Status::kFail;
  } else if (counts.pass > 0) {
    report.status = Status::kPass;
  } else {
    report.status = counts.recorded > 0 ? Status::kRecorded : Status::kSkipped;
  }
  report.exit_code = exit_code(report);
  report.verdict = verdict_sentence(report);
}

Counts count_scenarios(const Report& report) {
  Counts counts;
  for (const ScenarioResult& s : report.scenarios) add(counts, s.status);
  return counts;
}

Counts count_comparisons(const Report& report) {
  Counts counts;
  for (const ScenarioResult& s : report.scenarios) {
    for (const Comparison& c : s.comparisons) {
      const bool failed = c.status == Status::kFail || c.status == Status::kError;
      if (failed && !s.expected.empty() && s.status == Status::kPass) {
        ++counts.expected;
      } else {
        add(counts, c.status);
      }
    }
  }
  return counts;
}

const Comparison* worst_comparison(const ScenarioResult& scenario) {
  const Comparison* worst = nullptr;
  for (const Comparison& c : scenario.comparisons) {
    if (c.status != Status::kPass && c.status != Status::kFail) continue;
    if (worst == nullptr || is_worse(c, *worst)) worst = &c;
  }
  return worst;
}

Worst worst_comparison(const Report& report) {
  Worst worst;
  for (const ScenarioResult& s : report.scenarios) {
    const Comparison* c = s.expected.empty() ? worst_comparison(s) : nullptr;
    if (c == nullptr) continue;
    if (worst.comparison == nullptr || is_worse(*c, *worst.comparison)) worst = {&s, c};
  }
  return worst;
}

std::string verdict_sentence(const Report& report) {
  const Counts scenarios = count_scenarios(report);
  const Counts comparisons = count_comparisons(report);
  const Worst worst = worst_comparison(report);
  const std::string skipped = skipped_text(scenarios, comparisons);
  if (report.scenarios.empty()) return "Nothing was run: there is no scenario in this report.";

  std::string text;
  if (comparisons.fail > 0) {
    const int64_t judged = comparisons.pass + comparisons.fail;
    text = fmt::format("Numerics differ: {} of {} {} limits",
                       comparisons.fail,
                       plural(judged, "comparison"),
                       comparisons.fail == 1 ? "misses its" : "miss their");
    if (worst.comparison != nullptr && worst.comparison->status == Status::kFail) {
      text += fmt::format("{}{} ({})",
                          comparisons.fail == 1 ? ": " : "; the worst is ",
                          pair_text(worst),
                          numbers_text(*worst.comparison));
    }
    text += recorded_text(comparisons);
    if (scenarios.error > 0) text += "; " + stopped_text(report, scenarios.error);
  } else if (scenarios.error > 0) {
    text = stopped_text(report, scenarios.error);
  } else if (scenarios.fail > 0) {
    text = fmt::format("{} of {} failed",
                       scenarios.fail,
                       plural(static_cast<int64_t>(report.scenarios.size()), "scenario"));
    for (const ScenarioResult& s : report.scenarios) {
      if (s.status != Status::kFail) continue;
      text += fmt::format(": {}", s.name);
      if (!s.expected.empty()) text += fmt::format(" should have ended with {}", s.expected);
      break;
    }
  } else if (comparisons.pass > 0) {
    text = comparisons.pass == 1 ? "The one comparison is within its limit"
                                 : fmt::format("All {} comparisons in {} are within their limits",
                                               comparisons.pass,
                                               plural(scenarios.pass, "scenario"));
    if (worst.comparison != nullptr && worst.comparison->ratio() > 0) {
      text += fmt::format(", the closest at {} of its limit ({}, {})",
                          format_percent(worst.comparison->ratio()),
                          worst.comparison->metric,
                          pair_text(worst));
    } else if (worst.comparison != nullptr) {
      text += ", and every difference is zero";
    }
    text += recorded_text(comparisons);
  } else if (scenarios.pass > 0) {
    text = scenarios.pass == 1 ? "The one scenario passed"
                               : fmt::format("All {} scenarios passed", scenarios.pass);
  } else if (scenarios.recorded > 0) {
    text = fmt::format("Nothing was judged: {} only recorded values",
                       plural(scenarios.recorded, "scenario"));
  } else {
    return fmt::format("Nothing was judged: {} {} skipped.",
                       plural(scenarios.skipped, "scenario"),
                       scenarios.skipped == 1 ? "was" : "were");
  }
  return text + skipped + ".";
}

std::string format_number(double value, int digits) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  if (value == 0) return "0";
  const double size = std::abs(value);
  if (size == std::floor(size) && size < 1e7) return fmt::format("{:.0f}", value);
  // Close below one (cosines, agreement): the digits that tell it from one.
  if (size < 1 && size >= 0.99) {
    const double gap = 1 - size;
    const int places = static_cast<int>(std::ceil(-std::log10(gap))) + digits - 2;
    return trimmed(fmt::format("{:.{}f}", value, std::clamp(places, 2, 17)));
  }
  if (size >= 1e-3 && size < 1e5) {
    const int whole = static_cast<int>(std::floor(std::log10(size))) + 1;
    return trimmed(fmt::format("{:.{}f}", value, std::max(0, digits - whole)));
  }
  std::string text = fmt::format("{:.{}e}", value, digits - 1);
  const size_t at = text.find('e');
  const int exponent = std::stoi(text.substr(at + 1));
  return fmt::format("{}e{}", trimmed(text.substr(0, at)), exponent);
}

std::string format_percent(double ratio) {
  if (std::isnan(ratio)) return "NaN";
  const double percent = ratio * 100;
  if (percent > 0 && percent < 0.1) return "less than 0.1%";
  // 99.96% must not read as 100%: that would be at the limit.
  if (ratio < 1 && percent > 99) return "over 99%";
  return percent < 10 ? fmt::format("{:.1f}%", percent) : fmt::format("{:.0f}%", percent);
}

}  // namespace lockstep::harness
