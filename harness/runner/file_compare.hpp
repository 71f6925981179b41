// Two files of tensors held against each other by name.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "golden/compare/metrics.hpp"
#include "harness/launch/module_map.hpp"
#include "harness/runner/tensor_file.hpp"

namespace lockstep::harness {

struct FileComparePlan {
  std::filesystem::path left, right;  ///< right is held to be true
  std::filesystem::path floor;        ///< empty: no noise floor
  ModuleMap map;                      ///< names of the left file -> names of the right one
  std::vector<std::string> only;      ///< patterns of left names; empty: all
  std::string metric = "rel_l2";
  std::optional<double> limit;           ///< empty: bits and dtypes must be equal
  std::map<at::ScalarType, double> per;  ///< limits of pairs whose coarser dtype this is
  std::function<std::unique_ptr<TensorFile>(const std::filesystem::path&)> open = open_tensor_file;
};

struct TensorRow {
  std::string left, right;  ///< names
  golden::Comparison result;
  std::optional<double> kl, top1;     ///< two-dimensional floating tensors named like logits
  std::optional<double> mismatch_kl;  ///< one-dimensional ones named like logprobs; left trains
  std::optional<double> floor;        ///< rel_l2 of the floor file against the right one
  std::optional<double> limit;        ///< the one that judged it; empty: equal bits
  double value = 0;                   ///< of the plan's metric
  double badness = 0;                 ///< value / limit, or how bad the value is; for worst()
  std::string first;                  ///< first divergence, empty when all values are equal
  std::string note;                   ///< dtypes or shapes that differ, though values are compared
  std::string problem;                ///< shapes or dtypes that cannot be compared
  bool pass = false;
};

struct FileComparison {
  std::vector<TensorRow> rows;  ///< in model order (golden/compare/model_order.hpp)
  std::vector<std::string> only_left, only_right;
  [[nodiscard]] bool pass() const;
  /// First row in model order that does not pass; null when all do.
  [[nodiscard]] const TensorRow* first_failing() const;
  /// First row in model order that is farther from the right file than the floor is; null if none.
  [[nodiscard]] const TensorRow* first_over_floor() const;
  /// Row that cannot be compared, else failing before passing, else the one farthest along the way
  /// to its limit, or without one with the worst value. Null without rows.
  [[nodiscard]] const TensorRow* worst() const;
};

/// What FileComparePlan::metric may be.
const std::vector<std::string>& file_metrics();

/// Values are compared in float64 whatever the dtypes, and dtypes that differ are noted. Without a
/// limit a tensor passes when dtype and bytes are equal. Throws kInput for unreadable files, files
/// without tensors, patterns that match nothing, limits that are no bound of the metric, and when
/// no name of the left file is in the right one.
FileComparison compare_files(const FileComparePlan& plan);

}  // namespace lockstep::harness
