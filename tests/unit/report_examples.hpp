// Reports as a run would produce them, for the tests of results and reports. To look at them:
//   LOCKSTEP_REPORT_EXAMPLES=/tmp/reports build/release/unit_tests
//   --gtest_filter='ReportWriter.EveryExample*'
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "harness/result/result.hpp"

namespace lockstep::harness {

Report example_pass();
Report example_fail();
/// Every status, an error before any run, a failure that was asked for, awkward series and names.
Report example_mixed();
/// Thousands of comparisons in hundreds of scenarios, 131072 token positions, 64 ranks.
Report example_huge();
Report example_skipped();
Report example_empty();

/// All of them with a name each.
std::vector<std::pair<std::string, Report>> all_examples();

}  // namespace lockstep::harness
