#include "harness/runner/file_compare.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <tuple>

#include "golden/compare/model_order.hpp"
#include "harness/launch/schema.hpp"
#include "harness/result/result.hpp"
#include "harness/runner/measure.hpp"
#include "harness/runner/tensor_file.hpp"

namespace lockstep::harness {
namespace {

constexpr std::string_view kMismatchKl = "mismatch_kl";

bool like_logits(const std::string& name, const Tensor& tensor) {
  return name.ends_with("logits") && tensor.dim() == 2 && tensor.is_floating_point();
}

bool like_logprobs(const std::string& name, const Tensor& tensor) {
  return name.ends_with("logprobs") && tensor.dim() == 1 && tensor.is_floating_point();
}

std::string shape_text(const Tensor& tensor) {
  return fmt::format("[{}]", fmt::join(tensor.sizes(), ", "));
}

void fill_row(const FileComparePlan& plan,
              const Tensor& got,
              const Tensor& want,
              const TensorFile* floor,
              TensorRow& row) {
  row.result = golden::compare(got, want, row.left);
  const auto own = plan.per.find(row.result.ulp_dtype);
  row.limit = own != plan.per.end() ? own->second : plan.limit;
  row.first = first_divergence(plan.metric, row.limit, got, want, row.left, {}, {});
  if (!row.result.same_dtype() || row.result.num_different == 0) {
    row.note += row.result.why_not_bitwise();
  }
  if (like_logits(row.left, got)) {
    row.kl = measure("kl", got, want, row.left);
    row.top1 = measure("top1", got, want, row.left);
  }
  const bool logprobs = like_logprobs(row.left, got);
  if (logprobs) row.mismatch_kl = measure("mismatch_kl", got, want, row.left);
  LOCKSTEP_CHECK(logprobs || plan.metric != kMismatchKl,
                 kShape,
                 "mismatch_kl is measured of log-probabilities, [tokens] under a name that ends "
                 "with logprobs; --only logprobs leaves others out");
  if (floor != nullptr) {
    const std::vector<std::string> names = floor->names();
    if (std::find(names.begin(), names.end(), row.right) != names.end()) {
      row.floor = measure("rel_l2", floor->load(row.right), want, row.right);
    }
  }
  row.value = measure(plan.metric, got, want, row.left);
  const MetricInfo* metric = find_metric(plan.metric);
  const bool at_least = metric != nullptr && metric->at_least;
  if (!row.limit) {
    row.pass = row.result.bitwise();
    row.badness = at_least ? -row.value : row.value;
    return;
  }
  row.pass = at_least ? row.value >= *row.limit : row.value <= *row.limit;
  Comparison judged;
  judged.value = row.value;
  judged.limit = row.limit;
  judged.bound = at_least ? Bound::kAtLeast : Bound::kAtMost;
  row.badness = judged.ratio();
}

/// Rows in model order by whichever side's name is one of this model's.
void sort_rows(std::vector<TensorRow>& rows) {
  std::vector<std::pair<golden::ModelPlace, TensorRow>> placed;
  placed.reserve(rows.size());
  for (TensorRow& row : rows) {
    golden::ModelPlace place = golden::model_place(row.left);
    if (!place.known()) {
      place = golden::model_place(row.right);
      if (!place.known()) place.name = row.left;
    }
    placed.emplace_back(std::move(place), std::move(row));
  }
  std::stable_sort(
      placed.begin(), placed.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  rows.clear();
  for (auto& [place, row] : placed) rows.push_back(std::move(row));
}

/// A bound that nothing can meet, or nothing can miss, is a slip of the keyboard.
void check_limit(const std::string& metric, double limit) {
  if (metric == "cosine") {
    LOCKSTEP_CHECK(limit >= -1 && limit <= 1,
                   kInput,
                   "--limit {}: cosine lies between -1 and 1; give the least value that passes, "
                   "such as 0.999",
                   limit);
    return;
  }
  LOCKSTEP_CHECK(limit >= 0 && std::isfinite(limit),
                 kInput,
                 "--limit {}: {} is judged by a finite bound of at least 0, such as 1e-5; leave "
                 "--limit out to ask for equal bits",
                 limit,
                 metric);
}

bool matches_any(const std::vector<std::string>& patterns, const std::string& name) {
  return std::any_of(patterns.begin(), patterns.end(), [&](const std::string& pattern) {
    return match_pattern(pattern, name).has_value();
  });
}

/// Every pattern has to match something: one that does not is misspelt.
void check_patterns(const FileComparePlan& plan, const std::vector<std::string>& names) {
  for (const std::string& pattern : plan.only) {
    const bool used = std::any_of(names.begin(), names.end(), [&](const std::string& name) {
      return matches_any({pattern}, name);
    });
    if (used) continue;
    const std::string near = pattern.empty() ? "" : did_you_mean(pattern, names);
    fail(ErrorKind::kInput,
         "--only {}: matches no tensor of {}, which holds {} tensors, such as '{}'{}; * stands for "
         "any characters",
         pattern.empty() ? "''" : pattern,
         plan.left.string(),
         names.size(),
         names.front(),
         near);
  }
}

}  // namespace

bool FileComparison::pass() const {
  return only_left.empty() && only_right.empty() &&
         std::all_of(rows.begin(), rows.end(), [](const TensorRow& row) { return row.pass; });
}

const TensorRow* FileComparison::first_failing() const {
  const auto found =
      std::find_if(rows.begin(), rows.end(), [](const TensorRow& row) { return !row.pass; });
  return found == rows.end() ? nullptr : &*found;
}

const TensorRow* FileComparison::first_over_floor() const {
  const auto found = std::find_if(rows.begin(), rows.end(), [](const TensorRow& row) {
    return row.floor && !(row.result.rel_l2 <= *row.floor);
  });
  return found == rows.end() ? nullptr : &*found;
}

const TensorRow* FileComparison::worst() const {
  const auto key = [](const TensorRow& row) {
    return std::tuple(
        !row.problem.empty(),
        !row.pass,
        std::isnan(row.badness) ? std::numeric_limits<double>::infinity() : row.badness);
  };
  const TensorRow* found = nullptr;
  for (const TensorRow& row : rows) {
    if (found == nullptr || key(row) > key(*found)) found = &row;
  }
  return found;
}

const std::vector<std::string>& file_metrics() {
  static const std::vector<std::string> metrics = {
      "rel_l2", "max_abs", "ulp_max", "cosine", std::string(kMismatchKl)};
  return metrics;
}

FileComparison compare_files(const FileComparePlan& plan) {
  const std::vector<std::string>& usable = file_metrics();
  LOCKSTEP_CHECK(std::find(usable.begin(), usable.end(), plan.metric) != usable.end(),
                 kInput,
                 "--metric {}: not one of files; use one of {}{}",
                 plan.metric,
                 fmt::join(usable, ", "),
                 did_you_mean(plan.metric, usable));
  if (plan.limit) check_limit(plan.metric, *plan.limit);
  for (const auto& [dtype, limit] : plan.per) check_limit(plan.metric, limit);
  const auto left = plan.open(plan.left), right = plan.open(plan.right);
  const auto floor = plan.floor.empty() ? nullptr : plan.open(plan.floor);
  const std::vector<std::string> left_names = left->names(), right_names = right->names();
  for (const auto* side : {&left_names, &right_names}) {
    LOCKSTEP_CHECK(!side->empty(),
                   kInput,
                   "compare: {} holds no tensors; check that whatever wrote it got as far as "
                   "writing them",
                   (side == &left_names ? plan.left : plan.right).string());
  }
  check_patterns(plan, left_names);
  std::set<std::string> unused(right_names.begin(), right_names.end());
  FileComparison out;
  for (const std::string& name : left_names) {
    if (!plan.only.empty() && !matches_any(plan.only, name)) continue;
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
      if (got.dim() != want.dim() && got.numel() == want.numel()) {
        row.note = fmt::format("shapes {} against {}; ", shape_text(got), shape_text(want));
        got = got.reshape(want.sizes());
      }
      fill_row(plan, got, want, floor.get(), row);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kShape) throw;
      row.problem = error.what();
      row.note.clear();
    }
    if (row.note.ends_with("; ")) row.note.resize(row.note.size() - 2);
    out.rows.push_back(std::move(row));
  }
  sort_rows(out.rows);
  if (!out.rows.empty() && plan.only.empty() && plan.map.empty()) {
    out.only_right = golden::in_model_order({unused.begin(), unused.end()});
  }
  // With a map or patterns the user chose what to compare; what is left over was not asked for.
  if (!plan.map.empty()) out.only_left.clear();
  out.only_left = golden::in_model_order(out.only_left);
  LOCKSTEP_CHECK(!out.rows.empty(),
                 kInput,
                 "compare: no tensor of {} ({} tensors, such as '{}') has a partner in {} ({} "
                 "tensors, such as '{}'); names have to be equal or translated by --module-map",
                 plan.left.string(),
                 left_names.size(),
                 left_names.front(),
                 plan.right.string(),
                 right_names.size(),
                 right_names.front());
  return out;
}

}  // namespace lockstep::harness
