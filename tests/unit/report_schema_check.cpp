#include "tests/unit/report_schema_check.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "model/base/error.hpp"

namespace lockstep::reports {
namespace {

using Json = nlohmann::json;

class Checker {
 public:
  explicit Checker(const Json& root) : root_(root) {}

  void check(const Json& value, const Json& schema, const std::string& where) {
    if (found.size() >= 20) return;
    for (const auto& [key, rule] : schema.items()) check_rule(value, schema, key, rule, where);
  }

  std::vector<std::string> found;

 private:
  static bool has_type(const Json& value, const std::string& type) {
    if (type == "object") return value.is_object();
    if (type == "array") return value.is_array();
    if (type == "string") return value.is_string();
    if (type == "integer") return value.is_number_integer();
    if (type == "number") return value.is_number();
    return type == "boolean" && value.is_boolean();
  }

  void wrong(const std::string& where, const std::string& what) {
    found.push_back(where + ": " + what);
  }

  void check_rule(const Json& value,
                  const Json& schema,
                  const std::string& key,
                  const Json& rule,
                  const std::string& where) {
    static const std::set<std::string> kAbout{"$schema", "$defs", "title", "description"};
    if (kAbout.count(key) > 0) return;
    if (key == "$ref") {
      const auto path = rule.get<std::string>();
      check(value, root_.at(Json::json_pointer(path.substr(1))), where);
    } else if (key == "type") {
      if (!has_type(value, rule)) wrong(where, "is not of type " + rule.dump());
    } else if (key == "enum") {
      if (std::find(rule.begin(), rule.end(), value) == rule.end()) {
        wrong(where, value.dump() + " is not one of " + rule.dump());
      }
    } else if (key == "const") {
      if (value != rule) wrong(where, "is not " + rule.dump());
    } else if (key == "required") {
      for (const Json& name : rule) {
        if (!value.contains(name.get<std::string>())) wrong(where, "lacks " + name.dump());
      }
    } else if (key == "properties") {
      for (const auto& [name, inner] : rule.items()) {
        if (value.contains(name)) check(value.at(name), inner, where + "." + name);
      }
    } else if (key == "additionalProperties") {
      for (const auto& [name, inner] : value.items()) {
        if (!schema.at("properties").contains(name)) wrong(where, "has an unknown " + name);
      }
    } else if (key == "items") {
      for (size_t i = 0; i < value.size(); ++i) {
        check(value[i], rule, fmt::format("{}[{}]", where, i));
      }
    } else if (key == "minItems" || key == "maxItems") {
      const bool ok = key == "minItems" ? value.size() >= rule : value.size() <= rule;
      if (!ok) wrong(where, fmt::format("has {} items", value.size()));
    } else if (key == "minimum" || key == "maximum") {
      const bool ok = key == "minimum" ? value >= rule : value <= rule;
      if (!ok) wrong(where, value.dump() + " is beyond the " + key + " " + rule.dump());
    } else if (key == "anyOf") {
      const bool any = std::any_of(rule.begin(), rule.end(), [&](const Json& choice) {
        Checker inner(root_);
        inner.check(value, choice, where);
        return inner.found.empty();
      });
      if (!any) wrong(where, value.dump() + " fits none of " + rule.dump());
    } else {
      wrong(where, "schema keyword " + key + " is not known to this checker");
    }
  }

  const Json& root_;
};

}  // namespace

std::vector<std::string> schema_violations(std::string_view document, std::string_view schema) {
  const Json root = Json::parse(schema);
  Checker checker(root);
  checker.check(Json::parse(document), root, "report");
  return checker.found;
}

}  // namespace lockstep::reports
