// The four forms of a report. Each is a pure function of the Report; write() puts them on disk.
#pragma once

#include <filesystem>
#include <string>

#include "harness/result/result.hpp"

namespace lockstep::reports {

/// One self-contained page: no external resource, complete without its script.
std::string render_html(const harness::Report& report);

/// One test suite per scenario, one test case per comparison. A scenario that ended without
/// comparisons, or whose failure was asked for, is one case of its own.
std::string render_junit(const harness::Report& report);

/// Verdict, what differs, one row per scenario; at most a few hundred lines, for a CI summary.
std::string render_markdown(const harness::Report& report);

/// Writes report.json, report.html, junit.xml and summary.md into `folder`, which is made if
/// needed. All four are written under temporary names first and then renamed, so that a reader
/// never sees half a file and a failure leaves what was there before. Throws kInput naming the
/// path, the system's reason and what to change.
void write(const harness::Report& report, const std::filesystem::path& folder);

/// Renders the three other files again from folder/report.json, which stays as it is. Throws kInput
/// when it is missing, damaged or from a newer version. Returns what it read.
harness::Report rebuild(const std::filesystem::path& folder);

}  // namespace lockstep::reports
