// Curves over a swept key.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "harness/launch/scenario.hpp"
#include "harness/result/result.hpp"

namespace lockstep::harness {

/// Collects one value per comparison and sweep point; the first key with more than one distinct
/// number becomes the x axis, the other keys name the curves.
class SweepCollector {
 public:
  void add(size_t compare,
           const CompareSpec& spec,
           const ScenarioPoint& point,
           const Comparison& result);
  [[nodiscard]] std::vector<Series> series() const;

 private:
  struct Entry {
    size_t compare;
    CompareSpec spec;
    std::vector<SweepValue> values;
    double value;
    std::optional<double> limit;
  };
  std::vector<Entry> entries_;
};

}  // namespace lockstep::harness
