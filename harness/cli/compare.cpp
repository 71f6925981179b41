#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>

#include "harness/cli/commands.hpp"
#include "harness/launch/documents_file.hpp"
#include "harness/launch/schema.hpp"
#include "harness/result/json_text.hpp"
#include "harness/result/result.hpp"
#include "harness/runner/completions.hpp"
#include "harness/runner/file_compare.hpp"

namespace lockstep::harness {
namespace {

using Json = nlohmann::ordered_json;

Json number(double value) { return json_number<Json>(value); }

/// A bound as it was typed: a whole word that is a number.
double bound_of(const std::string& word, const std::string& option) {
  double value = 0;
  const char* end = word.data() + word.size();
  const auto [stop, error] = std::from_chars(word.data(), end, value);
  LOCKSTEP_CHECK(error == std::errc() && stop == end && !std::isnan(value),
                 kInput,
                 "--limit {}: '{}' is not a number; write for example --limit 1e-5 or --limit "
                 "bfloat16=1e-2",
                 option,
                 word);
  return value;
}

void read_limits(const std::vector<std::string>& options, FileComparePlan& plan) {
  static const std::vector<at::ScalarType> dtypes = {
      at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong};
  std::vector<std::string> names;
  names.reserve(dtypes.size());
  for (const at::ScalarType dtype : dtypes) names.push_back(dtype_name(dtype));
  for (const std::string& option : options) {
    const size_t equals = option.find('=');
    if (equals == std::string::npos) {
      LOCKSTEP_CHECK(
          !plan.limit, kInput, "--limit {}: a limit for all tensors is given twice", option);
      plan.limit = bound_of(option, option);
      continue;
    }
    const std::string name = option.substr(0, equals);
    const auto found = std::find(names.begin(), names.end(), name);
    LOCKSTEP_CHECK(found != names.end(),
                   kInput,
                   "--limit {}: '{}' is no dtype; use one of {}{}",
                   option,
                   name,
                   fmt::join(names, ", "),
                   did_you_mean(name, names));
    const bool first = plan.per
                           .emplace(dtypes[static_cast<size_t>(found - names.begin())],
                                    bound_of(option.substr(equals + 1), option))
                           .second;
    LOCKSTEP_CHECK(first, kInput, "--limit {}: {} has a limit already", option, name);
  }
}

/// "rel_l2 within 1e-5; bfloat16 0.01".
std::string limit_text(const FileComparePlan& plan) {
  if (!plan.limit && plan.per.empty()) return "equal bits";
  std::string text = plan.metric;
  text += find_metric(plan.metric)->at_least ? " at least " : " within ";
  std::vector<std::string> parts;
  if (plan.limit) parts.push_back(format_number(*plan.limit));
  for (const auto& [dtype, limit] : plan.per) {
    parts.push_back(fmt::format("{} for {}", format_number(limit), dtype_name(dtype)));
  }
  if (!plan.limit) parts.emplace_back("equal bits for other dtypes");
  return text + fmt::format("{}", fmt::join(parts, ", "));
}

Json to_json(const TensorRow& row) {
  Json out{{"left", row.left}, {"right", row.right}, {"pass", row.pass}};
  if (!row.problem.empty()) {
    out["problem"] = row.problem;
    return out;
  }
  const golden::Comparison& c = row.result;
  out["left_dtype"] = dtype_name(c.got_dtype);
  out["right_dtype"] = dtype_name(c.want_dtype);
  out["equal_bits"] = c.bitwise();
  out["limit"] = row.limit ? Json(*row.limit) : Json(nullptr);
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
  if (row.mismatch_kl) out["mismatch_kl"] = number(*row.mismatch_kl);
  if (row.floor) out["noise_floor_rel_l2"] = number(*row.floor);
  out["first_divergence"] = row.first;
  out["note"] = row.note;
  return out;
}

/// Which row of all, in model order, counted from 1.
int64_t position_of(const TensorRow& row, const FileComparison& result) {
  return &row - result.rows.data() + 1;
}

/// A row that a summary names, or null.
Json named_json(const TensorRow* row, const FileComparison& result) {
  if (row == nullptr) return nullptr;
  Json out{{"left", row->left},
           {"right", row->right},
           {"position", position_of(*row, result)},
           {"of", result.rows.size()}};
  if (row->problem.empty()) out["value"] = number(row->value);
  if (row->limit) out["limit"] = *row->limit;
  out["where"] = row->problem.empty() ? row->first : row->problem;
  return out;
}

/// "layers.2.mlp (position 7 of 57): rel_l2 0.01, limit 0.001; layers.2.mlp[3,5]: got ..."
std::string named_text(const TensorRow& row,
                       const FileComparison& result,
                       const std::string& metric) {
  std::string text =
      fmt::format("{} (position {} of {})", row.left, position_of(row, result), result.rows.size());
  if (!row.problem.empty()) return text + ": " + row.problem;
  text += fmt::format(": {} {}", metric, format_number(row.value));
  if (row.limit) text += fmt::format(", limit {}", format_number(*row.limit));
  if (!row.first.empty()) text += "; " + row.first;
  return text;
}

void print_ends(const FileComparison& result, const FileComparePlan& plan) {
  const bool bits = !plan.limit && plan.per.empty();
  if (const TensorRow* first = result.first_failing()) {
    print(fmt::format("first {} in model order: {}\n",
                      bits ? "with unequal bits" : "over its limit",
                      named_text(*first, result, plan.metric)));
  }
  if (const TensorRow* first = result.first_over_floor()) {
    print(
        fmt::format("first over its noise floor in model order: {} (position {} of {}): rel_l2 "
                    "{}, floor {}\n",
                    first->left,
                    position_of(*first, result),
                    result.rows.size(),
                    format_number(first->result.rel_l2),
                    format_number(*first->floor)));
  }
  const TensorRow* worst = result.worst();
  if (!worst->pass || !worst->result.same_values()) {
    print(fmt::format("worst: {}\n", named_text(*worst, result, plan.metric)));
  }
}

/// Why names without a partner fail, with the first of them and what to do; empty without any.
std::string partner_text(const FileComparison& result, const FileComparePlan& plan) {
  constexpr size_t kShown = 3;
  std::string text;
  for (const auto& [file, names] :
       {std::pair{&plan.left, &result.only_left}, {&plan.right, &result.only_right}}) {
    if (names->empty()) continue;
    const std::vector<std::string> shown(
        names->begin(), names->begin() + static_cast<int64_t>(std::min(names->size(), kShown)));
    text += fmt::format("{}{} only in {}: {}{}",
                        text.empty() ? "" : "; ",
                        names->size(),
                        file->string(),
                        fmt::join(shown, ", "),
                        names->size() > kShown ? ", ..." : "");
  }
  if (text.empty()) return text;
  const bool both = !result.only_left.empty() && !result.only_right.empty();
  return fmt::format("FAIL: tensors without a partner: {}; {}",
                     text,
                     both ? "where the two sides name things differently, --module-map translates; "
                            "--only picks what to compare"
                          : "--only picks what to compare");
}

void print_row(const TensorRow& row, size_t width, bool floor) {
  if (!row.problem.empty()) {
    print(fmt::format("{:<{}} FAIL {}\n", row.left, width, row.problem));
    return;
  }
  const golden::Comparison& c = row.result;
  print(fmt::format(
      "{:<{}} {} {:>10} {:>10} {:>11} {:>9}{}{}{}\n",
      row.left,
      width,
      row.pass ? "pass" : "FAIL",
      format_number(c.max_abs),
      format_number(c.rel_l2),
      c.ulp_max,
      format_number(c.cosine),
      floor ? fmt::format(" {:>10}", row.floor ? format_number(*row.floor) : "-") : "",
      row.kl ? fmt::format("  kl {} top1 {}", format_number(*row.kl), format_number(*row.top1))
             : "",
      row.mismatch_kl ? fmt::format("  mismatch_kl {}", format_number(*row.mismatch_kl)) : ""));
  if (!row.note.empty()) print(fmt::format("    {}\n", row.note));
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
  read_limits(options.limits, plan);
  plan.open = [&](const std::filesystem::path& path) {
    if (!is_url(path.string())) return open_tensor_file(path);
    LOCKSTEP_CHECK(!options.docs.empty(),
                   kInput,
                   "compare: {} is a server; name the documents to ask it about with --docs",
                   path.string());
    return ask_completions(path.string(), read_documents(options.docs), options.served_model);
  };
  if (!options.module_map.empty()) plan.map = ModuleMap::load(options.module_map);
  const FileComparison result = compare_files(plan);
  int64_t failed = 0;
  for (const TensorRow& row : result.rows) failed += row.pass ? 0 : 1;
  const std::string limit = limit_text(plan);
  if (context.json) {
    Json rows = Json::array();
    for (const TensorRow& row : result.rows) rows.push_back(to_json(row));
    print(json_text(Json{{"pass", result.pass()},
                         {"limit", limit},
                         {"first_over_limit", named_json(result.first_failing(), result)},
                         {"first_over_floor", named_json(result.first_over_floor(), result)},
                         {"worst", named_json(result.worst(), result)},
                         {"tensors", rows},
                         {"only_left", result.only_left},
                         {"only_right", result.only_right},
                         {"reason", partner_text(result, plan)}}) +
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
      print(fmt::format("{:<{}} FAIL only in {}\n", name, width, plan.left.string()));
    for (const std::string& name : result.only_right)
      print(fmt::format("{:<{}} FAIL only in {}\n", name, width, plan.right.string()));
  }
  print_ends(result, plan);
  print(fmt::format("{} of {} tensors pass ({}){}\n",
                    static_cast<int64_t>(result.rows.size()) - failed,
                    result.rows.size(),
                    limit,
                    result.only_left.size() + result.only_right.size() == 0
                        ? ""
                        : fmt::format("; {} without a partner",
                                      result.only_left.size() + result.only_right.size())));
  const std::string reason = partner_text(result, plan);
  if (!reason.empty()) print(reason + "\n");
  return result.pass() ? 0 : 1;
}

}  // namespace lockstep::harness
