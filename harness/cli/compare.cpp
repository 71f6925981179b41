#include <cmath>
#include <nlohmann/json.hpp>

#include "harness/cli/commands.hpp"
#include "harness/result/result.hpp"
#include "harness/runner/file_compare.hpp"

namespace lockstep::harness {
namespace {

using Json = nlohmann::ordered_json;

/// JSON has no literal for what is not finite.
Json number(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return value;
}

Json to_json(const TensorRow& row) {
  Json out{{"left", row.left}, {"right", row.right}, {"pass", row.pass}};
  if (!row.problem.empty()) {
    out["problem"] = row.problem;
    return out;
  }
  const golden::Comparison& c = row.result;
  out["elements"] = c.num_elements;
  out["different"] = c.num_different;
  out["max_abs"] = number(c.max_abs);
  out["rel_l2"] = number(c.rel_l2);
  out["ulp_max"] = c.ulp_max;
  out["ulp_dtype"] = dtype_name(c.ulp_dtype);
  out["cosine"] = number(c.cosine);
  Json histogram = Json::object();
  for (size_t bin = 0; bin < golden::UlpHistogram::kBins; ++bin) {
    if (c.histogram.count[bin] != 0)
      histogram[golden::UlpHistogram::label(bin)] = c.histogram.count[bin];
  }
  out["ulp_histogram"] = histogram;
  if (row.kl) out["kl"] = number(*row.kl);
  if (row.top1) out["top1"] = number(*row.top1);
  if (row.floor) out["noise_floor_rel_l2"] = number(*row.floor);
  out["first_divergence"] = row.first;
  return out;
}

void print_row(const TensorRow& row, size_t width, bool floor) {
  if (!row.problem.empty()) {
    print(fmt::format("{:<{}} FAIL {}\n", row.left, width, row.problem));
    return;
  }
  const golden::Comparison& c = row.result;
  print(fmt::format(
      "{:<{}} {} {:>10} {:>10} {:>11} {:>9}{}{}\n",
      row.left,
      width,
      row.pass ? "pass" : "FAIL",
      format_number(c.max_abs),
      format_number(c.rel_l2),
      c.ulp_max,
      format_number(c.cosine),
      floor ? fmt::format(" {:>10}", row.floor ? format_number(*row.floor) : "-") : "",
      row.kl ? fmt::format("  kl {} top1 {}", format_number(*row.kl), format_number(*row.top1))
             : ""));
  if (!row.pass && !row.first.empty()) print(fmt::format("    {}\n", row.first));
}

}  // namespace

int run_command_compare(const CompareOptions& options, const Context& context) {
  FileComparePlan plan;
  plan.left = options.left;
  plan.right = options.right;
  plan.floor = options.floor;
  plan.only = options.only;
  plan.metric = options.metric;
  plan.limit = options.limit;
  if (!options.module_map.empty()) plan.map = ModuleMap::load(options.module_map);
  const FileComparison result = compare_files(plan);
  int64_t failed = 0;
  for (const TensorRow& row : result.rows) failed += row.pass ? 0 : 1;
  const std::string limit =
      plan.limit ? fmt::format("{} within {}", plan.metric, format_number(*plan.limit))
                 : "equal bits";
  if (context.json) {
    Json rows = Json::array();
    for (const TensorRow& row : result.rows) rows.push_back(to_json(row));
    print(Json{{"pass", result.pass()},
               {"limit", limit},
               {"tensors", rows},
               {"only_left", result.only_left},
               {"only_right", result.only_right}}
              .dump(2) +
          "\n");
    return result.pass() ? 0 : 1;
  }
  if (!context.quiet) {
    size_t width = 6;
    for (const TensorRow& row : result.rows) width = std::max(width, row.left.size());
    print(fmt::format("{:<{}} {:<4} {:>10} {:>10} {:>11} {:>9}{}\n",
                      "tensor",
                      width,
                      "",
                      "max abs",
                      "rel L2",
                      "max ulp",
                      "cosine",
                      plan.floor.empty() ? "" : "      floor"));
    for (const TensorRow& row : result.rows) print_row(row, width, !plan.floor.empty());
    for (const std::string& name : result.only_left)
      print(fmt::format("only in {}: {}\n", plan.left.string(), name));
    for (const std::string& name : result.only_right)
      print(fmt::format("only in {}: {}\n", plan.right.string(), name));
  }
  print(fmt::format("{} of {} tensors pass ({}){}\n",
                    static_cast<int64_t>(result.rows.size()) - failed,
                    result.rows.size(),
                    limit,
                    result.only_left.size() + result.only_right.size() == 0
                        ? ""
                        : fmt::format("; {} without a partner",
                                      result.only_left.size() + result.only_right.size())));
  return result.pass() ? 0 : 1;
}

}  // namespace lockstep::harness
