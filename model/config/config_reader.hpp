// Typed reading of config keys under all their names. Internal to this room; needs the JSON
// library.
#pragma once

#include <array>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "model/base/error.hpp"
#include "model/config/model_config.hpp"

namespace lockstep::model {

using nlohmann::json;

inline constexpr int64_t kLargestSize = (int64_t{1} << 31) - 1;

/// Reads typed keys of the text object, under all their names.
class Reader {
 public:
  Reader(const json& object, std::string_view origin, ConfigDefaults defaults)
      : object_(object), origin_(origin), defaults_(defaults) {}

  /// Value at a key or at "dict.key"; null pointer if absent.
  [[nodiscard]] const json* get(std::string_view path) const {
    const json* at = &object_;
    while (at != nullptr && !path.empty()) {
      const size_t dot = std::min(path.find('.'), path.size());
      const auto found = at->is_object() ? at->find(path.substr(0, dot)) : at->end();
      at = at->is_object() && found != at->end() ? &*found : nullptr;
      path = path.substr(std::min(dot + 1, path.size()));
    }
    return at;
  }
  [[nodiscard]] const json* not_null(std::string_view path) const {
    const json* value = get(path);
    return value != nullptr && !value->is_null() ? value : nullptr;
  }

  /// The first name with a value, after checking that all names with one agree.
  struct Found {
    std::string_view name;
    const json* value = nullptr;
  };
  template <size_t N>
  [[nodiscard]] Found find(const std::array<std::string_view, N>& names) const {
    Found first;
    for (std::string_view name : names) {
      const json* value = name.empty() ? nullptr : not_null(name);
      if (value == nullptr) continue;
      if (first.value == nullptr) first = {name, value};
      LOCKSTEP_CHECK(*first.value == *value,
                     kConfig,
                     "{}: {} is {} but {} is {}; they mean the same: keep one, or make them equal",
                     origin_,
                     first.name,
                     first.value->dump(),
                     name,
                     value->dump());
    }
    return first;
  }

  [[nodiscard]] int64_t integer(const Found& found) const {
    const bool fits = found.value->is_number_integer() &&
                      (!found.value->is_number_unsigned() ||
                       found.value->get<uint64_t>() <= static_cast<uint64_t>(kLargestSize)) &&
                      found.value->get<int64_t>() >= -kLargestSize;
    if (!fits) wrong(found, fmt::format("an integer up to {}", kLargestSize));
    return found.value->get<int64_t>();
  }
  [[nodiscard]] double real(const Found& found) const {
    if (!found.value->is_number()) wrong(found, "a number");
    return found.value->get<double>();
  }
  [[nodiscard]] bool flag(const Found& found) const {
    if (!found.value->is_boolean()) wrong(found, "true or false");
    return found.value->get<bool>();
  }
  [[nodiscard]] std::string text(const Found& found) const {
    if (!found.value->is_string()) wrong(found, "a string");
    return found.value->get<std::string>();
  }
  [[nodiscard]] std::vector<std::string> strings(const Found& found) const {
    if (!found.value->is_array()) wrong(found, "a list with one string per layer");
    std::vector<std::string> result;
    for (const json& entry : *found.value) {
      if (!entry.is_string()) wrong(found, "a list with one string per layer");
      result.push_back(entry.get<std::string>());
    }
    return result;
  }
  [[noreturn]] void wrong(const Found& found, std::string_view expected) const {
    fail(ErrorKind::kConfig,
         "{}: {} is {}; expected {}",
         origin_,
         found.name,
         found.value->dump(),
         expected);
  }

  /// A key whose absence is refused unless a program's defaults were asked for.
  [[noreturn]] void missing(std::string_view key, std::string_view hint) const {
    fail(ErrorKind::kConfig,
         "{}: {} is missing ({}); add it, or ask for one program's defaults with --defaults hf or "
         "--defaults trainer",
         origin_,
         key,
         hint);
  }

  [[nodiscard]] std::string_view origin() const { return origin_; }
  [[nodiscard]] ConfigDefaults defaults() const { return defaults_; }

 private:
  const json& object_;
  std::string_view origin_;
  ConfigDefaults defaults_;
};

/// layer_types, mlp_layer_types and the lists that repeat them. Needs num_hidden_layers.
void read_layers(const Reader& in, ModelConfig& c);
/// Which sparse layers reuse a selection: indexer_types, a pattern, or a frequency. After
/// read_layers.
void read_indexer_types(const Reader& in, ModelConfig& c);

}  // namespace lockstep::model
