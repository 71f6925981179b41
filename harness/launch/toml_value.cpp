#include "harness/launch/toml_value.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <sstream>

namespace lockstep::harness {
namespace {

std::vector<std::string> split(std::string_view path) {
  std::vector<std::string> parts;
  while (true) {
    const size_t dot = path.find('.');
    parts.emplace_back(path.substr(0, dot));
    if (dot == std::string_view::npos) return parts;
    path = path.substr(dot + 1);
  }
}

std::string join(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : ".") + part;
  return text;
}

/// A one-key table "value" holding what the text means.
toml::table parse_value(std::string_view text) {
  try {
    toml::table table = toml::parse("value = " + std::string(text));
    if (table.size() == 1 && table.contains("value")) return table;
  } catch (const toml::parse_error&) {
    // Not TOML: a bare word such as float64.
  }
  return toml::table{{"value", std::string(text)}};
}

std::string_view type_word(const toml::node& node) {
  switch (node.type()) {
    case toml::node_type::table:
      return "a table";
    case toml::node_type::array:
      return "an array";
    case toml::node_type::string:
      return "a string";
    case toml::node_type::integer:
      return "a whole number";
    case toml::node_type::floating_point:
      return "a decimal number";
    case toml::node_type::boolean:
      return "true or false";
    default:
      return "a date or time";
  }
}

bool matches(const toml::node& node, KeyType type) {
  const auto all = [&](auto&& ok) {
    const toml::array* array = node.as_array();
    return array != nullptr && std::all_of(array->begin(), array->end(), ok);
  };
  switch (type) {
    case KeyType::kText:
      return node.is_string();
    case KeyType::kTexts:
      return all([](const toml::node& n) { return n.is_string(); });
    case KeyType::kInteger:
      return node.is_integer();
    case KeyType::kIntegers:
      return all([](const toml::node& n) { return n.is_integer(); });
    case KeyType::kNumber:
      return node.is_integer() || node.is_floating_point();
    case KeyType::kNumberOrText:
      return node.is_integer() || node.is_floating_point() || node.is_string();
    case KeyType::kFlag:
      return node.is_boolean();
    case KeyType::kTable:
      return node.is_table();
    case KeyType::kAny:
      return true;
  }
  return false;
}

}  // namespace

TomlDocument::TomlDocument(std::string_view text, std::filesystem::path file, std::string kind)
    : file_(std::move(file)), kind_(std::move(kind)) {
  try {
    root_ = toml::parse(text, file_.string());
  } catch (const toml::parse_error& error) {
    lockstep::fail(ErrorKind::kInput,
                   "{} {}:{}: not valid TOML: {}",
                   kind_,
                   file_.string(),
                   error.source().begin.line,
                   std::string(error.description()));
  }
}

void TomlDocument::set(std::string_view path, std::string_view value, const std::string& origin) {
  const std::vector<std::string> parts = split(path);
  LOCKSTEP_CHECK(std::none_of(parts.begin(), parts.end(), [](const auto& p) { return p.empty(); }),
                 kInput,
                 "{}: '{}' is not a key; write for example run.cp1.policy=float64",
                 origin,
                 path);
  if (parts.size() >= 3 && parts[0] == "run" && parts[1] == "*") {
    const toml::table* runs = root_["run"].as_table();
    LOCKSTEP_CHECK(runs != nullptr && !runs->empty(),
                   kInput,
                   "{}: {} has no [run.NAME] table for '{}'",
                   origin,
                   file_.string(),
                   path);
    std::vector<std::string> names;
    for (const auto& [run, node] : *runs) names.emplace_back(run.str());
    for (const std::string& run : names) {
      std::vector<std::string> one = parts;
      one[1] = run;
      set_one(one, value, origin);
    }
    return;
  }
  set_one(parts, value, origin);
}

