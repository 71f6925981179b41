// A TOML document whose every value knows where it was written, for messages.
#pragma once

#define TOML_HEADER_ONLY 1
#include <toml++/toml.h>

#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "harness/launch/schema.hpp"
#include "model/base/error.hpp"

namespace lockstep::harness {

/// A parsed file with the `--set` and sweep values put into it.
class TomlDocument {
 public:
  /// Throws kInput with file and line for text that is not TOML.
  /// `kind` begins messages: "scenario FILE:LINE: ...".
  TomlDocument(std::string_view text, std::filesystem::path file, std::string kind = "scenario");

  /// Puts `value` (TOML text; anything that does not parse is taken as a string) at a dotted path.
  /// `run.*.key` sets it in every run; `compare.0.limit` in the first compare. `origin` replaces
  /// file:line in messages about it.
  void set(std::string_view path, std::string_view value, const std::string& origin);

  [[nodiscard]] toml::table& root() { return root_; }
  [[nodiscard]] const toml::table& root() const { return root_; }
  [[nodiscard]] const std::filesystem::path& file() const { return file_; }
  [[nodiscard]] const std::string& kind() const { return kind_; }
  /// "scenarios/x.toml:12", or the origin of a value that was set.
  [[nodiscard]] std::string where(const toml::node& node, const std::string& path) const;

 private:
  void set_one(const std::vector<std::string>& path,
               std::string_view value,
               const std::string& origin);

  std::filesystem::path file_;
  std::string kind_;
  toml::table root_;
  std::vector<std::pair<std::string, std::string>> origins_;  ///< dotted path -> origin
};

/// One value with its place.
class TomlValue {
 public:
  TomlValue(const TomlDocument& document, const toml::node& node, std::string path)
      : document_(&document), node_(&node), path_(std::move(path)) {}

  [[nodiscard]] const toml::node& node() const { return *node_; }
  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] std::string where() const { return document_->where(*node_, path_); }
  /// The value as TOML text, on one line.
  [[nodiscard]] std::string written() const;

  /// Throws kInput unless the value has this type.
  void require(KeyType type) const;
  [[nodiscard]] std::string text() const;
  [[nodiscard]] std::vector<std::string> texts() const;
  [[nodiscard]] int64_t integer(int64_t least) const;
  [[nodiscard]] std::vector<int64_t> integers(int64_t least) const;
  [[nodiscard]] double number() const;
  [[nodiscard]] bool flag() const;
  [[nodiscard]] bool is_text() const { return node_->is_string(); }
  /// An entry of this array, for its text and place.
  [[nodiscard]] TomlValue member(const toml::node& entry) const {
    return TomlValue(*document_, entry, path_);
  }
  /// Members of a table in the order of the file.
  [[nodiscard]] std::vector<std::pair<std::string, TomlValue>> members() const;

  /// Throws Error{kind}: "scenario FILE:LINE: PATH = VALUE: message".
  template <typename... Args>
  [[noreturn]] void fail(ErrorKind kind, fmt::format_string<Args...> format, Args&&... args) const {
    raise(kind, fmt::format(format, std::forward<Args>(args)...));
  }

 private:
  [[noreturn]] void raise(ErrorKind kind, const std::string& message) const;

  const TomlDocument* document_;
  const toml::node* node_;
  std::string path_;
};

/// Members of a table sorted by where they stand in the file; values that were set come last.
std::vector<std::pair<std::string, const toml::node*>> in_file_order(const toml::table& table);

}  // namespace lockstep::harness
