// JSON as text.
#pragma once

#include <cmath>
#include <string>

namespace lockstep::harness {

/// Bytes that are not UTF-8, of a file name or of a file that is quoted in an error, become U+FFFD;
/// the library would throw.
template <typename Json>
std::string json_text(const Json& json, int indent = 2) {
  return json.dump(indent, ' ', false, Json::error_handler_t::replace);
}

/// JSON has no literal for what is not finite; words tell the three apart.
template <typename Json>
Json json_number(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return value;
}

}  // namespace lockstep::harness
