#include "harness/runner/compare_runs.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "golden/compare/limits.hpp"
#include "golden/compare/logits.hpp"
#include "golden/compare/model_order.hpp"
#include "golden/compare/sketch.hpp"
#include "harness/engine/trace.hpp"
#include "harness/launch/schema.hpp"
#include "harness/launch/workload.hpp"
#include "harness/runner/measure.hpp"

namespace lockstep::harness {
namespace {

/// Metric of choices beside values: the share of rows that chose otherwise.
constexpr const char* kRowsDifferent = "rows_different";

/// What a side has under one name: values, or the short form a golden file keeps.
struct Item {
  Tensor values;
  std::optional<golden::StoredTensor> sketch;
};

const Side& run_side(const Side& left, const Side& right) {
  return left.run != nullptr ? left : right;
}

const std::vector<int64_t>& boundaries(const Side& left, const Side& right) {
  return run_side(left, right).run->cu_seqlens;
}

/// Rows of ranks of whichever side was distributed.
const std::vector<RankRows>& ranks_of(const Side& left, const Side& right) {
  static const std::vector<RankRows> none;
  for (const Side* side : {&left, &right}) {
    if (side->run != nullptr && side->run->rank_rows.size() > 1) return side->run->rank_rows;
  }
  return none;
}

Item whole_subject(const Side& side, const std::string& what) {
  Item item;
  if (what == "loss") {
    const double loss = side.stored != nullptr ? side.stored->loss() : side.run->loss;
    item.values = at::scalar_tensor(loss, at::kDouble);
  } else if (what == "logits") {
    item.values = side.stored != nullptr ? side.stored->logits() : side.run->logits;
  } else {
    item.values = side.stored != nullptr ? side.stored->logprobs() : side.run->logprobs;
  }
  return item;
}

std::set<std::string> names_of(const Side& side, const std::string& what) {
  std::set<std::string> names;
  if (what == "grads") {
    if (side.stored != nullptr) {
      for (const std::string& name : side.stored->grad_names()) names.insert(name);
    } else {
      for (const auto& [name, grad] : side.run->grads) names.insert(name);
    }
    return names;
  }
  const std::string pattern = what.substr(6);
  const auto add = [&](const std::string& name) {
    if (matches(pattern, name)) names.insert(name);
  };
  if (side.stored != nullptr) {
    for (const std::string& name : side.stored->activation_names()) add(name);
  } else {
    for (const auto& [name, value] : side.run->trace) add(name);
  }
  return names;
}

Item named_subject(const Side& side, const std::string& what, const std::string& name) {
  Item item;
  if (side.stored != nullptr) {
    golden::StoredTensor stored =
        what == "grads" ? side.stored->grad(name) : side.stored->activation(name);
    if (stored.kind == golden::StoredKind::kWhole) {
      item.values = stored.values;
    } else {
      item.sketch = std::move(stored);
    }
    return item;
  }
  if (what == "grads") {
    item.values = side.run->grads.at(name);
    return item;
  }
  for (const auto& [traced, value] : side.run->trace) {
    if (traced == name) item.values = value;
  }
  return item;
}

/// Values of one name on both sides, measured.
struct Measured {
  double value = 0, slack = 1;
  std::string note;
  bool judged = true;
};

double slack_of(const Tensor& tensor) {
  return golden::few_runs_slack(std::max<int64_t>(1, tensor.numel()));
}

Measured measure_sketch(std::string_view metric,
                        const Item& got,
                        const golden::StoredTensor& want,
                        const std::string& name) {
  const auto form = want.kind == golden::StoredKind::kTokens ? golden::SketchForm::kTokens
                                                             : golden::SketchForm::kTensor;
  Tensor values = got.values;
  int64_t count = 1;
  for (const int64_t size : want.shape) count *= size;
  if (values.numel() == count) values = values.reshape(want.shape);
  const golden::SketchComparison result =
      golden::compare_sketch(values, want.values, want.shape, form, name);
  LOCKSTEP_CHECK(
      metric == "rel_l2",
      kConfig,
      "compare of {}: the stored reference keeps large tensors as projections, from which "
      "only rel_l2 can be computed; use metric = \"rel_l2\"",
      name);
  return {result.worst(),
          golden::sketch_slack(result.num_projections),
          fmt::format("estimated from {} projections", result.num_projections),
          true};
}

Measured measure_item(std::string_view metric,
                      const Item& got,
                      const Item& want,
                      const std::string& name) {
  if (want.sketch) return measure_sketch(metric, got, *want.sketch, name);
  if (got.sketch) return measure_sketch(metric, want, *got.sketch, name);
  if (!got.values.is_floating_point()) {
    const golden::SetComparison sets = golden::compare_sets(got.values, want.values, name);
    const double different = sets.num_rows == 0 ? 0.0
                                                : static_cast<double>(sets.num_rows_different) /
                                                      static_cast<double>(sets.num_rows);
    if (metric == kSameChoice) return {1 - different, 1, sets.first, true};
    return {different,
            1,
            sets.num_rows_different == 0 ? "equal sets" : "rows with another choice; " + sets.first,
            false};
  }
  if (metric == kSameChoice) return {0, 1, "no choice", false};
  Tensor left = got.values;
  if (left.sizes() != want.values.sizes() && left.numel() == want.values.numel()) {
    left = left.reshape(want.values.sizes());
  }
  return {measure(metric, left, want.values, name), slack_of(want.values), {}, true};
}

std::optional<double> limit_for(const CompareSpec& spec,
                                const Side& left,
                                const Side& right,
                                const std::string& subject,
                                double slack) {
  if (!spec.golden_limit) return spec.limit;
  const golden::GoldenCase& stored = left.stored != nullptr ? *left.stored : *right.stored;
  const Side& run = run_side(left, right);
  const auto limit = golden_limit(stored, *run.spec, subject);
  LOCKSTEP_CHECK(
      limit.has_value(),
      kGolden,
      "compare of {}: {} stores no spread for it, so that no limit can be derived; remake "
      "the case without --quick, or give a number",
      subject,
      stored.name());
  // The float64 limit is a number, not what a few runs happened to do.
  return numerics_of(*run.spec).width() == model::Width::kFloat64 ? *limit : *limit * slack;
}

/// Larger is worse; NaN is worst of all.
double badness(const Detail& detail, Bound bound) {
  if (std::isnan(detail.value)) return std::numeric_limits<double>::infinity();
  if (!detail.limit) return bound == Bound::kAtMost ? detail.value : -detail.value;
  if (bound == Bound::kAtLeast) return *detail.limit - detail.value;
  if (*detail.limit == 0) return detail.value == 0 ? 0 : std::numeric_limits<double>::max();
  return detail.value / *detail.limit;
}

Status judged(const Detail& detail, Bound bound) {
  if (std::isnan(detail.value)) return Status::kFail;
  if (!detail.limit) return Status::kRecorded;
  const bool good =
      bound == Bound::kAtMost ? detail.value <= *detail.limit : detail.value >= *detail.limit;
  return good ? Status::kPass : Status::kFail;
}

/// Whether a value without a limit is a difference at all. Choices are counted as rows that differ.
bool differs(const Detail& detail, Bound bound) {
  return bound == Bound::kAtLeast && detail.metric != kRowsDifferent ? detail.value < 1
                                                                     : detail.value != 0;
}

/// Where inside the tensor, in words; empty where only a short form of it is stored.
std::string first_element(const CompareSpec& spec,
                          const Side& left,
                          const Side& right,
                          const Detail& detail) {
  const Item got = named_subject(left, spec.what, detail.name),
             want = named_subject(right, spec.what, detail.name);
  if (got.sketch || want.sketch) return {};
  if (!got.values.is_floating_point()) return detail.note;
  if (got.values.sizes() != want.values.sizes()) return {};
  return first_divergence(spec.metric,
                          detail.limit,
                          got.values,
                          want.values,
                          detail.name,
                          boundaries(left, right),
                          ranks_of(left, right));
}

void compare_named(const CompareSpec& spec, const Side& left, const Side& right, Comparison& out) {
  const std::set<std::string> lefts = names_of(left, spec.what),
                              rights = names_of(right, spec.what);
  const std::string group = spec.what == "grads" ? "grads/" : "activations/";
  std::vector<std::string> both, alone;
  std::set_intersection(
      lefts.begin(), lefts.end(), rights.begin(), rights.end(), std::back_inserter(both));
  std::set_symmetric_difference(
      lefts.begin(), lefts.end(), rights.begin(), rights.end(), std::back_inserter(alone));
  LOCKSTEP_CHECK(!both.empty(),
                 kInput,
                 "compare of {}: {} and {} have no name in common ({} and {} names); the first are "
                 "'{}' and '{}'",
                 spec.what,
                 left.name,
                 right.name,
                 lefts.size(),
                 rights.size(),
                 lefts.empty() ? "" : *lefts.begin(),
                 rights.empty() ? "" : *rights.begin());
  // A gradient that one side lacks is a difference; a traced module that a reference does not store
  // is not.
  LOCKSTEP_CHECK(
      spec.what != "grads" || alone.empty(),
      kShape,
      "compare of grads: {} of {} tensors have a gradient on one side only, the first is {}",
      alone.size(),
      both.size() + alone.size(),
      alone.front());
  // The group's folder tells gradients from what they are gradients of.
  for (std::string& name : both) name = group + name;
  both = golden::in_model_order(both);
  for (std::string& name : both) name.erase(0, group.size());
  const Detail* worst = nullptr;
  out.details.reserve(both.size());
  for (const std::string& name : both) {
    const Item got = named_subject(left, spec.what, name),
               want = named_subject(right, spec.what, name);
    const Measured measured = measure_item(spec.metric, got, want, name);
    if (!measured.judged && spec.metric == kSameChoice) continue;
    Detail detail;
    detail.name = name;
    detail.metric = measured.judged ? spec.metric : kRowsDifferent;
    detail.value = measured.value;
    detail.note = measured.note;
    if (measured.judged) {
      detail.unit = out.unit;
      detail.limit = limit_for(spec, left, right, group + name, measured.slack);
      detail.status = judged(detail, out.bound);
    }
    out.details.push_back(std::move(detail));
    const Detail& kept = out.details.back();
    if (measured.judged &&
        (worst == nullptr || badness(kept, out.bound) > badness(*worst, out.bound))) {
      worst = &kept;
    }
  }
  LOCKSTEP_CHECK(worst != nullptr,
                 kInput,
                 "compare of {}: metric {} measures nothing of such names; same_choice is for "
                 "\"*.mlp.gate.experts\" and \"*.indexer\", the others are for activations",
                 spec.what,
                 spec.metric);
  out.value = worst->value;
  out.limit = worst->limit;
  if (differs(*worst, out.bound)) {
    out.worst = fmt::format("{}: {} {}", worst->name, worst->metric, format_number(worst->value));
    if (worst->limit) out.worst += fmt::format(", limit {}", format_number(*worst->limit));
  }
  const auto first = std::find_if(out.details.begin(), out.details.end(), [&](const Detail& d) {
    return d.limit || std::isnan(d.value) ? d.status == Status::kFail : differs(d, out.bound);
  });
  if (first != out.details.end()) {
    out.first_divergence = fmt::format("{} ({} of {} in {} order)",
                                       first->name,
                                       first - out.details.begin() + 1,
                                       out.details.size(),
                                       spec.what == "grads" ? "backward" : "model");
    const std::string element = first_element(spec, left, right, *first);
    if (!element.empty()) out.first_divergence += ": " + element;
  }
}

void compare_whole(const CompareSpec& spec, const Side& left, const Side& right, Comparison& out) {
  const Tensor got = whole_subject(left, spec.what).values;
  const Tensor want = whole_subject(right, spec.what).values;
  out.value = measure(spec.metric, got, want, spec.what);
  out.limit = limit_for(spec, left, right, spec.what, slack_of(want));
  if (spec.what == "loss") return;
  const std::vector<RankRows>& ranks = ranks_of(left, right);
  for (size_t r = 0; r < ranks.size(); ++r) {
    RankValue value;
    value.world_rank = static_cast<int64_t>(r);
    value.place = fmt::format("cp {}, rows {} to {}", r, ranks[r].begin, ranks[r].end);
    if (ranks[r].begin == ranks[r].end) {
      value.note = "no rows";
    } else {
      const int64_t length = ranks[r].end - ranks[r].begin;
      value.value = measure(spec.metric,
                            got.narrow(0, ranks[r].begin, length),
                            want.narrow(0, ranks[r].begin, length),
                            spec.what);
    }
    out.ranks.push_back(std::move(value));
  }
  for (const RankValue& value : out.ranks) {
    if (!value.note.empty()) continue;
    const auto worst = std::find_if(out.ranks.begin(), out.ranks.end(), [&](const RankValue& v) {
      return out.rank == v.world_rank;
    });
    const bool worse =
        worst == out.ranks.end() || std::isnan(value.value) ||
        (out.bound == Bound::kAtMost ? value.value > worst->value : value.value < worst->value);
    if (worse) out.rank = value.world_rank;
  }
  out.first_divergence = first_divergence(
      spec.metric, out.limit, got, want, spec.what, boundaries(left, right), ranks);
  if (spec.what != "logits") return;
  // What people ask next about logits, beside the judged metric.
  for (const MetricInfo& metric : metrics()) {
    const std::string fits = fmt::format(" {} ", metric.fits);
    if (metric.name == spec.metric || fits.find(" logits ") == std::string::npos) continue;
    Detail detail;
    detail.name = "logits";
    detail.metric = metric.name;
    detail.unit = metric.unit;
    detail.value = measure(metric.name, got, want, "logits");
    out.details.push_back(std::move(detail));
  }
}

}  // namespace

std::optional<double> golden_limit(const golden::GoldenCase& stored,
                                   const RunSpec& run,
                                   const std::string& subject) {
  const model::Width width = numerics_of(run).width();
  if (width == model::Width::kFloat64) return golden::limit_f64();
  const auto spread = stored.spread(subject);
  if (!spread) return std::nullopt;
  if (width == model::Width::kFloat32) return golden::limit_f32(spread->f32);
  return golden::limit_bf16(run.replay.empty() ? spread->bf16 : spread->bf16_replay);
}

Comparison compare_sides(const CompareSpec& spec, const Side& left, const Side& right) {
  const MetricInfo& metric = *find_metric(spec.metric);
  Comparison out;
  out.left = left.name;
  out.right = right.name;
  out.what = spec.what;
  out.metric = spec.metric;
  out.unit = metric.unit;
  out.bound = metric.at_least ? Bound::kAtLeast : Bound::kAtMost;
  try {
    if (spec.what == "grads" || spec.what.starts_with("trace:")) {
      compare_named(spec, left, right, out);
    } else {
      compare_whole(spec, left, right, out);
    }
    judge(out);
  } catch (const Error& error) {
    out.status = Status::kError;
    out.reason = error.what();
    out.error_kind = error.kind();
  }
  return out;
}

std::vector<Series> error_series(const CompareSpec& spec,
                                 const Side& left,
                                 const Side& right,
                                 const std::string& legend) {
  std::vector<Series> result;
  if (spec.what == "logits" || spec.what == "logprobs") {
    const Tensor got = whole_subject(left, spec.what).values;
    const Tensor want = whole_subject(right, spec.what).values;
    if (got.sizes() != want.sizes()) return result;
    Series series;
    series.kind = ChartKind::kToken;
    series.chart = fmt::format("relative L2 error of {} by position in the document", spec.what);
    series.name = legend;
    series.x_label = "position";
    series.y_label = "rel_l2";
    series.log_x = true;
    for (const auto& bin :
         golden::error_by_position(got, want, boundaries(left, right), spec.what)) {
      // Positions are drawn from 1, since a logarithmic axis has no 0.
      series.points.push_back({static_cast<double>(bin.first + 1), bin.rel_l2});
      series.x_names.push_back(bin.first == bin.last ? std::to_string(bin.first)
                                                     : fmt::format("{}-{}", bin.first, bin.last));
    }
    result.push_back(std::move(series));
  } else if (spec.what.starts_with("trace:")) {
    const std::set<std::string> theirs = names_of(right, spec.what),
                                own = names_of(left, spec.what);
    Series series;
    series.kind = ChartKind::kLayer;
    series.chart = fmt::format("relative L2 error of activations ({})", spec.what.substr(6));
    series.name = legend;
    series.x_label = "module";
    series.y_label = "rel_l2";
    // In the order in which the model computes them.
    for (const auto& [name, value] : run_side(left, right).run->trace) {
      if (!theirs.contains(name) || !own.contains(name) || !value.is_floating_point()) continue;
      const Measured measured = measure_item("rel_l2",
                                             named_subject(left, spec.what, name),
                                             named_subject(right, spec.what, name),
                                             name);
      series.points.push_back({static_cast<double>(series.points.size()), measured.value});
      series.x_names.push_back(name);
    }
    if (!series.points.empty()) result.push_back(std::move(series));
  }
  return result;
}

}  // namespace lockstep::harness
