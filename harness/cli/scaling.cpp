#include "harness/runner/scaling.hpp"

#include <cstdlib>
#include <nlohmann/json.hpp>
#include <numeric>

#include "harness/cli/commands.hpp"
#include "harness/cli/ranks.hpp"
#include "harness/launch/available.hpp"
#include "harness/launch/mpi_start.hpp"
#include "harness/result/result.hpp"
#include "harness/runner/progress.hpp"

namespace lockstep::harness {
namespace {

using Json = nlohmann::ordered_json;

Json to_json(const std::vector<ScalingRow>& rows, const ScalingPlan& plan) {
  const Environment here = local_environment();
  const char* comm = std::getenv("LOCKSTEP_COMM");
  Json list = Json::array();
  for (const ScalingRow& row : rows) {
    list.push_back({{"series", row.weak ? "weak" : "strong"},
                    {"axis", row.axis},
                    {"topology", model::to_string(row.task.topology)},
                    {"ranks", row.task.topology.num_ranks()},
                    {"documents", row.task.documents},
                    {"efficiency", row.efficiency},
                    {"comm_share", row.time.comm_seconds() / row.time.seconds}});
    list.back().update(Json::parse(to_line(row.time)));
  }
  return {{"commit", here.git_commit},
          {"cpu", here.cpu_model},
          {"cores", here.cores},
          {"mpi", mpi_version()},
          {"comm", comm != nullptr ? comm : "mpi"},
          {"preset", plan.preset},
          {"policy", plan.policy},
          {"threads_per_rank", plan.threads},
          {"repeats", plan.repeats},
          {"rows", list}};
}

std::string megabytes(double bytes) { return fmt::format("{:.2f}", bytes / (1 << 20)); }

void print_table(const std::vector<ScalingRow>& rows) {
  const ScalingRow* before = nullptr;
  for (const ScalingRow& row : rows) {
    if (before == nullptr || before->axis != row.axis || before->weak != row.weak) {
      print(
          fmt::format("\n{} scaling over {}\n{:>22} {:>9} {:>8} {:>10} {:>9}  MB sent by a rank, "
                      "share of time by axis\n",
                      row.weak ? "weak" : "strong",
                      row.axis,
                      "topology",
                      "tokens",
                      "s/step",
                      "efficiency",
                      "in calls"));
    }
    before = &row;
    const auto& lengths = row.task.documents;
    std::string line = fmt::format("{:>22} {:>9} {:>8.3f} {:>9.0f}% {:>8.1f}%",
                                   model::to_string(row.task.topology),
                                   std::accumulate(lengths.begin(), lengths.end(), int64_t{0}),
                                   row.time.seconds,
                                   100 * row.efficiency,
                                   100 * row.time.comm_seconds() / row.time.seconds);
    for (const AxisTime& axis : row.time.axes) {
      line += fmt::format("  {} {} {:.1f}%",
                          axis.axis,
                          megabytes(axis.bytes_sent),
                          100 * axis.seconds / row.time.seconds);
    }
    print(line + (row.time.as_planned ? "\n" : "  BYTES ARE NOT THOSE OF `lockstep plan`\n"));
  }
}

}  // namespace

int run_command_scaling(const BenchOptions& options, const Context& context) {
  LOCKSTEP_CHECK(!under_mpi_launcher(),
                 kConfig,
                 "bench --scaling starts its ranks itself; run it without mpirun (LOCKSTEP_MPIRUN "
                 "names a launcher of your own)");
  LOCKSTEP_CHECK(options.tokens.size() <= 1,
                 kInput,
                 "bench --scaling: --tokens is the number of tokens of a rank; got {} numbers",
                 options.tokens.size());
  LOCKSTEP_CHECK(options.tokens.empty() || options.tokens.front() <= kMostTokens,
                 kInput,
                 "bench --scaling: --tokens {}: use at most {}",
                 options.tokens.front(),
                 kMostTokens);
  ScalingPlan plan;
  plan.preset = options.preset;
  plan.policy = options.policy;
  plan.ranks = options.ranks;
  plan.threads = options.threads;
  plan.repeats = options.repeats;
  if (!options.tokens.empty()) plan.tokens_per_rank = options.tokens.front();
  plan.tokens = options.total_tokens > 0 ? options.total_tokens : 4 * plan.tokens_per_rank;
  Progress progress(context.quiet ? Progress::Mode::kQuiet : Progress::Mode::kAuto);
  const std::vector<ScalingRow> rows =
      run_scaling(plan, [&](std::string_view line) { progress.line(line); });
  bool as_planned = true;
  for (const ScalingRow& row : rows) as_planned = as_planned && row.time.as_planned;
  if (context.json) {
    print(to_json(rows, plan).dump(2) + "\n");
  } else {
    print_table(rows);
  }
  return as_planned ? 0 : 1;
}

int run_command_step_worker(const StepWorkerOptions& options, const Context& context) {
  return on_ranks(context, "step-worker", [&](const parallel::Session& session) {
    StepTask task;
    task.preset = options.preset;
    task.topology = model::parse_topology(options.topology);
    task.documents = options.documents;
    task.numerics = model::Numerics::policy(options.policy);
    task.repeats = options.repeats;
    const StepTime time = time_step(task, session.world());
    if (session.world().rank() == 0) print(to_line(time) + "\n");
    return 0;
  });
}

}  // namespace lockstep::harness
