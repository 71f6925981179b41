#include "harness/runner/file_compare.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "harness/launch/schema.hpp"
#include "harness/runner/measure.hpp"
#include "harness/runner/tensor_file.hpp"

namespace lockstep::harness {
namespace {

bool like_logits(const std::string& name, const Tensor& tensor) {
  return name.ends_with("logits") && tensor.dim() == 2 && tensor.is_floating_point();
}

void fill_row(const FileComparePlan& plan,
              const Tensor& got,
              const Tensor& want,
              const TensorFile* floor,
              TensorRow& row) {
  row.result = golden::compare(got, want, row.left);
  row.first = first_divergence(plan.metric, plan.limit, got, want, row.left, {}, {});
  if (like_logits(row.left, got)) {
    row.kl = measure("kl", got, want, row.left);
    row.top1 = measure("top1", got, want, row.left);
  }
  if (floor != nullptr) {
    const std::vector<std::string> names = floor->names();
    if (std::find(names.begin(), names.end(), row.right) != names.end()) {
      row.floor = measure("rel_l2", floor->load(row.right), want, row.right);
    }
  }
  if (!plan.limit) {
    row.pass = row.result.bitwise();
    return;
  }
  const MetricInfo* metric = find_metric(plan.metric);
  const double value = measure(plan.metric, got, want, row.left);
  row.pass = metric != nullptr && metric->at_least ? value >= *plan.limit : value <= *plan.limit;
}

}  // namespace

bool FileComparison::pass() const {
  return only_left.empty() && only_right.empty() &&
         std::all_of(rows.begin(), rows.end(), [](const TensorRow& row) { return row.pass; });
}

FileComparison compare_files(const FileComparePlan& plan) {
  static const std::vector<std::string> usable = {"rel_l2", "max_abs", "ulp_max", "cosine"};
  LOCKSTEP_CHECK(std::find(usable.begin(), usable.end(), plan.metric) != usable.end(),
                 kInput,
                 "--metric {}: every tensor has to have it; use one of {}{}",
                 plan.metric,
                 fmt::join(usable, ", "),
                 did_you_mean(plan.metric, usable));
  const auto left = open_tensor_file(plan.left), right = open_tensor_file(plan.right);
  const auto floor = plan.floor.empty() ? nullptr : open_tensor_file(plan.floor);
  const std::vector<std::string> left_names = left->names(), right_names = right->names();
  std::set<std::string> unused(right_names.begin(), right_names.end());
  FileComparison out;
  for (const std::string& name : left_names) {
    const bool wanted = plan.only.empty() ||
                        std::any_of(plan.only.begin(), plan.only.end(), [&](const auto& pattern) {
                          return match_pattern(pattern, name).has_value();
                        });
    if (!wanted) continue;
    const std::optional<std::string> mapped = plan.map.translate(name);
    if (!mapped || !std::binary_search(right_names.begin(), right_names.end(), *mapped)) {
      out.only_left.push_back(name);
      continue;
    }
    unused.erase(*mapped);
    TensorRow row;
    row.left = name;
    row.right = *mapped;
    try {
      Tensor got = left->load(name);
      const Tensor want = right->load(*mapped);
      if (got.dim() != want.dim() && got.numel() == want.numel()) got = got.reshape(want.sizes());
      fill_row(plan, got, want, floor.get(), row);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kShape) throw;
      row.problem = error.what();
    }
    out.rows.push_back(std::move(row));
  }
  if (!out.rows.empty() && plan.only.empty() && plan.map.empty()) {
    out.only_right.assign(unused.begin(), unused.end());
  }
  // With a map or patterns the user chose what to compare; what is left over was not asked for.
  if (!plan.map.empty()) out.only_left.clear();
  LOCKSTEP_CHECK(!out.rows.empty(),
                 kInput,
                 "compare: no tensor of {} ({} tensors, such as '{}') has a partner in {} ({} "
                 "tensors, such as '{}'); names have to be equal or translated by --module-map",
                 plan.left.string(),
                 left_names.size(),
                 left_names.empty() ? "" : left_names.front(),
                 plan.right.string(),
                 right_names.size(),
                 right_names.empty() ? "" : right_names.front());
  return out;
}

}  // namespace lockstep::harness
