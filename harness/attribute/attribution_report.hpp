// An attribution for people, programs and the report page.
#pragma once

#include <string>

#include "harness/attribute/attribute.hpp"
#include "harness/result/result.hpp"

namespace lockstep::harness {

/// A ranked table.
std::string text_of(const Attribution& all);
std::string text_of(const Explanation& found);

/// Every number of every seed; NaN and infinities as strings.
std::string json_of(const Attribution& all);
std::string json_of(const Explanation& found);

/// Comparisons "whole" and "same" with a detail for each switch, and charts: cost by rank and error
/// by layer. `name` is that of the scenario.
ScenarioResult result_of(const Attribution& all, const std::string& name);

}  // namespace lockstep::harness
