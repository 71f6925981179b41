#include <cmath>
#include <vector>

#include "reports/writer/text.hpp"
#include "reports/writer/writer.hpp"

namespace lockstep::reports {
namespace {

using harness::Comparison;
using harness::Report;
using harness::ScenarioResult;
using harness::Status;

struct Case {
  std::string name;
  Status status = Status::kPass;
  std::string message;  ///< one line
  std::string body;     ///< the rest
  double seconds = 0;
  ErrorKind kind = ErrorKind::kInternal;  ///< for kError
  bool is_whole = false;                  ///< about the scenario, not one comparison
};

std::string body_of(const Comparison& c) {
  std::string body = fmt::format("{} {}", c.metric, harness::format_number(c.value, 6));
  if (c.limit) {
    body += fmt::format(", limit at {} {}",
                        c.bound == harness::Bound::kAtMost ? "most" : "least",
                        harness::format_number(*c.limit, 6));
  }
  if (c.noise_floor) {
    body += fmt::format(", noise floor {}", harness::format_number(*c.noise_floor, 6));
  }
  if (!c.unit.empty()) body += fmt::format(" ({})", c.unit);
  if (c.rank) body += fmt::format("\nworst on world rank {}", *c.rank);
  if (!c.first_divergence.empty())
    body += fmt::format("\n{}: {}", first_label(c), c.first_divergence);
  if (!c.worst.empty()) body += "\nworst: " + c.worst;
  return body;
}

Case case_of(const Comparison& c) {
  const std::string pair = pair_of(c);
  return {pair.empty() ? subject_of(c) : fmt::format("{}: {}", subject_of(c), pair),
          c.status,
          c.reason,
          body_of(c),
          0,
          c.error_kind.value_or(ErrorKind::kInternal),
          false};
}

std::vector<Case> cases_of(const ScenarioResult& s) {
  std::vector<Case> cases;
  if (s.expected.empty()) {
    bool explains_status = s.status == Status::kPass || s.status == Status::kRecorded;
    for (const Comparison& c : s.comparisons) {
      cases.push_back(case_of(c));
      explains_status = explains_status || c.status == s.status;
    }
    if (explains_status && !cases.empty()) return cases;
  }
  // The scenario as a whole: asked to fail, without comparisons, or ended otherwise than they say.
  Case whole{s.expected.empty() ? s.name : fmt::format("{} ends with {}", s.name, s.expected),
             s.status,
             s.reason,
             fmt::format("phase {}", name(s.phase)),
             s.seconds,
             s.error_kind.value_or(ErrorKind::kInternal),
             true};
  for (const Comparison& c : s.comparisons) {
    if (!s.expected.empty()) whole.body += fmt::format("\n{}: {}", subject_of(c), body_of(c));
  }
  cases.insert(cases.begin(), whole);
  return cases;
}

void write_case(std::string& out, const ScenarioResult& s, const Case& c) {
  out += fmt::format(R"(    <testcase classname="{}" name="{}" time="{:.3f}")",
                     escape(s.name),
                     escape(c.name),
                     c.seconds);
  const std::string message = escape(c.message.empty() ? "no reason was given" : c.message);
  switch (c.status) {
    case Status::kPass:
      out += "/>\n";
      return;
    case Status::kFail:
      out += fmt::format(">\n      <failure type=\"{}\" message=\"{}\">{}</failure>\n",
                         c.is_whole ? "scenario" : "numerics",
                         message,
                         escape(c.body));
      break;
    case Status::kError:
      out += fmt::format(">\n      <error type=\"{}\" message=\"{}\">{}</error>\n",
                         kind_name(c.kind),
                         message,
                         escape(c.body));
      break;
    case Status::kSkipped:
      out += fmt::format(">\n      <skipped message=\"{}\"/>\n", message);
      break;
    case Status::kRecorded:
      out += fmt::format(">\n      <system-out>recorded, not judged: {}</system-out>\n",
                         escape(c.body));
      break;
  }
  out += "    </testcase>\n";
}

double seconds_of(double seconds) { return std::isfinite(seconds) ? seconds : 0; }

}  // namespace

std::string render_junit(const Report& report) {
  int64_t tests = 0, failures = 0, errors = 0, skipped = 0;
  std::string suites;
  for (const ScenarioResult& s : report.scenarios) {
    int64_t suite_failures = 0, suite_errors = 0, suite_skipped = 0;
    const std::vector<Case> cases = cases_of(s);
    for (const Case& c : cases) {
      suite_failures += c.status == Status::kFail ? 1 : 0;
      suite_errors += c.status == Status::kError ? 1 : 0;
      suite_skipped += c.status == Status::kSkipped ? 1 : 0;
    }
    suites += fmt::format(
        R"(  <testsuite name="{}" tests="{}" failures="{}" errors="{}" skipped="{}" time="{:.3f}" timestamp="{}">)"
        "\n",
        escape(s.name),
        cases.size(),
        suite_failures,
        suite_errors,
        suite_skipped,
        seconds_of(s.seconds),
        escape(report.started));
    suites += "    <properties>\n";
    const auto property = [&](std::string_view key, std::string_view value) {
      if (value.empty()) return;
      suites +=
          fmt::format("      <property name=\"{}\" value=\"{}\"/>\n", escape(key), escape(value));
    };
    property("description", s.description);
    property("file", s.file);
    for (const std::string& tag : s.tags) property("tag", tag);
    property("phase", name(s.phase));
    property("commit", report.environment.git_commit);
    property("torch", report.environment.torch);
    suites += "    </properties>\n";
    for (const Case& c : cases) write_case(suites, s, c);
    suites += "  </testsuite>\n";
    tests += static_cast<int64_t>(cases.size());
    failures += suite_failures;
    errors += suite_errors;
    skipped += suite_skipped;
  }
  return fmt::format(
      "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n"
      R"(<testsuites name="{}" tests="{}" failures="{}" errors="{}" skipped="{}" time="{:.3f}">)"
      "\n{}</testsuites>\n",
      escape(report.title.empty() ? "lockstep" : report.title),
      tests,
      failures,
      errors,
      skipped,
      seconds_of(report.seconds),
      suites);
}

}  // namespace lockstep::reports
