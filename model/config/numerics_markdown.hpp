// The switch table as documentation.
#pragma once

#include <string>

namespace lockstep::model {

/// Markdown table of all switches: id, name, site, values, and the value of each policy family.
/// docs/numerics.md holds exactly this text between its markers; a test compares them.
std::string switches_markdown();

}  // namespace lockstep::model
