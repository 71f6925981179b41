// JSON as text.
#pragma once

#include <string>

namespace lockstep::harness {

/// Bytes that are not UTF-8, of a file name or of a file that is quoted in an error, become U+FFFD;
/// the library would throw.
template <typename Json>
std::string json_text(const Json& json, int indent = 2) {
  return json.dump(indent, ' ', false, Json::error_handler_t::replace);
}

}  // namespace lockstep::harness
