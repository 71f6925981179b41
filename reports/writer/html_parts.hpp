// Pieces of the page. Each returns HTML in which every text from outside is escaped.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "harness/result/result.hpp"

namespace lockstep::reports {

/// A comparison and the scenario it belongs to.
struct Row {
  const harness::ScenarioResult* scenario = nullptr;
  const harness::Comparison* comparison = nullptr;
};

/// The sign and word of a status: "pass", or `word` when given.
std::string mark(harness::Status status, std::string_view word = "");

/// Bar on a logarithmic scale from 1e-4 to 1e2 times the limit, with a line at the limit and a
/// dashed one at the noise floor, and the ratio in words. Without a limit: nothing.
std::string ratio_bar(const harness::Comparison& comparison);

/// Table of comparisons: value, limit, their ratio, noise floor, status; below each what is known
/// about the difference, the ranks and the rows underneath. In an overview each row names its
/// scenario and failures stand expanded.
enum class TableUse { kOverview, kScenario };
std::string comparison_table(const std::vector<Row>& rows, TableUse use, std::string_view caption);

/// One expandable scenario: head line, comparisons, charts.
std::string scenario_block(const harness::ScenarioResult& scenario,
                           const std::string& id,
                           bool is_open);

std::string runs_table(const harness::Report& report);
std::string environment_list(const harness::Report& report);

/// What a scenario that stopped, failed as a whole or was skipped has to say; empty if nothing.
std::string scenario_message(const harness::ScenarioResult& scenario, bool names_scenario);

/// Comparisons that count as differing: failed or in error, unless that was asked for.
std::vector<Row> differing_rows(const harness::Report& report);

/// Anchors "s1", "s2", ... of scenarios in the order of the report.
std::string scenario_id(const harness::Report& report, const harness::ScenarioResult& scenario);

}  // namespace lockstep::reports
