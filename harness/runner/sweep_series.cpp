#include "harness/runner/sweep_series.hpp"

#include <algorithm>
#include <set>

#include "model/base/error.hpp"

namespace lockstep::harness {

void SweepCollector::add(size_t compare,
                         const CompareSpec& spec,
                         const ScenarioPoint& point,
                         const Comparison& result) {
  if (point.values.empty() || result.status == Status::kError) return;
  entries_.push_back({compare, spec, point.values, result.value, result.limit});
}

std::vector<Series> SweepCollector::series() const {
  if (entries_.empty()) return {};
  const std::vector<SweepValue>& keys = entries_.front().values;
  // x is the first key that takes several values; what it is called is its last part.
  size_t axis = keys.size();
  for (size_t k = 0; k < keys.size() && axis == keys.size(); ++k) {
    std::set<std::string> seen;
    for (const Entry& entry : entries_) seen.insert(entry.values[k].value);
    if (seen.size() > 1) axis = k;
  }
  if (axis == keys.size()) return {};
  const std::string x_name = keys[axis].key.substr(keys[axis].key.rfind('.') + 1);
  const bool numbers = keys[axis].value.find_first_of("\"'") == std::string::npos;

  std::vector<Series> result;
  std::map<std::string, size_t> by_name;
  for (const Entry& entry : entries_) {
    std::string curve = fmt::format("{} against {}", entry.spec.left, entry.spec.right);
    for (size_t k = 0; k < keys.size(); ++k) {
      if (k == axis) continue;
      curve += fmt::format(
          ", {}={}", keys[k].key.substr(keys[k].key.rfind('.') + 1), entry.values[k].value);
    }
    const std::string id = fmt::format("{}|{}", entry.compare, curve);
    const auto [at, fresh] = by_name.emplace(id, result.size());
    if (fresh) {
      Series series;
      series.kind = ChartKind::kSweep;
      series.chart = fmt::format("{} of {} over {}", entry.spec.metric, entry.spec.what, x_name);
      series.name = curve;
      series.x_label = x_name == "documents" ? "tokens" : x_name;
      series.y_label = entry.spec.metric;
      series.log_x = x_name == "documents";
      series.limit = entry.limit;
      result.push_back(std::move(series));
    }
    Series& series = result[at->second];
    const SweepValue& x = entry.values[axis];
    series.points.push_back({x.x, entry.value});
    if (!numbers) {
      std::string written = x.value;
      written.erase(
          std::remove_if(
              written.begin(), written.end(), [](char c) { return c == '"' || c == '\''; }),
          written.end());
      series.x_names.push_back(written);
    }
  }
  return result;
}

}  // namespace lockstep::harness
