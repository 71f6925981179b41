#include "model/config/json_text.hpp"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "model/base/error.hpp"

namespace lockstep::model {
namespace {

/// Position just past the JSON string that starts at `at`. The text is valid JSON.
size_t skip_string(std::string_view text, size_t at) {
  for (++at; text[at] != '"'; ++at) {
    if (text[at] == '\\') ++at;
  }
  return at + 1;
}

/// Position just past the JSON value that starts at `at`.
size_t skip_value(std::string_view text, size_t at) {
  if (text[at] == '"') return skip_string(text, at);
  if (text[at] != '{' && text[at] != '[') {
    return std::min(text.find_first_of(",]} \t\r\n", at), text.size());
  }
  int depth = 0;
  do {
    if (text[at] == '"') {
      at = skip_string(text, at);
      continue;
    }
    if (text[at] == '{' || text[at] == '[') ++depth;
    if (text[at] == '}' || text[at] == ']') --depth;
    ++at;
  } while (depth > 0);
  return at;
}

size_t skip_blanks(std::string_view text, size_t at) {
  return std::min(text.find_first_not_of(" \t\r\n", at), text.size());
}

}  // namespace

void check_json(std::string_view text, std::string_view origin) {
  std::vector<std::set<std::string>> keys;
  std::string repeated;
  // Taking down a value recurses, so nesting is bounded while it is read.
  constexpr int kDeepest = 64;
  const auto watch = [&](int depth, nlohmann::json::parse_event_t event, nlohmann::json& value) {
    using Event = nlohmann::json::parse_event_t;
    LOCKSTEP_CHECK(
        depth <= kDeepest, kInput, "{}: lists or objects nest more than {} deep", origin, kDeepest);
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key && !keys.back().insert(value.get<std::string>()).second) {
      if (repeated.empty()) repeated = value.get<std::string>();
    }
    return true;
  };
  try {
    const nlohmann::json parsed = nlohmann::json::parse(text, watch);
  } catch (const nlohmann::json::exception& e) {
    fail(ErrorKind::kInput, "{}: not valid JSON: {}", origin, e.what());
  }
  LOCKSTEP_CHECK(repeated.empty(),
                 kInput,
                 "{}: the key \"{}\" appears twice in one object; keep one",
                 origin,
                 repeated);
}

std::vector<RawMember> raw_members(std::string_view object, std::string_view origin) {
  size_t at = skip_blanks(object, 0);
  LOCKSTEP_CHECK(at < object.size() && object[at] == '{',
                 kInput,
                 "{}: expected a JSON object {{...}}, got '{}'",
                 origin,
                 object.substr(0, 40));
  std::vector<RawMember> members;
  at = skip_blanks(object, at + 1);
  while (object[at] != '}') {
    const size_t key_end = skip_string(object, at);
    std::string key = nlohmann::json::parse(object.substr(at, key_end - at)).get<std::string>();
    at = skip_blanks(object, skip_blanks(object, key_end) + 1);  // past the colon
    const size_t value_end = skip_value(object, at);
    members.push_back({std::move(key), std::string(object.substr(at, value_end - at))});
    at = skip_blanks(object, value_end);
    if (object[at] == ',') at = skip_blanks(object, at + 1);
  }
  return members;
}

std::string join_members(const std::vector<RawMember>& members, int indent) {
  const std::string pad(static_cast<size_t>(indent), ' ');
  std::string out = "{";
  for (size_t i = 0; i < members.size(); ++i) {
    out += i == 0 ? "\n" : ",\n";
    out += pad + nlohmann::json(members[i].key).dump() + ": " + members[i].value;
  }
  return out + "\n" + std::string(static_cast<size_t>(std::max(0, indent - 2)), ' ') + "}";
}

std::string read_text_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  LOCKSTEP_CHECK(file.is_open(), kInput, "cannot open {}: {}", path, std::strerror(errno));
  std::ostringstream text;
  text << file.rdbuf();
  LOCKSTEP_CHECK(!file.bad(), kInput, "cannot read {}: {}", path, std::strerror(errno));
  return std::move(text).str();
}

}  // namespace lockstep::model
