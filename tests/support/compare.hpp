// Distances between tensors, for tests.
#pragma once

#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <string>

#include "model/base/same_bytes.hpp"
#include "model/base/torch.hpp"

namespace lockstep::tests {

/// ||a - b|| / ||b|| in float64; 0 for two empty tensors; infinity when one has a NaN the other has
/// not.
inline double rel_l2(const Tensor& a, const Tensor& b) {
  if (a.sizes() != b.sizes()) return std::numeric_limits<double>::infinity();
  if (a.numel() == 0) return 0;
  const Tensor x = a.detach().to(at::kDouble), y = b.detach().to(at::kDouble);
  const Tensor both_nan = x.isnan().logical_and(y.isnan());
  const Tensor d = (x - y).masked_fill(both_nan, 0), r = y.masked_fill(both_nan, 0);
  const double distance = d.norm().item<double>(), scale = r.norm().item<double>();
  if (distance == 0) return 0;
  const double value = distance / (scale > 0 ? scale : 1.0);
  return value == value ? value : std::numeric_limits<double>::infinity();
}

using Named = std::map<std::string, Tensor>;

/// Worst relative L2 over names; a name that only one side has counts as infinity.
inline std::pair<double, std::string> worst(const Named& a, const Named& b) {
  std::pair<double, std::string> result{0, ""};
  for (const auto& [name, value] : b) {
    const auto found = a.find(name);
    const double distance =
        found == a.end() ? std::numeric_limits<double>::infinity() : rel_l2(found->second, value);
    if (!(distance <= result.first)) result = {distance, name};
  }
  for (const auto& [name, value] : a) {
    if (!b.contains(name)) result = {std::numeric_limits<double>::infinity(), name};
  }
  return result;
}

}  // namespace lockstep::tests
