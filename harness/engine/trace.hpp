// Activations picked by name, and their gradients.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "model/seams/trace.hpp"

namespace lockstep::harness {

/// True if `name` matches the glob `pattern` (* any run of characters, ? one); a comma separates
/// alternatives.
bool matches(std::string_view pattern, std::string_view name);

/// Keeps what matches a pattern, in the order it was produced.
class PatternTrace final : public model::TraceSink {
 public:
  explicit PatternTrace(std::string pattern)
      : pattern_(std::move(pattern)), gradients_(std::make_shared<Named>()) {}
  [[nodiscard]] bool wants(const std::string& name) const override;
  void record(const std::string& name, const Tensor& value) override;

  using Named = std::vector<std::pair<std::string, Tensor>>;
  [[nodiscard]] const Named& values() const { return values_; }
  /// "grad:" + name of every recorded activation that is differentiable, in recording order; zeros
  /// where nothing flowed.
  [[nodiscard]] Named gradients() const;

 private:
  std::string pattern_;
  Named values_;
  std::shared_ptr<Named> gradients_;  // shared with the hooks, which may outlive a failed run
};

}  // namespace lockstep::harness
