#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <filesystem>

#include "harness/cli/begin_report.hpp"
#include "harness/cli/commands.hpp"
#include "harness/cli/errors.hpp"
#include "harness/cli/ranks.hpp"
#include "harness/launch/mpi_start.hpp"
#include "harness/launch/workload.hpp"
#include "harness/runner/execute.hpp"
#include "harness/runner/plan.hpp"
#include "harness/runner/progress.hpp"
#include "harness/runner/run_output.hpp"
#include "harness/runner/runner.hpp"
#include "reports/writer/writer.hpp"

namespace lockstep::harness {
namespace {

namespace fs = std::filesystem;

bool wanted(const ScenarioSet& set, const std::vector<std::string>& tags) {
  return tags.empty() || std::any_of(tags.begin(), tags.end(), [&](const std::string& tag) {
           return std::find(set.tags.begin(), set.tags.end(), tag) != set.tags.end();
         });
}

std::vector<ScenarioSet> load_all(const RunOptions& options) {
  std::vector<ScenarioSet> sets;
  std::vector<std::string> tags;
  for (const fs::path& file : find_scenarios(options.paths)) {
    ScenarioSet set = load_scenario(file, options.sets);
    tags.insert(tags.end(), set.tags.begin(), set.tags.end());
    if (!wanted(set, options.tags)) continue;
    for (const ScenarioSet& other : sets) {
      LOCKSTEP_CHECK(other.name != set.name,
                     kInput,
                     "run: {} and {} are both named '{}', and result folders carry the name; "
                     "change `name` in one of them",
                     other.file.string(),
                     set.file.string(),
                     set.name);
    }
    sets.push_back(std::move(set));
  }
  std::sort(tags.begin(), tags.end());
  tags.erase(std::unique(tags.begin(), tags.end()), tags.end());
  LOCKSTEP_CHECK(!sets.empty(),
                 kInput,
                 "run: no scenario has a tag of --tag; tags there are: {}",
                 tags.empty() ? "none" : fmt::format("{}", fmt::join(tags, ", ")));
  return sets;
}

/// Of the largest run where runs start their own ranks: the others have no rank that waits.
int64_t most_ranks(const std::vector<ScenarioSet>& sets, const parallel::Session& session) {
  int64_t most = session.world().size();
  if (session.under_mpi()) return most;
  for (const ScenarioSet& set : sets) {
    for (const ScenarioPoint& point : set.points) {
      for (const RunSpec& run : point.scenario.runs) most = std::max(most, run.num_ranks());
    }
  }
  return most;
}

/// Without progress lines, scenarios that could not be finished are told here.
void tell_errors(const Report& report) {
  for (const ScenarioResult& scenario : report.scenarios) {
    if (scenario.status != Status::kError) continue;
    const Failure failure{scenario.error_kind.value_or(ErrorKind::kInternal),
                          fmt::format("scenario {}: {}", scenario.name, scenario.reason)};
    std::fputs(error_block(failure, "run").c_str(), stderr);
  }
}

int run_on_rank(const RunOptions& options,
                const Context& context,
                const parallel::Session& session) {
  const std::vector<ScenarioSet> sets = load_all(options);
  const bool first = session.world().rank() == 0;
  check_hang_rank(most_ranks(sets, session));
  if (options.dry_run) {
    std::string text, list;
    for (const ScenarioSet& set : sets) {
      const ScenarioPlan plan = describe_plan(set, session);
      text += plan.text;
      list += fmt::format("{}{}", list.empty() ? "" : ",\n", plan.json);
    }
    if (!first) return 0;
    if (context.json) {
      print(fmt::format("{{\"scenarios\": [\n{}\n]}}\n", list));
    } else if (!context.quiet) {
      print(text);
    }
    return 0;
  }
  // A mistake in the last file should not cost the time of the first ones.
  for (const ScenarioSet& set : sets) check_scenario(set, session);
  if (first) check_writable(options.out, "run");
  const auto start = std::chrono::steady_clock::now();
  Progress progress(context.quiet || !first ? Progress::Mode::kQuiet : Progress::Mode::kAuto);
  Report report = begin_report(context);
  report.title = sets.size() == 1 ? sets.front().name : fmt::format("{} scenarios", sets.size());
  RunnerOptions runner;
  runner.out = options.out;
  runner.sets = options.sets;
  runner.session = &session;
  runner.progress = &progress;
  for (const ScenarioSet& set : sets) report.scenarios.push_back(run_scenario(set, runner));
  report.seed = sets.front().points.front().scenario.model.seed;
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  conclude(report);
  if (!first) return 0;
  reports::write(report, options.out);
  progress.clear();
  if (context.quiet) tell_errors(report);
  if (context.json) {
    print(to_json(report) + "\n");
  } else {
    print(fmt::format("{}\nreport: {}\n", report.verdict, (options.out / "report.html").string()));
  }
  return report.exit_code;
}

}  // namespace

int run_command_run(const RunOptions& given, const Context& context) {
  RunOptions options = given;
  if (options.comm_timeout_ms > 0) {
    options.sets.push_back(fmt::format("comm_timeout_ms={}", options.comm_timeout_ms));
    parallel::set_comm_timeout_ms(options.comm_timeout_ms);
  }
  return on_ranks(context, "run", [&](const parallel::Session& session) {
    return run_on_rank(options, context, session);
  });
}

int run_command_worker(const WorkerOptions& options, const Context& context) {
  parallel::set_comm_timeout_ms(options.comm_timeout_ms);
  return on_ranks(context, "worker", [&](const parallel::Session& session) {
    const ScenarioSet set = load_scenario(options.scenario, options.sets);
    LOCKSTEP_CHECK(options.point >= 0 && options.point < static_cast<int64_t>(set.points.size()),
                   kInternal,
                   "worker: point {} of {}",
                   options.point,
                   set.points.size());
    const Scenario& scenario = set.points[static_cast<size_t>(options.point)].scenario;
    const RunSpec* run = scenario.find_run(options.run);
    LOCKSTEP_CHECK(run != nullptr, kInternal, "worker: no run {}", options.run);
    parallel::set_comm_timeout_ms(scenario.comm_timeout_ms);
    const bool first = session.world().rank() == 0;
    const Workload work = load_workload(scenario);
    const RunOutput output = execute_run(
        *run,
        work,
        session.world(),
        [&](int64_t done, int64_t total, const char*) {
          if (first) print(fmt::format("step {} {}\n", done, total));
        },
        replay_from(options.replay, *work.source));
    if (first) save_run(options.out, *run, output);
    return 0;
  });
}

int run_command_report(const ReportOptions& options, const Context& context) {
  const Report report = reports::rebuild(options.folder);
  if (context.json) {
    print(to_json(report) + "\n");
  } else if (!context.quiet) {
    print(
        fmt::format("{}\nreport: {}\n", report.verdict, (options.folder / "report.html").string()));
  }
  return 0;
}

}  // namespace lockstep::harness
