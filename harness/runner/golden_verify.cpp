#include "harness/runner/golden_verify.hpp"

#include <algorithm>
#include <cmath>

#include "golden/store/golden_case.hpp"
#include "harness/launch/workload.hpp"
#include "harness/runner/compare_runs.hpp"
#include "harness/runner/execute.hpp"

namespace lockstep::harness {
namespace {

bool wanted(const GoldenVerifyPlan& plan, const std::string& name) {
  return plan.cases.empty() ||
         std::find(plan.cases.begin(), plan.cases.end(), name) != plan.cases.end();
}

RunSpec named(const std::string& policy) {
  RunSpec run;
  run.name = policy;
  run.policy = policy;
  if (policy.ends_with(kReplaySuffix)) {
    run.policy.resize(policy.size() - kReplaySuffix.size());
    run.replay = "float64";
    run.numerics.emplace_back("D68", "replay");
  }
  return run;
}

/// Cases that hold one operator's results instead of a model's.
bool is_model_case(const golden::GoldenCase& stored) { return stored.file().exists("f64/logits"); }

void add_ratios(const GoldenVerifyRow& row,
                const golden::GoldenCase& stored,
                model::Width width,
                bool replayed,
                std::vector<golden::RatioRow>& ratios) {
  const auto add = [&](const std::string& subject, double error) {
    double worst = 1.0;
    if (width != model::Width::kFloat64) {
      const auto spread = stored.spread(subject);
      if (!spread) return;
      const auto& errors = width == model::Width::kFloat32 ? spread->f32
                           : replayed                      ? spread->bf16_replay
                                                           : spread->bf16;
      if (errors.empty()) return;
      worst = *std::max_element(errors.begin(), errors.end());
    }
    ratios.push_back({row.golden_case + "/" + subject, error, worst});
  };
  for (const Comparison& comparison : row.comparisons) {
    if (comparison.status == Status::kError) continue;
    if (comparison.details.empty() || comparison.what == "logits") {
      add(comparison.what, comparison.value);
      continue;
    }
    for (const Detail& detail : comparison.details) {
      if (detail.limit)
        add((comparison.what == "grads" ? "grads/" : "activations/") + detail.name, detail.value);
    }
  }
}

bool is_wrong(const Comparison& comparison) {
  return comparison.status == Status::kFail || comparison.status == Status::kError;
}

bool medians_pass(const GoldenVerifyResult& result) {
  for (const golden::RatioSummary& summary : {result.bf16, result.bf16_replay}) {
    if (summary.num_rows > 0 && summary.median > golden::kMedianRatioLimit) return false;
  }
  return true;
}

}  // namespace

bool GoldenVerifyResult::pass() const {
  return medians_pass(*this) && std::all_of(rows.begin(), rows.end(), [](const auto& row) {
           return std::none_of(row.comparisons.begin(), row.comparisons.end(), is_wrong);
         });
}

std::map<std::string, TiedCases> tied_cases(const std::vector<GoldenVerifyResult>& fresh) {
  std::map<std::string, TiedCases> out;
  for (const GoldenVerifyResult& result : fresh) {
    for (const GoldenVerifyRow& row : result.rows) {
      if (row.comparisons.empty() || row.width != model::Width::kBFloat16) continue;
      TiedCases& tied = out[row.policy];
      ++tied.cases;
      double worst = 0;
      for (const Comparison& comparison : row.comparisons) {
        if (comparison.status == Status::kFail) worst = std::max(worst, comparison.ratio());
        if (comparison.status == Status::kFail && comparison.ratio() > tied.worst) {
          tied.worst = comparison.ratio();
          tied.worst_name = row.golden_case + "/" + comparison.what;
        }
      }
      if (worst > 0) ++tied.over;
    }
  }
  return out;
}

bool fresh_pass(const std::vector<GoldenVerifyResult>& fresh) {
  for (const GoldenVerifyResult& result : fresh) {
    if (!medians_pass(result)) return false;
    for (const GoldenVerifyRow& row : result.rows) {
      for (const Comparison& comparison : row.comparisons) {
        const bool by_rate =
            row.width == model::Width::kBFloat16 && comparison.status == Status::kFail;
        if (is_wrong(comparison) && !by_rate) return false;
      }
    }
  }
  const auto tied = tied_cases(fresh);
  return std::all_of(tied.begin(), tied.end(), [](const auto& one) { return one.second.pass(); });
}

void verify_hashes(const GoldenVerifyPlan& plan) {
  for (const std::string& name : plan.cases) golden::find_entry(plan.data, name);
  for (const golden::ManifestEntry& entry : golden::read_manifest(plan.data)) {
    if (wanted(plan, entry.name)) golden::verify_entry(plan.data, entry);
  }
}

GoldenVerifyResult verify_goldens(const GoldenVerifyPlan& plan,
                                  const std::function<void(std::string_view)>& say) {
  std::vector<std::string> policies = plan.policies;
  if (policies.empty()) policies = {"float64", "float32", "hf-bf16", "hf-bf16/replay"};
  for (const std::string& policy : policies) model::Numerics::policy(named(policy).policy);
  verify_hashes(plan);
  GoldenVerifyResult result;
  std::map<model::Width, std::vector<golden::RatioRow>> ratios, replayed;
  for (const golden::ManifestEntry& entry : golden::read_manifest(plan.data)) {
    if (!wanted(plan, entry.name)) continue;
    const golden::GoldenCase stored(plan.data / entry.file);
    if (!is_model_case(stored)) {
      GoldenVerifyRow row;
      row.golden_case = entry.name;
      row.skipped = "an operator case, checked by the unit tests";
      result.rows.push_back(std::move(row));
      continue;
    }
    const Workload work = golden_workload(stored);
    std::vector<Tensor> choice;
    for (const std::string& policy : policies) {
      RunSpec run = named(policy);
      run.device = plan.device;
      run.grads = true;
      run.trace = "*";
      // The patched reference carries a selection further than transformers does.
      if (stored.carried_selection()) run.numerics.emplace_back("D41", "carry");
      if (!run.replay.empty() && choice.empty()) {
        RunSpec own = run;
        own.policy = "float64";
        std::erase(own.numerics, std::pair<std::string, std::string>("D68", "replay"));
        own.grads = false;
        own.trace = kExpertsTrace;
        choice =
            expert_choice(execute_run(own, work, parallel::Mesh::single()), work.source->config());
      }
      const RunOutput output = execute_run(run,
                                           work,
                                           parallel::Mesh::single(),
                                           {},
                                           run.replay.empty() ? std::vector<Tensor>{} : choice);
      const Side left{policy, &run, &output, nullptr},
          right{"golden:" + entry.name + "/f64", nullptr, nullptr, &stored};
      const model::Width width = numerics_of(run).width();
      GoldenVerifyRow row;
      row.golden_case = entry.name;
      row.policy = policy;
      row.width = width;
      for (const char* what : {"logits", "logprobs", "loss", "grads", "trace:*"}) {
        CompareSpec spec;
        spec.what = what;
        spec.golden_limit = true;
        row.comparisons.push_back(compare_sides(spec, left, right));
      }
      const bool replays = !run.replay.empty();
      add_ratios(row, stored, width, replays, replays ? replayed[width] : ratios[width]);
      say(fmt::format("{} {}: {:.1f} s", entry.name, policy, output.seconds));
      result.rows.push_back(std::move(row));
    }
  }
  result.f64 = golden::summarize_ratios(ratios[model::Width::kFloat64]);
  result.f32 = golden::summarize_ratios(ratios[model::Width::kFloat32]);
  result.bf16 = golden::summarize_ratios(ratios[model::Width::kBFloat16]);
  result.bf16_replay = golden::summarize_ratios(replayed[model::Width::kBFloat16]);
  return result;
}

}  // namespace lockstep::harness
