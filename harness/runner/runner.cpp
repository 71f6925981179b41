#include "harness/runner/runner.hpp"

#include <algorithm>
#include <chrono>
#include <memory>

#include "harness/launch/mpi_start.hpp"
#include "harness/launch/paths.hpp"
#include "harness/launch/workload.hpp"
#include "harness/runner/compare_runs.hpp"
#include "harness/runner/execute.hpp"
#include "harness/runner/plan.hpp"
#include "harness/runner/run_output.hpp"
#include "harness/runner/sweep_series.hpp"
#include "harness/trainer/dtype_audit.hpp"

namespace lockstep::harness {
namespace {

namespace fs = std::filesystem;

/// The inputs of a run as text: equal text, equal results.
std::string fingerprint(const Scenario& scenario, const RunSpec& run) {
  const ModelSpec& m = scenario.model;
  std::string text = fmt::format("{}|{}|{}|{}|{}|{}|",
                                 m.preset,
                                 m.checkpoint.string(),
                                 m.golden,
                                 m.seed,
                                 static_cast<int>(m.defaults),
                                 m.decay_bias);
  for (const auto& [key, value] : m.overrides) text += fmt::format("{}={}|", key, value);
  for (const int64_t length : scenario.data.documents) text += fmt::format("{},", length);
  text += fmt::format("|{}|{}|{}|{}|{}|{}|{}|{}|{}|{}|{}|{}|{}|{}|",
                      scenario.data.file.string(),
                      scenario.data.seed,
                      run.engine,
                      run.policy,
                      run.device,
                      run.trace,
                      run.grads,
                      run.recompute,
                      run.reference_ops,
                      run.stream_layers,
                      run.decode,
                      run.prefill_chunk,
                      run.page_size,
                      model::to_string(run.topology));
  for (const auto& [id, value] : run.numerics) text += fmt::format("{}={}|", id, value);
  for (const int64_t cut : run.cp_cuts) text += fmt::format("{};", cut);
  text += fmt::format("|{}|", run.train_steps);
  if (!run.trainer.empty()) text += "|" + fingerprint(scenario, run.trainer.front());
  if (!run.replay.empty()) text += "|" + fingerprint(scenario, *scenario.find_run(run.replay));
  return text;
}

std::string suffixed(const std::string& name, const std::string& label) {
  return label.empty() ? name : fmt::format("{} [{}]", name, label);
}

/// State of one scenario while it runs.
class ScenarioRun {
 public:
  ScenarioRun(const ScenarioSet& set, const RunnerOptions& options)
      : set_(set), options_(options), world_(options.session->world()) {
    result_.name = set.name;
    result_.description = set.description;
    result_.file = set.file.string();
    result_.tags = set.tags;
  }

  ScenarioResult run();

 private:
  void run_point(const ScenarioPoint& point, size_t index);
  RunOutput obtain(const ScenarioPoint& point,
                   size_t index,
                   const RunSpec& run,
                   const Workload& work);
  RunOutput compute(const ScenarioPoint& point,
                    size_t index,
                    const RunSpec& run,
                    const Workload& work,
                    const fs::path& folder);
  void compare_point(const ScenarioPoint& point, const std::map<std::string, RunOutput>& outputs);
  void record_run(const ScenarioPoint& point,
                  const RunSpec& run,
                  const Workload& work,
                  const RunOutput& output);
  void fail_scenario(const Error& error);
  /// Of a sweep, only points with the last value of the first key (the longest document, say) get
  /// charts along positions and layers; all of them in one chart would be read by nobody.
  [[nodiscard]] bool charted(const ScenarioPoint& point) const {
    return point.values.empty() ||
           point.values.front().value == set_.points.back().values.front().value;
  }
  void add_series(Series series) {
    const bool known =
        std::any_of(result_.series.begin(), result_.series.end(), [&](const Series& other) {
          return other.chart == series.chart && other.name == series.name;
        });
    if (!known) result_.series.push_back(std::move(series));
  }
  /// One rank's failure becomes everyone's, so that all ranks take the same way on.
  void agree(std::optional<Error> error);
  void say(const std::string& text) const {
    if (world_.rank() == 0 && options_.progress != nullptr) options_.progress->line(text);
  }

