// Names of one program's modules translated into another's by patterns.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::harness {

/// Rows of a TOML table: "model.layers.*.self_attn.o_proj" = "layers.{}.mixer.out". Each * matches
/// any run of characters, as few as fit; each {} takes what the * of the same position matched. The
/// first row that matches counts; tables may be nested, their keys joined by dots.
class ModuleMap {
 public:
  /// Names stay as they are.
  ModuleMap() = default;
  /// Throws kInput naming file, line and pattern: not TOML, not a string, more {} than *.
  static ModuleMap load(const std::filesystem::path& file);

  void add(std::string pattern, std::string replacement);
  /// The translated name; the name itself when no row matches and the map is empty, nothing when no
  /// row of a map matches.
  [[nodiscard]] std::optional<std::string> translate(std::string_view name) const;
  [[nodiscard]] bool empty() const { return rows_.empty(); }

 private:
  struct Row {
    std::string pattern, replacement;
  };
  std::vector<Row> rows_;
};

/// What each * of the pattern matched, or nothing.
std::optional<std::vector<std::string>> match_pattern(std::string_view pattern,
                                                      std::string_view name);

}  // namespace lockstep::harness