void TomlDocument::set_one(const std::vector<std::string>& path,
                           std::string_view value,
                           const std::string& origin) {
  toml::node* node = &root_;
  for (size_t i = 0; i + 1 < path.size(); ++i) {
    if (toml::array* array = node->as_array()) {
      size_t index = 0;
      const std::string& part = path[i];
      const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), index);
      LOCKSTEP_CHECK(
          error == std::errc() && end == part.data() + part.size() && index < array->size(),
          kInput,
          "{}: {}: '{}' is not a position below {} (positions start at 0)",
          origin,
          join(path),
          part,
          array->size());
      node = &(*array)[index];
      continue;
    }
    toml::table* table = node->as_table();
    LOCKSTEP_CHECK(table != nullptr,
                   kInput,
                   "{}: {}: the part before '{}' is {}, not a table",
                   origin,
                   join(path),
                   path[i],
                   type_word(*node));
    // A run that does not exist is a typing error, not a wish for an empty run.
    LOCKSTEP_CHECK(i != 1 || path[0] != "run" || table->contains(path[1]),
                   kInput,
                   "{}: {} has no run '{}'",
                   origin,
                   file_.string(),
                   path[1]);
    if (!table->contains(path[i])) table->insert(path[i], toml::table{});
    node = table->get(path[i]);
  }
  toml::table* table = node->as_table();
  LOCKSTEP_CHECK(table != nullptr,
                 kInput,
                 "{}: {}: cannot be set, the part before '{}' is {}",
                 origin,
                 join(path),
                 path.back(),
                 type_word(*node));
  toml::table parsed = parse_value(value);
  // A model or data source given here replaces the one of the file instead of competing with it.
  const auto replace = [&](std::string_view owner, std::initializer_list<std::string_view> keys) {
    if (path.size() != 2 || path[0] != owner) return;
    if (std::find(keys.begin(), keys.end(), path[1]) == keys.end()) return;
    for (const std::string_view key : keys) table->erase(key);
  };
  replace("model", {"preset", "checkpoint", "golden"});
  replace("data", {"documents", "file"});
  table->insert_or_assign(path.back(), std::move(*parsed.get("value")));
  origins_.emplace_back(join(path), origin);
}

std::string TomlDocument::where(const toml::node& node, const std::string& path) const {
  for (auto it = origins_.rbegin(); it != origins_.rend(); ++it) {
    const std::string& set = it->first;
    if (path == set || (path.starts_with(set) && path[set.size()] == '.')) {
      return fmt::format("{} ({})", file_.string(), it->second);
    }
  }
  const auto line = node.source().begin.line;
  return line == 0 ? file_.string() : fmt::format("{}:{}", file_.string(), line);
}

std::string TomlValue::written() const {
  std::ostringstream out;
  node_->visit([&](const auto& value) { out << toml::toml_formatter{value}; });
  std::string text = out.str();
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

void TomlValue::require(KeyType type) const {
  if (matches(*node_, type)) return;
  std::string got(type_word(*node_));
  if (const toml::array* array = node_->as_array(); array != nullptr && !array->empty()) {
    got += fmt::format(" holding {}", type_word(array->front()));
  }
  fail(ErrorKind::kInput, "expected {}, got {}", name(type), got);
}

std::string TomlValue::text() const { return node_->ref<std::string>(); }

std::vector<std::string> TomlValue::texts() const {
  std::vector<std::string> result;
  for (const toml::node& item : *node_->as_array()) result.push_back(item.ref<std::string>());
  return result;
}

int64_t TomlValue::integer(int64_t least) const {
  const int64_t value = node_->ref<int64_t>();
  if (value < least) fail(ErrorKind::kInput, "must be {} or more", least);
  return value;
}

std::vector<int64_t> TomlValue::integers(int64_t least) const {
  std::vector<int64_t> result;
  for (const toml::node& item : *node_->as_array()) {
    result.push_back(item.ref<int64_t>());
    if (result.back() < least) {
      fail(ErrorKind::kInput,
           "entry {} is {}, must be {} or more",
           result.size() - 1,
           result.back(),
           least);
    }
  }
  return result;
}

double TomlValue::number() const {
  if (node_->is_integer()) return static_cast<double>(node_->ref<int64_t>());
  const double value = node_->ref<double>();
  if (!std::isfinite(value)) fail(ErrorKind::kInput, "must be a finite number");
  return value;
}

bool TomlValue::flag() const { return node_->ref<bool>(); }

std::vector<std::pair<std::string, TomlValue>> TomlValue::members() const {
  std::vector<std::pair<std::string, TomlValue>> result;
  for (const auto& [key, node] : in_file_order(*node_->as_table())) {
    result.emplace_back(key, TomlValue(*document_, *node, path_.empty() ? key : path_ + "." + key));
  }
  return result;
}

void TomlValue::raise(ErrorKind kind, const std::string& message) const {
  const bool scalar = !node_->is_table() && !(node_->is_array() && written().size() > 60);
  throw Error(kind,
              fmt::format("{} {}: {}{}: {}",
                          document_->kind(),
                          where(),
                          path_,
                          scalar ? " = " + written() : "",
                          message));
}

std::vector<std::pair<std::string, const toml::node*>> in_file_order(const toml::table& table) {
  std::vector<std::pair<std::string, const toml::node*>> result;
  for (const auto& [key, node] : table) result.emplace_back(std::string(key.str()), &node);
  const auto place = [](const toml::node* node) {
    const auto begin = node->source().begin;
    constexpr auto kLast = std::numeric_limits<uint32_t>::max();
    return begin.line == 0 ? std::pair<uint32_t, uint32_t>(kLast, kLast)
                           : std::pair<uint32_t, uint32_t>(begin.line, begin.column);
  };
  std::stable_sort(result.begin(), result.end(), [&](const auto& a, const auto& b) {
    return place(a.second) < place(b.second);
  });
  return result;
}

}  // namespace lockstep::harness
