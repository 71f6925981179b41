// What may stand in a scenario file. One table of keys drives parsing, error messages, the
// published schema (`lockstep list schema`) and docs/scenarios.md.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "model/base/did_you_mean.hpp"

namespace lockstep::harness {

enum class KeyType : uint8_t {
  kText,
  kTexts,         ///< array of strings
  kInteger,       ///< whole number
  kIntegers,      ///< array of whole numbers
  kNumber,        ///< whole or decimal number
  kNumberOrText,  ///< a number, or a word such as "golden"
  kFlag,          ///< true or false
  kTable,         ///< table of scalars, such as { cp = 2 }
  kAny,           ///< any value, only for tables whose keys are free
};

std::string_view name(KeyType type) noexcept;

struct KeyInfo {
  std::string_view table;  ///< "" (top level), "model", "data", "run.NAME", "compare", ...
  std::string_view name;   ///< key inside the table
  KeyType type;
  std::string_view fallback;  ///< value when absent, as written in TOML; "" : none; "required"
  std::string_view unit;      ///< "" when it has none
  std::string_view doc;
};

/// Every key, tables in the order in which they are documented.
std::vector<KeyInfo> scenario_keys();

/// The schema for people (aligned columns), for docs/scenarios.md, and for programs.
std::string schema_text();
std::string schema_markdown();
std::string schema_json();

/// What a compare may look at and how it may be measured, with the unit and the good side.
struct MetricInfo {
  std::string_view name, unit, doc;
  bool at_least;  ///< good values are large ones
  std::string_view
      fits;  ///< subjects it makes sense for, separated by spaces: "logits logprobs ..."
};
const std::vector<MetricInfo>& metrics();
/// The metric of expert and pool choices, which are whole numbers; no other measures them, and it
/// measures nothing else.
inline constexpr std::string_view kSameChoice = "same_choice";
/// Null when there is no such metric.
const MetricInfo* find_metric(std::string_view name) noexcept;

}  // namespace lockstep::harness
