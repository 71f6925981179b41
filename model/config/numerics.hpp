// Every known numerics difference between the programs that run this model is one switch. This
// table is the only list of them: command-line help, scenario keys, report columns, attribution and
// docs/numerics.md are derived from it.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model/base/torch.hpp"
#include "model/config/numerics_table.hpp"

namespace lockstep::model {

/// Width of activations. Accumulation is float64 for kFloat64, float32 otherwise.
enum class Width : uint8_t { kFloat64, kFloat32, kBFloat16 };

constexpr const SwitchInfo& switch_info(Switch s) { return kSwitches[static_cast<size_t>(s)]; }

namespace detail {
consteval uint8_t find_value(Switch s, std::string_view name) {
  const SwitchInfo& info = switch_info(s);
  for (size_t i = 0; i < info.num_values(); ++i) {
    if (info.values[i] == name) return static_cast<uint8_t>(i);
  }
  throw "this switch has no value of that name";  // a compile error: consteval
}
}  // namespace detail

/// Name of a value of switch S, checked against the table at compile time.
template <Switch S>
struct ValueOf {
  uint8_t index;
  consteval ValueOf(const char* name)
      : index(detail::find_value(S, name)) {}  // NOLINT(google-explicit-constructor)
};

/// A complete choice of numerics: a width and a value for every switch. Cheap to copy.
/// In the widths float64 and float32 nothing is rounded, so switches that only place bf16 roundings
/// have no effect there.
class Numerics {
 public:
  /// The policy of that name: float64, float32, hf-bf16, fsdp-bf16, fsdp-fp32-islands,
  /// invariant-f32 (also "invariant"), invariant-bf16. Throws kConfig listing the names otherwise.
  static Numerics policy(std::string_view name);
  static std::vector<std::string> policy_names();

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] Width width() const { return width_; }
  /// dtype of activations and of rounded values.
  [[nodiscard]] at::ScalarType act() const;
  /// dtype of accumulators, statistics, exponents and losses.
  [[nodiscard]] at::ScalarType acc() const;
  [[nodiscard]] bool is_bf16() const { return width_ == Width::kBFloat16; }
  /// Logits, loss and gradients are the same bytes for every topology and every way to pack the
  /// same documents: an invariant policy in which every switch this rests on has its value. Sums
  /// over tokens are then exact, and the sequence is cut at canonical tiles only.
  [[nodiscard]] bool invariant() const;

  /// num.is<Switch::kHcFn>("bf16")
  template <Switch S>
  [[nodiscard]] bool is(ValueOf<S> value) const {
    return values_[static_cast<size_t>(S)] == value.index;
  }
  /// Same, and the width is bf16: for switches that place a bf16 rounding.
  template <Switch S>
  [[nodiscard]] bool rounds(ValueOf<S> value) const {
    return is_bf16() && is<S>(value);
  }
  [[nodiscard]] std::string_view value(Switch s) const;
  /// Sets a switch by id ("D09"), name ("hc_mix_roundings") and value name. Throws kConfig listing
  /// what is accepted.
  void set(std::string_view id_or_name, std::string_view value);
  /// Switches whose values differ, in table order.
  [[nodiscard]] std::vector<Switch> differences(const Numerics& other) const;

 private:
  std::string name_;
  Width width_ = Width::kFloat32;
  bool exact_sums_ = false;
  std::array<uint8_t, kNumSwitches> values_{};
};

}  // namespace lockstep::model
