#include "harness/launch/module_map.hpp"

#include <fstream>
#include <sstream>

#include "harness/launch/toml_value.hpp"

namespace lockstep::harness {
namespace {

size_t count(std::string_view text, std::string_view part) {
  size_t found = 0;
  for (size_t at = text.find(part); at != std::string_view::npos;
       at = text.find(part, at + part.size())) {
    ++found;
  }
  return found;
}

void read_rows(const TomlValue& table, const std::string& prefix, ModuleMap& map) {
  for (const auto& [key, value] : table.members()) {
    const std::string pattern = prefix.empty() ? key : fmt::format("{}.{}", prefix, key);
    if (value.node().is_table()) {
      read_rows(value, pattern, map);
      continue;
    }
    if (!value.is_text()) {
      value.fail(ErrorKind::kInput, "expected a name pattern, such as \"layers.{{}}.mixer.out\"");
    }
    try {
      map.add(pattern, value.text());
    } catch (const Error& error) {
      value.fail(ErrorKind::kInput, "{}", error.what());
    }
  }
}

}  // namespace

std::optional<std::vector<std::string>> match_pattern(std::string_view pattern,
                                                      std::string_view name) {
  const size_t star = pattern.find('*');
  if (star == std::string_view::npos) {
    if (pattern != name) return std::nullopt;
    return std::vector<std::string>{};
  }
  if (name.substr(0, star) != pattern.substr(0, star)) return std::nullopt;
  for (size_t length = 0; star + length <= name.size(); ++length) {
    auto rest = match_pattern(pattern.substr(star + 1), name.substr(star + length));
    if (!rest) continue;
    rest->insert(rest->begin(), std::string(name.substr(star, length)));
    return rest;
  }
  return std::nullopt;
}

ModuleMap ModuleMap::load(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  LOCKSTEP_CHECK(
      in.good(), kInput, "module map {}: cannot be opened; check the path", file.string());
  std::ostringstream text;
  text << in.rdbuf();
  const TomlDocument document(text.str(), file, "module map");
  ModuleMap map;
  read_rows(TomlValue(document, document.root(), ""), "", map);
  LOCKSTEP_CHECK(!map.empty(),
                 kInput,
                 "module map {}: has no row; write \"pattern\" = \"name\" lines",
                 file.string());
  return map;
}

void ModuleMap::add(std::string pattern, std::string replacement) {
  const size_t stars = count(pattern, "*"), holes = count(replacement, "{}");
  LOCKSTEP_CHECK(holes <= stars,
                 kInput,
                 "'{}' has {} places to fill but '{}' only {} stars",
                 replacement,
                 holes,
                 pattern,
                 stars);
  rows_.push_back({std::move(pattern), std::move(replacement)});
}

std::optional<std::string> ModuleMap::translate(std::string_view name) const {
  if (rows_.empty()) return std::string(name);
  for (const Row& row : rows_) {
    const auto parts = match_pattern(row.pattern, name);
    if (!parts) continue;
    std::string result = row.replacement;
    size_t at = 0;
    for (const std::string& part : *parts) {
      at = result.find("{}", at);
      if (at == std::string::npos) break;
      result.replace(at, 2, part);
      at += part.size();
    }
    return result;
  }
  return std::nullopt;
}

}  // namespace lockstep::harness
