// Two files of tensors held against each other by name.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "golden/compare/metrics.hpp"
#include "harness/launch/module_map.hpp"

namespace lockstep::harness {

struct FileComparePlan {
  std::filesystem::path left, right;  ///< right is held to be true
  std::filesystem::path floor;        ///< empty: no noise floor
  ModuleMap map;                      ///< names of the left file -> names of the right one
  std::vector<std::string> only;      ///< patterns of left names; empty: all
  std::string metric = "rel_l2";
  std::optional<double> limit;  ///< empty: bits must be equal
};

struct TensorRow {
  std::string left, right;  ///< names
  golden::Comparison result;
  std::optional<double> kl, top1;  ///< two-dimensional floating tensors named like logits
  std::optional<double> floor;     ///< rel_l2 of the floor file against the right one
  std::string first;               ///< first divergence, empty when bits are equal
  std::string problem;             ///< shapes or dtypes that cannot be compared
  bool pass = false;
};

struct FileComparison {
  std::vector<TensorRow> rows;  ///< in the order of the left file
  std::vector<std::string> only_left, only_right;
  [[nodiscard]] bool pass() const;
};

/// Throws kInput for unreadable files, or when no name of the left file is in the right one.
FileComparison compare_files(const FileComparePlan& plan);

}  // namespace lockstep::harness
