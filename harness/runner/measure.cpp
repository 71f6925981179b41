#include "harness/runner/measure.hpp"

#include <algorithm>
#include <cmath>

#include "golden/compare/logits.hpp"

namespace lockstep::harness {
namespace {

using golden::Threshold;

/// When an element counts as different. A relative L2 limit speaks about all elements together; one
/// whose error is three times what the limit allows for a typical element stands out.
Threshold threshold_of(std::string_view metric, std::optional<double> limit, const Tensor& want) {
  if (!limit) return {};
  if (metric == "ulp_max") return {Threshold::Metric::kUlp, *limit};
  if (metric == "max_abs") return {Threshold::Metric::kAbs, *limit};
  if (metric == "rel_l2" && want.numel() > 0) {
    const Tensor wide = want.to(at::kDouble).nan_to_num(0.0, 0.0, 0.0);
    const double rms = std::sqrt(wide.square().mean().item<double>());
    return {Threshold::Metric::kAbs, 3.0 * *limit * rms};
  }
  return {};
}

}  // namespace

double measure(std::string_view metric,
               const Tensor& got,
               const Tensor& want,
               std::string_view name) {
  if (metric == "kl") return golden::compare_logits(got, want, name).mean_kl;
  if (metric == "top1") return golden::compare_logits(got, want, name).top1_agreement;
  if (metric == "mismatch_kl") return golden::mismatch_kl(got, want).mean;
  const golden::Comparison all = golden::compare(got, want, name);
  return metric == "cosine" ? all.cosine : golden::metric_value(all, metric);
}

std::string place_of_row(int64_t row,
                         const std::vector<int64_t>& cu_seqlens,
                         const std::vector<RankRows>& rank_rows) {
  std::vector<std::string> parts;
  const auto document = std::upper_bound(cu_seqlens.begin(), cu_seqlens.end(), row);
  if (document != cu_seqlens.begin() && document != cu_seqlens.end()) {
    parts.push_back(fmt::format("document {}", document - cu_seqlens.begin() - 1));
    parts.push_back(fmt::format("position {}", row - *(document - 1)));
  }
  for (size_t r = 0; r < rank_rows.size() && rank_rows.size() > 1; ++r) {
    if (row >= rank_rows[r].begin && row < rank_rows[r].end) {
      parts.push_back(fmt::format("rank {}", r));
    }
  }
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? " (" : ", ") + part;
  return text.empty() ? text : text + ")";
}

std::string first_divergence(std::string_view metric,
                             std::optional<double> limit,
                             const Tensor& got,
                             const Tensor& want,
                             std::string_view name,
                             const std::vector<int64_t>& cu_seqlens,
                             const std::vector<RankRows>& rank_rows) {
  auto found = golden::compare(got, want, name, threshold_of(metric, limit, want)).first;
  if (!found) found = golden::compare(got, want, name).first;
  if (!found) return {};
  const bool rows = !cu_seqlens.empty() && got.dim() > 0 && got.size(0) == cu_seqlens.back();
  return golden::describe_divergence(*found, name) +
         (rows ? place_of_row(found->coordinates.front(), cu_seqlens, rank_rows) : "");
}

}  // namespace lockstep::harness
