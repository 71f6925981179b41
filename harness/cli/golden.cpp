#include <algorithm>
#include <nlohmann/json.hpp>

#include "golden/store/golden_case.hpp"
#include "harness/cli/commands.hpp"
#include "harness/launch/available.hpp"
#include "harness/launch/mpi_start.hpp"
#include "harness/launch/paths.hpp"
#include "harness/result/json_text.hpp"
#include "harness/runner/file_compare.hpp"
#include "harness/runner/golden_verify.hpp"
#include "harness/runner/progress.hpp"

namespace lockstep::harness {
namespace {

using Json = nlohmann::ordered_json;

std::filesystem::path data_folder(const GoldenOptions& options) {
  return options.data.empty() ? golden_folder() : options.data;
}

std::string outcome_of(const Comparison& c) {
  if (c.status == Status::kError) return "error";
  return c.limit && *c.limit > 0 ? fmt::format("{:.2f}", c.value / *c.limit)
                                 : format_number(c.value);
}

Json to_json(const GoldenVerifyRow& row) {
  Json out{{"case", row.golden_case}, {"policy", row.policy}};
  if (!row.skipped.empty()) {
    out["skipped"] = row.skipped;
    return out;
  }
  Json list = Json::array();
  for (const Comparison& c : row.comparisons) list.push_back(Json::parse(to_json(c)));
  out["comparisons"] = list;
  return out;
}

void print_table(const GoldenVerifyResult& result) {
  print("error as a share of its limit (1 is the limit)\n");
  print(fmt::format("{:<16} {:<14} {:>8} {:>8} {:>8} {:>8} {:>8}\n",
                    "case",
                    "policy",
                    "logits",
                    "logprobs",
                    "loss",
                    "grads",
                    "layers"));
  for (const GoldenVerifyRow& row : result.rows) {
    if (!row.skipped.empty()) {
      print(fmt::format("{:<16} {}\n", row.golden_case, row.skipped));
      continue;
    }
    std::string line = fmt::format("{:<16} {:<14}", row.golden_case, row.policy);
    for (const Comparison& c : row.comparisons) line += fmt::format(" {:>8}", outcome_of(c));
    print(line + "\n");
    for (const Comparison& c : row.comparisons) {
      if (c.status == Status::kFail) {
        print(fmt::format("    FAIL {}: rel_l2 {} over {}; {}\n",
                          c.what,
                          format_number(c.value),
                          c.limit ? format_number(*c.limit) : "-",
                          c.first_divergence));
      } else if (c.status == Status::kError) {
        print(fmt::format("    ERROR {}: {}\n", c.what, c.reason));
      }
    }
  }
  if (result.f64.num_rows > 0) {
    print(fmt::format("float64 error: worst {} in {} (limit {})\n",
                      format_number(result.f64.worst),
                      result.f64.worst_name,
                      format_number(golden::limit_f64())));
  }
  if (result.f32.num_rows > 0) {
    print(fmt::format(
        "float32 error over the reference's own worst run: median {:.3f}, worst {:.2f} in {}\n",
        result.f32.median,
        result.f32.worst,
        result.f32.worst_name));
  }
  for (const auto& [name, summary] :
       {std::pair{"bf16", result.bf16}, std::pair{"bf16 replayed", result.bf16_replay}}) {
    if (summary.num_rows == 0) continue;
    print(
        fmt::format("{} error over the reference's own worst run: median {:.3f} (limit {}), "
                    "worst {:.2f} in {}\n",
                    name,
                    summary.median,
                    golden::kMedianRatioLimit,
                    summary.worst,
                    summary.worst_name));
  }
}

Json to_json(const GoldenVerifyResult& result) {
  Json rows = Json::array();
  for (const GoldenVerifyRow& row : result.rows) rows.push_back(to_json(row));
  return {{"pass", result.pass()},
          {"f64_worst", result.f64.worst},
          {"f32_median_ratio", result.f32.median},
          {"f32_worst_ratio", result.f32.worst},
          {"bf16_median_ratio", result.bf16.median},
          {"bf16_worst_ratio", result.bf16.worst},
          {"bf16_replay_median_ratio", result.bf16_replay.median},
          {"bf16_replay_worst_ratio", result.bf16_replay.worst},
          {"rows", rows}};
}

/// Runs the generator; its output goes line by line to the progress.
void make_goldens(const std::filesystem::path& folder,
                  const GoldenOptions& options,
                  std::optional<int64_t> seed,
                  Progress& progress) {
  const auto python = require_golden_python("making goldens");
  const auto script = source_path(std::filesystem::path("golden") / "make" / "make_goldens.py");
  std::string names;
  for (const std::string& name : options.cases) names += (names.empty() ? "" : ",") + name;
  std::filesystem::create_directories(folder);
  std::vector<std::string> command = {python.string(),
                                      script.string(),
                                      "--case",
                                      names.empty() ? "all" : names,
                                      "--out",
                                      folder.string()};
  if (seed) {
    command.emplace_back("--seed");
    command.push_back(std::to_string(*seed));
  }
  const Outcome outcome =
      run_command(command, {}, [&](std::string_view line) { progress.line(line); });
  LOCKSTEP_CHECK(outcome.exit_code == 0,
                 kGolden,
                 "golden make: {} ended with {}: {}",
                 script.string(),
                 outcome.exit_code,
                 outcome.errors);
}

/// Makes the cases anew from a seed that nothing was tuned on, and verifies them.
GoldenVerifyResult verify_fresh(const GoldenOptions& options, int64_t seed, Progress& progress) {
  const auto folder = cache_folder() / "golden-fresh" / fmt::format("seed-{}", seed);
  std::filesystem::remove_all(folder);
  make_goldens(folder, options, seed, progress);
  return verify_goldens({folder, options.cases, options.policies, options.device},
                        [&](std::string_view line) { progress.line(line); });
}

/// What is wrong with a file at a glance, without reading it; empty when nothing is.
std::string file_state(const std::filesystem::path& folder, const golden::ManifestEntry& entry) {
  std::error_code error;
  const auto size = std::filesystem::file_size(folder / entry.file, error);
  if (error) return "file is missing";
  if (static_cast<int64_t>(size) != entry.size_bytes) {
    return fmt::format("file has {} bytes", size);
  }
  return {};
}

/// One case of two stores.
struct CaseDiff {
  std::string name, text;
  bool same = false;
  Json json;
};

CaseDiff diff_case(const std::filesystem::path& other_folder,
                   const golden::ManifestEntry& other,
                   const std::filesystem::path& folder,
                   const golden::ManifestEntry& own) {
  CaseDiff out{other.name, {}, false, {{"case", other.name}}};
  golden::verify_entry(other_folder, other);
  golden::verify_entry(folder, own);
  out.json["same_bytes"] = own.sha256 == other.sha256;
  if (own.sha256 == other.sha256) {
    out.text = "same bytes";
    out.same = true;
    return out;
  }
  FileComparePlan plan;
  plan.left = other_folder / other.file;
  plan.right = folder / own.file;
  if (golden::GoldenCase(plan.left).file().exists("f64")) plan.only = {"f64/*"};
  const FileComparison result = compare_files(plan);
  const TensorRow *first = result.first_failing(), *worst = result.worst();
  int64_t differ = 0;
  for (const TensorRow& row : result.rows) differ += row.pass ? 0 : 1;
  out.same = result.pass();
  out.json["same_tensors"] = out.same;
  out.json["tensors"] = result.rows.size();
  out.json["different"] = differ;
  out.json["without_partner"] = result.only_left.size() + result.only_right.size();
  out.json["first"] = first == nullptr ? Json(nullptr) : Json(first->left);
  out.json["worst"] = worst->left;
  out.json["worst_rel_l2"] = format_number(worst->result.rel_l2);
  if (out.same) {
    out.text = fmt::format("other bytes, all {} tensors equal", result.rows.size());
  } else if (!worst->problem.empty()) {
    out.text =
        fmt::format("{} of {} tensors differ: {}", differ, result.rows.size(), worst->problem);
  } else if (differ == 0) {
    out.text = fmt::format(
        "tensors without a partner, such as {}",
        !result.only_left.empty() ? result.only_left.front() : result.only_right.front());
  } else {
    out.text = fmt::format("{} of {} tensors differ, first in model order {}, worst {}: rel_l2 {}",
                           differ,
                           result.rows.size(),
                           first->left,
                           worst->left,
                           format_number(worst->result.rel_l2));
  }
  return out;
}

}  // namespace

int run_command_golden_list(const GoldenOptions& options, const Context& context) {
  const auto folder = data_folder(options);
  Json list = Json::array();
  bool whole = true;
  for (const golden::ManifestEntry& entry : golden::read_manifest(folder)) {
    const std::string state = file_state(folder, entry);
    whole = whole && state.empty();
    list.push_back({{"case", entry.name},
                    {"file", entry.file},
                    {"bytes", entry.size_bytes},
                    {"seed", entry.seed},
                    {"sha256", entry.sha256},
                    {"generator_commit", entry.generator_commit},
                    {"torch", entry.torch},
                    {"transformers", entry.transformers},
                    {"description", entry.description},
                    {"state", state.empty() ? "ok" : state}});
    if (!context.json) {
      print(fmt::format("{:<16} {:>8} bytes  seed {:<3} {}{}\n",
                        entry.name,
                        entry.size_bytes,
                        entry.seed,
                        state.empty() ? "" : fmt::format("[{}] ", state),
                        entry.description));
    }
  }
  if (context.json) print(json_text(list) + "\n");
  LOCKSTEP_CHECK(whole,
                 kGolden,
                 "golden list: {} does not hold what its manifest says; `lockstep golden verify "
                 "--hashes-only --data {}` names the first damaged file",
                 folder.string(),
                 folder.string());
  return 0;
}

int run_command_golden_verify(const GoldenOptions& options, const Context& context) {
  const GoldenVerifyPlan plan{
      data_folder(options), options.cases, options.policies, options.device};
  const std::string device = device_problem(options.device);
  LOCKSTEP_CHECK(device.empty(), kConfig, "golden verify --device {}: {}", options.device, device);
  if (options.hashes_only) {
    verify_hashes(plan);
    if (!context.quiet && !context.json) print("all files are as the manifest says\n");
    if (context.json) print("{\"pass\": true}\n");
    return 0;
  }
  Progress progress(context.quiet ? Progress::Mode::kQuiet : Progress::Mode::kAuto);
  if (!options.fresh_seeds.empty()) {
    std::vector<GoldenVerifyResult> results;
    Json list = Json::array();
    for (const int64_t seed : options.fresh_seeds) {
      results.push_back(verify_fresh(options, seed, progress));
      list.push_back(to_json(results.back()));
      list.back()["seed"] = seed;
      if (context.json) continue;
      print(fmt::format("seed {}\n", seed));
      print_table(results.back());
    }
    const bool pass = fresh_pass(results);
    Json over = Json::object();
    for (const auto& [policy, tied] : tied_cases(results)) {
      over[policy] = {{"cases", tied.cases},
                      {"over", tied.over},
                      {"allowed", golden::tied_cases_allowed(tied.cases)},
                      {"worst_excess", tied.worst}};
      if (context.json) continue;
      print(fmt::format("{}: {} of {} cases over a limit (near ties: at most {}){}\n",
                        policy,
                        tied.over,
                        tied.cases,
                        golden::tied_cases_allowed(tied.cases),
                        tied.over == 0
                            ? ""
                            : fmt::format(", the furthest {:.2f} times it (at most {}): {}",
                                          tied.worst,
                                          golden::kTiedCaseExcess,
                                          tied.worst_name)));
    }
    if (context.json)
      print(json_text(Json{{"pass", pass}, {"over_limit", over}, {"seeds", list}}) + "\n");
    if (!context.json) print(pass ? "fresh goldens agree\n" : "fresh goldens DIFFER\n");
    return pass ? 0 : 1;
  }
  const GoldenVerifyResult result =
      verify_goldens(plan, [&](std::string_view line) { progress.line(line); });
  if (context.json) {
    print(json_text(to_json(result)) + "\n");
  } else {
    print_table(result);
    print(result.pass() ? "goldens agree\n" : "goldens DIFFER\n");
  }
  return result.pass() ? 0 : 1;
}

int run_command_golden_make(const GoldenOptions& options, const Context& context) {
  Progress progress(context.quiet ? Progress::Mode::kQuiet : Progress::Mode::kAuto);
  make_goldens(options.data, options, options.seed, progress);
  return 0;
}

int run_command_golden_diff(const GoldenOptions& options, const Context& context) {
  const auto folder = data_folder(options);
  const auto others = golden::read_manifest(options.other), owns = golden::read_manifest(folder);
  const auto find = [](const std::vector<golden::ManifestEntry>& entries, const std::string& name) {
    return std::find_if(
        entries.begin(), entries.end(), [&](const auto& entry) { return entry.name == name; });
  };
  std::vector<std::string> names = options.cases;
  if (names.empty()) {
    for (const auto* entries : {&others, &owns}) {
      for (const golden::ManifestEntry& entry : *entries) names.push_back(entry.name);
    }
    std::sort(names.begin(), names.end());
    names.erase(std::unique(names.begin(), names.end()), names.end());
  }
  bool same = true;
  std::string damaged;
  Json list = Json::array();
  for (const std::string& name : names) {
    const auto other = find(others, name), own = find(owns, name);
    if (other == others.end() && own == owns.end()) golden::find_entry(folder, name);
    CaseDiff diff{name, {}, false, {{"case", name}}};
    if (other == others.end() || own == owns.end()) {
      const auto& there = other == others.end() ? folder : options.other;
      diff.text = fmt::format("only in {}", there.string());
      diff.json["only_in"] = there.string();
    } else {
      try {
        diff = diff_case(options.other, *other, folder, *own);
      } catch (const Error& error) {
        diff.text = fmt::format("cannot be compared: {}", error.what());
        diff.json["error"] = error.what();
        damaged += (damaged.empty() ? "" : ", ") + name;
      }
    }
    same = same && diff.same;
    list.push_back(diff.json);
    if (!context.json) print(fmt::format("{:<16} {}\n", name, diff.text));
  }
  if (context.json) print(json_text(list) + "\n");
  LOCKSTEP_CHECK(
      damaged.empty(), kGolden, "golden diff: damaged or missing on one side: {}", damaged);
  return same ? 0 : 1;
}

}  // namespace lockstep::harness
