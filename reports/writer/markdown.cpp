#include <algorithm>
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

constexpr size_t kMaxFailingRows = 50, kMaxScenarioRows = 200;

std::string limit_text(const Comparison& c) {
  if (!c.limit) return "";
  return fmt::format("{} {}",
                     c.bound == harness::Bound::kAtMost ? "&lt;=" : "&gt;=",
                     format_pair(c.value, *c.limit).second);
}

std::string value_text(const Comparison& c) {
  const std::string value =
      c.limit ? format_pair(c.value, *c.limit).first : harness::format_number(c.value);
  return c.unit.empty() ? value : value + " " + escape_markdown(c.unit);
}

void write_failures(std::string& out, const Report& report) {
  size_t rows = 0, failing = 0;
  std::string table;
  for (const ScenarioResult& s : report.scenarios) {
    if (!s.expected.empty() && s.status == Status::kPass) continue;
    for (const Comparison& c : s.comparisons) {
      if (c.status != Status::kFail && c.status != Status::kError) continue;
      ++failing;
      if (rows == kMaxFailingRows) continue;
      ++rows;
      const std::string where = c.first_divergence.empty() ? c.reason : c.first_divergence;
      table += fmt::format("| {} | {} | {} | {} | {} | {} | {} |\n",
                           escape_markdown(s.name),
                           escape_markdown(c.what),
                           escape_markdown(pair_of(c)),
                           escape_markdown(c.metric),
                           c.status == Status::kError ? "error" : value_text(c),
                           limit_text(c),
                           escape_markdown(where));
    }
  }
  if (failing == 0) return;
  out +=
      "\n### What differs\n\n| scenario | what | between | metric | value | limit | first "
      "divergence |\n"
      "|---|---|---|---|--:|--:|---|\n" +
      table;
  if (failing > rows) {
    out += fmt::format("\n{} more are in report.html and report.json.\n", failing - rows);
  }
}

void write_endings(std::string& out, const Report& report) {
  std::string list;
  size_t rows = 0;
  for (const ScenarioResult& s : report.scenarios) {
    const bool whole_failed = s.status == Status::kFail && s.comparisons.empty();
    if (s.status != Status::kError && s.status != Status::kSkipped && !whole_failed) continue;
    if (++rows > kMaxFailingRows) continue;
    list += fmt::format("- **{}** {} in phase {}: {}\n",
                        escape_markdown(s.name),
                        s.status == Status::kSkipped ? "was skipped"
                        : s.status == Status::kError ? "stopped"
                                                     : "failed",
                        name(s.phase),
                        escape_markdown(s.reason.empty() ? "no reason was given" : s.reason));
  }
  if (rows == 0) return;
  out += "\n### Stopped or skipped\n\n" + list;
  if (rows > kMaxFailingRows) {
    out += fmt::format("- and {} more, in report.html\n", rows - kMaxFailingRows);
  }
}

void write_scenarios(std::string& out, const Report& report) {
  out +=
      "\n### Scenarios\n\n| scenario | status | comparisons | nearest its limit | value | limit | "
      "time |\n"
      "|---|---|--:|---|--:|--:|--:|\n";
  std::vector<const ScenarioResult*> order;
  for (const ScenarioResult& s : report.scenarios) order.push_back(&s);
  std::stable_sort(order.begin(), order.end(), [](const auto* left, const auto* right) {
    return exit_code(*left) > exit_code(*right);
  });
  size_t rows = 0;
  for (const ScenarioResult* s : order) {
    if (++rows > kMaxScenarioRows) {
      out += fmt::format("\n{} more are in report.html.\n", order.size() - kMaxScenarioRows);
      break;
    }
    const Comparison* worst = harness::worst_comparison(*s);
    const bool as_asked = !s->expected.empty() && s->status == Status::kPass;
    out += fmt::format("| {} | {}{} | {} | {} | {} | {} | {} |\n",
                       escape_markdown(s->name),
                       name(s->status),
                       as_asked ? " (failed as asked)" : "",
                       s->comparisons.size(),
                       worst == nullptr ? "" : escape_markdown(subject_of(*worst)),
                       worst == nullptr ? "" : value_text(*worst),
                       worst == nullptr ? "" : limit_text(*worst),
                       s->seconds > 0 ? format_seconds(s->seconds) : "");
  }
}

}  // namespace

std::string render_markdown(const Report& report) {
  std::string out = fmt::format("## {}: {}\n\n{}\n\n",
                                escape_markdown(report.title.empty() ? "Lockstep" : report.title),
                                headline(report),
                                escape_markdown(sentence_below(report)));
  const harness::Environment& e = report.environment;
  out += fmt::format("Exit code {}, {}", report.exit_code, format_seconds(report.seconds));
  if (!report.started.empty()) out += fmt::format(", started {}", escape_markdown(report.started));
  if (!e.git_commit.empty()) out += fmt::format(", commit {}", escape_markdown(e.git_commit));
  if (!e.torch.empty()) out += fmt::format(", torch {}", escape_markdown(e.torch));
  if (!e.cpu_model.empty()) out += fmt::format(", {}", escape_markdown(e.cpu_model));
  out += ".\n";
  write_failures(out, report);
  write_endings(out, report);
  if (!report.scenarios.empty()) write_scenarios(out, report);
  if (!report.command.empty()) {
    // Indented, not fenced: a command may hold backticks.
    std::string command = report.command;
    std::replace(command.begin(), command.end(), '\n', ' ');
    out += "\nTo repeat:\n\n    " + command + "\n";
  }
  return out;
}

}  // namespace lockstep::reports
