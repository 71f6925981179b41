// Weights that are looked at on their way in: a NaN in one of them makes every result worthless,
// and comparisons count a NaN on both sides as equal.
#pragma once

#include <memory>
#include <set>
#include <string>

#include "model/checkpoint/weight_source.hpp"

namespace lockstep::harness {

/// Tensors that hold a NaN or an infinity, among those that were loaded.
class NonFiniteWeights {
 public:
  /// "2 weight tensors are not finite; the first is model.norm.weight: 3 NaN and 1 infinite of 64
  /// values"; empty when all are finite.
  [[nodiscard]] std::string text() const;
  /// Notes a parameter, or a piece of it, that does not come from a source.
  void look(const std::string& name, const Tensor& values);

 private:
  friend class FiniteSource;
  std::set<std::string> names_;
  std::string first_;
};

/// Everything as in `source`; what is not finite is noted in `found`, which must live as long.
/// Cost: one pass over each tensor that is loaded.
class FiniteSource final : public model::WeightSource {
 public:
  FiniteSource(std::shared_ptr<const model::WeightSource> source, NonFiniteWeights* found)
      : source_(std::move(source)), found_(found) {}
  [[nodiscard]] const model::ModelConfig& config() const override { return source_->config(); }
  [[nodiscard]] std::vector<std::string> names() const override { return source_->names(); }
  [[nodiscard]] model::WeightSpec spec(const std::string& name) const override {
    return source_->spec(name);
  }
  [[nodiscard]] Tensor load(const std::string& name) const override;
  [[nodiscard]] Tensor load_rows(const std::string& name,
                                 int64_t begin,
                                 int64_t end) const override;
  [[nodiscard]] std::vector<std::pair<std::string, Tensor>> disk_tensors(
      const std::string& name, const Tensor& value) const override {
    return source_->disk_tensors(name, value);
  }
  void release(const std::string& name) const override { source_->release(name); }
  [[nodiscard]] bool on_disk() const override { return source_->on_disk(); }
  [[nodiscard]] std::vector<std::string> dropped() const override { return source_->dropped(); }

 private:
  void note(const std::string& name) const;

  std::shared_ptr<const model::WeightSource> source_;
  NonFiniteWeights* found_;
};

}  // namespace lockstep::harness