  const ScenarioSet& set_;
  const RunnerOptions& options_;
  const parallel::Group& world_;
  ScenarioResult result_;
  std::map<std::string, fs::path> done_;  ///< fingerprint -> folder of the finished run
  SweepCollector sweep_;
};

void ScenarioRun::fail_scenario(const Error& error) {
  result_.status = Status::kError;
  result_.reason = error.what();
  result_.error_kind = error.kind();
  say(fmt::format("  error: {}", error.what()));
}

void ScenarioRun::agree(std::optional<Error> error) {
  if (world_.size() > 1) {
    const parallel::PatientWaits patient;  // one rank may compute for long
    const int64_t worst = world_.all_reduce_max(error ? static_cast<int64_t>(error->kind()) + 1 : 0,
                                                "state of the run");
    if (worst != 0 && !error) {
      throw Error(static_cast<ErrorKind>(worst - 1), "another rank failed; rank 0 reports why");
    }
  }
  if (error) throw *error;
}

RunOutput ScenarioRun::compute(const ScenarioPoint& point,
                               size_t index,
                               const RunSpec& run,
                               const Workload& work,
                               const fs::path& folder) {
  const int64_t ranks = run.num_ranks();
  const StepCallback step = [&](int64_t done, int64_t total, const char* what) {
    if (world_.rank() == 0 && options_.progress != nullptr)
      options_.progress->step(done, total, what);
  };
  parallel::set_comm_timeout_ms(point.scenario.comm_timeout_ms);
  const fs::path replayed =
      run.replay.empty()
          ? fs::path()
          : done_.at(fingerprint(point.scenario, *point.scenario.find_run(run.replay)));
  if (ranks == 1) {
    std::optional<Error> error;
    RunOutput output;
    if (world_.rank() == 0) {
      try {
        output = execute_run(
            run, work, parallel::Group::single(), step, replay_from(replayed, *work.source));
        save_run(folder, run, output);
      } catch (const Error& caught) {
        error = caught;
      }
    }
    agree(error);
    return output;
  }
  check_topology(run, work.source->config());
  if (options_.session->under_mpi()) {
    const RunOutput output =
        execute_run(run, work, world_, step, replay_from(replayed, *work.source));
    if (world_.rank() == 0) save_run(folder, run, output);
    agree(std::nullopt);
    return output;
  }
  std::vector<std::string> arguments = {"worker",
                                        "--scenario",
                                        set_.file.string(),
                                        "--point",
                                        std::to_string(index),
                                        "--comm-timeout-ms",
                                        std::to_string(point.scenario.comm_timeout_ms),
                                        "--run",
                                        run.name,
                                        "--out",
                                        folder.string()};
  if (!replayed.empty()) arguments.insert(arguments.end(), {"--replay", replayed.string()});
  for (const std::string& set : options_.sets) {
    arguments.emplace_back("--set");
    arguments.push_back(set);
  }
  const Outcome outcome = run_ranks(ranks, arguments, [&](std::string_view line) {
    int done = 0, total = 0;
    if (std::sscanf(std::string(line).c_str(), "step %d %d", &done, &total) == 2)
      step(done, total, "layers");
  });
  if (outcome.exit_code != 0) {
    const std::string told = own_errors(outcome.errors);
    constexpr ErrorKind kByCode[] = {ErrorKind::kInternal,
                                     ErrorKind::kInternal,
                                     ErrorKind::kInput,
                                     ErrorKind::kComm,
                                     ErrorKind::kGolden,
                                     ErrorKind::kInternal};
    // A rank killed by a signal is a peer that died.
    const ErrorKind kind =
        outcome.exit_code >= 128 ? ErrorKind::kComm : kByCode[std::min(outcome.exit_code, 5)];
    throw Error(kind,
                fmt::format("run {}: its {} ranks ended with exit code {}: {}",
                            run.name,
                            ranks,
                            outcome.exit_code,
                            told.empty() ? outcome.errors : told));
  }
  return load_run(folder);
}

RunOutput ScenarioRun::obtain(const ScenarioPoint& point,
                              size_t index,
                              const RunSpec& run,
                              const Workload& work) {
  const std::string key = fingerprint(point.scenario, run);
  if (const auto known = done_.find(key); known != done_.end()) {
    return world_.rank() == 0 ? load_run(known->second) : RunOutput{};
  }
  fs::path folder = options_.out / "runs" / set_.name;
  if (set_.points.size() > 1) folder /= fmt::format("point{}", index);
  folder /= run.name;
  const std::string what = suffixed(run.name, point.label());
  if (options_.progress != nullptr) options_.progress->start("  " + what);
  RunOutput output = compute(point, index, run, work, folder);
  done_[key] = folder;
  if (options_.progress != nullptr) options_.progress->clear();
  say(fmt::format("  run {}: {}, {}, {} tokens, {:.2f} s",
                  what,
                  numerics_of(run).name(),
                  model::to_string(run.topology),
                  output.tokens,
                  output.seconds));
  for (const std::string& warning : output.warnings) say(fmt::format("  warning: {}", warning));
  const std::string less = stored_in_less(*work.source, numerics_of(run));
  if (!less.empty()) say(fmt::format("  note: {}", less));
  return output;
}

void ScenarioRun::record_run(const ScenarioPoint& point,
                             const RunSpec& run,
                             const Workload& work,
                             const RunOutput& output) {
  RunRecord record = begin_record(run);
  record.name = suffixed(run.name, point.label());
  record.ranks = output.ranks;
  record.checkpoint = work.checkpoint;
  for (const auto& [key, value] : work.provenance) record.provenance.push_back({key, value});
  const std::string less = stored_in_less(*work.source, numerics_of(run));
  if (!less.empty()) record.provenance.push_back({"note", less});
  record.seconds = output.seconds;
  record.tokens = output.tokens;
  record.peak_bytes = output.peak_bytes;
  record.measures = {{"loss", output.loss, "nat"},
                     {"forward", output.forward_s, "s"},
                     {"targets", static_cast<double>(output.num_targets), "tokens"}};
  if (!run.trainer.empty()) {
    record.measures.push_back({"synchronised", static_cast<double>(output.sync_bytes), "B"});
    record.measures.push_back({"synchronisation", output.sync_s, "s"});
  }
  if (run.grads) record.measures.push_back({"backward", output.backward_s, "s"});
  // Comparisons count a NaN on both sides as equal; such a run must not pass for that.
  if (!output.warnings.empty()) {
    record.status = Status::kFail;
    record.reason = output.warnings.front();
  }
  result_.runs.push_back(std::move(record));
}

void ScenarioRun::compare_point(const ScenarioPoint& point,
                                const std::map<std::string, RunOutput>& outputs) {
  std::map<std::string, std::unique_ptr<golden::GoldenCase>> stored;
  const auto side_of = [&](const std::string& text) {
    Side side;
    if (const auto ref = parse_golden_ref(text, point.scenario.model)) {
      auto& opened = stored[ref->golden_case];
      if (!opened) {
        opened = std::make_unique<golden::GoldenCase>(
            golden::open_golden(golden_folder(), ref->golden_case));
      }
      side.name = fmt::format("golden:{}/{}", ref->golden_case, ref->reference);
      side.stored = opened.get();
    } else {
      side.name = text;
      side.spec = point.scenario.find_run(text);
      side.run = &outputs.at(text);
    }
    return side;
  };
  for (size_t i = 0; i < point.scenario.compares.size(); ++i) {
    const CompareSpec& spec = point.scenario.compares[i];
    const Side left = side_of(spec.left), right = side_of(spec.right);
    Comparison comparison = compare_sides(spec, left, right);
    sweep_.add(i, spec, point, comparison);
    const std::string label = point.label();
    const std::string legend = suffixed(fmt::format("{} against {}", left.name, right.name), label);
    if (charted(point)) {
      for (Series& series : error_series(spec, left, right, legend)) add_series(std::move(series));
    }
    comparison.left = suffixed(comparison.left, label);
    say(fmt::format(
        "  {} {} against {}: {} {} = {}{}",
        comparison.status == Status::kPass   ? "pass"
        : comparison.status == Status::kFail ? "FAIL"
                                             : name(comparison.status),
        comparison.left,
        comparison.right,
        comparison.what,
        comparison.metric,
        format_number(comparison.value),
        comparison.limit ? fmt::format(" (limit {})", format_number(*comparison.limit)) : ""));
    result_.comparisons.push_back(std::move(comparison));
  }
}

void ScenarioRun::run_point(const ScenarioPoint& point, size_t index) {
  result_.phase = Phase::kLoad;
  const Workload work = load_workload(point.scenario);
  result_.phase = Phase::kRun;
  std::map<std::string, RunOutput> outputs;
  for (const RunSpec& run : point.scenario.runs) {
    outputs[run.name] = obtain(point, index, run, work);
    record_run(point, run, work, outputs[run.name]);
  }
  result_.phase = Phase::kCompare;
  std::optional<Error> error;
  if (world_.rank() == 0) {
    try {
      compare_point(point, outputs);
    } catch (const Error& caught) {
      error = caught;
    }
  }
  agree(error);
}

ScenarioResult ScenarioRun::run() {
  const auto start = std::chrono::steady_clock::now();
  say(fmt::format("{}{}", set_.name, set_.description.empty() ? "" : ": " + set_.description));
  const int expected = set_.points.front().scenario.expected_exit;
  if (expected != 0) result_.expected = fmt::format("exit {}", expected);
  try {
    check_scenario(set_, *options_.session);
    for (size_t i = 0; i < set_.points.size(); ++i) run_point(set_.points[i], i);
    result_.phase = Phase::kRecord;
    for (Series& series : sweep_.series()) result_.series.push_back(std::move(series));
  } catch (const Error& error) {
    if (world_.size() > 1 && error.kind() == ErrorKind::kComm) throw;
    fail_scenario(error);
  }
  result_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (expected == 0) {
    conclude(result_);
  } else {
    ScenarioResult plain = result_;
    plain.expected.clear();
    conclude(plain);
    const int got = exit_code(plain);
    result_.status = got == expected ? Status::kPass : Status::kFail;
    if (got != expected) {
      result_.reason = fmt::format("ended with exit code {} where {} was meant{}{}",
                                   got,
                                   expected,
                                   plain.reason.empty() ? "" : ": ",
                                   plain.reason);
    }
  }
  return std::move(result_);
}

}  // namespace

RunRecord begin_record(const RunSpec& run) {
  RunRecord record;
  record.name = run.name;
  record.engine = run.engine;
  record.policy = run.policy;
  const model::Numerics base = model::Numerics::policy(run.policy), used = numerics_of(run);
  for (const model::Switch s : used.differences(base)) {
    const model::SwitchInfo& info = model::switch_info(s);
    record.numerics.push_back({std::string(info.id),
                               std::string(info.name),
                               std::string(used.value(s)),
                               std::string(base.value(s))});
  }
  record.topology = model::to_string(run.topology);
  record.ranks = run.topology.num_ranks();
  record.device = run.device;
  return record;
}

ScenarioResult run_scenario(const ScenarioSet& set, const RunnerOptions& options) {
  return ScenarioRun(set, options).run();
}

}  // namespace lockstep::harness
