#include "golden/compare/limits.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace lockstep::golden {
namespace {

double worst_of(const std::vector<double>& errors) {
  LOCKSTEP_CHECK(!errors.empty(),
                 kGolden,
                 "deriving a limit: the golden file holds no spread of the reference; remake it "
                 "without --quick");
  return *std::max_element(errors.begin(), errors.end());
}

}  // namespace

double limit_f64() { return 1e-9; }

double limit_f32(const std::vector<double>& reference_errors) {
  return 2.0 * worst_of(reference_errors);
}

double limit_bf16(const std::vector<double>& reference_errors) {
  return 1.25 * worst_of(reference_errors);
}

double sketch_slack(int64_t num_projections) {
  LOCKSTEP_CHECK(num_projections > 0, kInternal, "a sketch of {} projections", num_projections);
  return 1.0 + 4.0 / std::sqrt(2.0 * static_cast<double>(num_projections));
}

double few_runs_slack(int64_t num_elements) {
  LOCKSTEP_CHECK(num_elements > 0, kInternal, "an error of {} elements", num_elements);
  struct Group {
    int64_t most_elements;
    double slack;
  };
  constexpr Group kGroups[] = {{1, 3.0}, {3, 2.4}, {24, 1.75}, {1024, 1.4}};
  for (const Group& group : kGroups) {
    if (num_elements <= group.most_elements) return group.slack;
  }
  return 1.0;
}

int64_t tied_cases_allowed(int64_t num_cases) {
  LOCKSTEP_CHECK(num_cases >= 0, kInternal, "{} cases", num_cases);
  constexpr double kRate = 0.045, kChance = 1e-3;
  double exactly = std::pow(1.0 - kRate, static_cast<double>(num_cases)), at_most = exactly;
  int64_t allowed = 0;
  while (1.0 - at_most > kChance) {
    exactly *= kRate / (1.0 - kRate) * static_cast<double>(num_cases - allowed) /
               static_cast<double>(allowed + 1);
    at_most += exactly;
    ++allowed;
  }
  return allowed;
}

RatioSummary summarize_ratios(const std::vector<RatioRow>& rows) {
  RatioSummary out;
  std::vector<double> ratios;
  for (const auto& row : rows) {
    if (row.reference == 0.0 && row.error == 0.0) continue;
    const double ratio = row.reference == 0.0 || std::isnan(row.error)
                             ? std::numeric_limits<double>::infinity()
                             : row.error / row.reference;
    if (ratios.empty() || ratio > out.worst) {
      out.worst = ratio;
      out.worst_name = row.name;
    }
    ratios.push_back(ratio);
  }
  out.num_rows = static_cast<int64_t>(ratios.size());
  if (ratios.empty()) return out;
  std::sort(ratios.begin(), ratios.end());
  const size_t half = ratios.size() / 2;
  out.median = ratios.size() % 2 == 1 ? ratios[half] : ratios[half - 1] / 2.0 + ratios[half] / 2.0;
  return out;
}

}  // namespace lockstep::golden
