#include "harness/runner/scaling.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "harness/launch/mpi_start.hpp"
#include "harness/trainer/trainer.hpp"
#include "model/config/config_json.hpp"
#include "parallel/comm/ledger.hpp"
#include "parallel/plan/traffic.hpp"

namespace lockstep::harness {
namespace {

using Json = nlohmann::ordered_json;
using parallel::Circle;
using parallel::kCircles;

struct Moved {
  int64_t calls = 0, sent = 0, received = 0;
  double seconds = 0;

  bool same_bytes(const Moved& other) const {
    return calls == other.calls && sent == other.sent && received == other.received;
  }
};
using MovedByCircle = std::map<Circle, Moved>;

MovedByCircle moved_so_far() {
  MovedByCircle moved;
  for (const parallel::LedgerTotals& sum : parallel::ledger_totals()) {
    for (const Circle circle : kCircles) {
      if (sum.group == parallel::circle_name(circle))
        moved[circle] = {sum.calls, sum.bytes_sent, sum.bytes_received, sum.seconds};
    }
  }
  return moved;
}

MovedByCircle difference(MovedByCircle after, const MovedByCircle& before) {
  for (const auto& [circle, was] : before) {
    Moved& m = after[circle];
    m = {
        m.calls - was.calls, m.sent - was.sent, m.received - was.received, m.seconds - was.seconds};
  }
  return after;
}

/// What the formula says of this rank, for the experts that these tokens went to.
MovedByCircle planned(const StepTask& task,
                      const model::ModelConfig& config,
                      const Documents& documents,
                      const TrainerResult& traced,
                      int64_t rank) {
  std::map<int64_t, Tensor> routes;
  for (const auto& [name, experts] : traced.trace)
    routes[std::stoll(name.substr(std::string_view("layers.").size()))] = experts;
  const parallel::StepPlan plan{.config = config,
                                .num = task.numerics,
                                .topology = task.topology,
                                .batch = documents.packing,
                                .cp_cuts = {},
                                .recompute = false,
                                .balance = false,
                                .routes = std::move(routes)};
  MovedByCircle sums;
  for (const parallel::Traffic& line : parallel::step_traffic(plan, rank)) {
    Moved& sum = sums[line.circle];
    sum.calls += line.calls;
    sum.sent += line.bytes_sent;
    sum.received += line.bytes_received;
  }
  return sums;
}

/// [ranks, values] of every rank.
Tensor of_all(const parallel::Group& world, const std::vector<double>& mine) {
  const Tensor local = at::tensor(mine, at::kDouble).unsqueeze(0);
  return world.all_gather_rows(
      local, std::vector<int64_t>(static_cast<size_t>(world.size()), 1), "step times");
}

/// Seconds of a step on this rank, then those in calls of each circle.
std::vector<double> timed(Trainer& trainer, const Documents& documents) {
  const MovedByCircle before = moved_so_far();
  const auto start = std::chrono::steady_clock::now();
  trainer.train_step({documents});
  std::vector<double> values = {
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count()};
  MovedByCircle in_step = difference(moved_so_far(), before);
  for (const Circle circle : kCircles) values.push_back(in_step[circle].seconds);
  return values;
}

std::vector<int64_t> equal_parts(int64_t tokens, int64_t count) {
  return std::vector<int64_t>(static_cast<size_t>(count), tokens / count);
}

}  // namespace

double StepTime::comm_seconds() const {
  double sum = 0;
  for (const AxisTime& axis : axes) sum += axis.seconds;
  return sum;
}

StepTime time_step(const StepTask& task, const parallel::Group& world) {
  const model::ModelConfig config = model::preset_config(task.preset);
  const Documents documents =
      random_documents(task.documents, config.vocab_size, config.pad_token_id.value_or(-1), 1);
  const parallel::Mesh mesh = parallel::Mesh::create(world, task.topology);
  TrainerOptions options;
  options.numerics = task.numerics;
  options.logits = false;
  options.optimizer = parallel::OptimizerOptions{};
  const std::shared_ptr<const model::WeightSource> source = model::seeded_source(config, 0);
  Trainer trainer(source, options, mesh);
  options.optimizer.reset();
  options.trace = "layers.*.mlp.gate.experts";
  const TrainerResult traced = Trainer(source, options, mesh).run(documents);

  // The first step has the weights, so the routes, that were traced.
  const MovedByCircle before = moved_so_far();
  trainer.train_step({documents});
  MovedByCircle moved = difference(moved_so_far(), before);
  MovedByCircle formula = planned(task, config, documents, traced, world.rank());

  StepTime result;
  std::vector<double> bytes;
  bool same = true;
  for (const Circle circle : kCircles) {
    same = same && moved[circle].same_bytes(formula[circle]);
    bytes.push_back(static_cast<double>(moved[circle].sent));
    bytes.push_back(static_cast<double>(formula[circle].sent));
  }
  bytes.push_back(same ? 1 : 0);
  const Tensor all_bytes = of_all(world, bytes);
  result.as_planned = all_bytes.select(1, -1).min().item<double>() == 1;
  const Tensor mean_bytes = all_bytes.mean(0);

  Tensor fastest;
  for (int repeat = 0; repeat < task.repeats; ++repeat) {
    world.barrier("before a timed step");
    const Tensor all = of_all(world, timed(trainer, documents));
    const double seconds = all.select(1, 0).max().item<double>();
    if (repeat > 0 && seconds >= result.seconds) continue;
    result.seconds = seconds;
    fastest = all.mean(0);
  }
  for (size_t i = 0; i < kCircles.size(); ++i) {
    const Circle circle = kCircles[i];
    const auto at = static_cast<int64_t>(i);
    const auto ranks =
        static_cast<int64_t>(parallel::members(task.topology, circle, world.rank()).size());
    if (ranks == 1) continue;
    result.axes.push_back({std::string(parallel::circle_name(circle)),
                           ranks,
                           moved[circle].calls,
                           mean_bytes[2 * at].item<double>(),
                           mean_bytes[2 * at + 1].item<double>(),
                           fastest[at + 1].item<double>()});
  }
  return result;
}

std::string to_line(const StepTime& time) {
  Json axes = Json::array();
  for (const AxisTime& a : time.axes) {
    axes.push_back({{"axis", a.axis},
                    {"ranks", a.ranks},
                    {"calls", a.calls},
                    {"bytes_sent", a.bytes_sent},
                    {"planned_bytes", a.planned_bytes},
                    {"seconds", a.seconds}});
  }
  return Json{{"seconds", time.seconds}, {"as_planned", time.as_planned}, {"axes", axes}}.dump();
}

StepTime step_time_from_line(std::string_view line) {
  const Json json = Json::parse(line);
  StepTime time;
  time.seconds = json.at("seconds");
  time.as_planned = json.at("as_planned");
  for (const Json& a : json.at("axes")) {
    time.axes.push_back({a.at("axis"),
                         a.at("ranks"),
                         a.at("calls"),
                         a.at("bytes_sent"),
                         a.at("planned_bytes"),
                         a.at("seconds")});
  }
  return time;
}

std::vector<ScalingRow> scaling_rows(const ScalingPlan& plan) {
  LOCKSTEP_CHECK(
      !plan.ranks.empty() && plan.ranks.front() == 1 &&
          std::adjacent_find(plan.ranks.begin(), plan.ranks.end(), std::greater_equal<>()) ==
              plan.ranks.end(),
      kConfig,
      "bench --scaling: --ranks {}: give ascending numbers that begin with 1, which all "
      "others are compared with",
      fmt::join(plan.ranks, " "));
  const int64_t most = plan.ranks.back();
  LOCKSTEP_CHECK(plan.tokens_per_rank >= 2 && plan.tokens >= 2 * most && plan.tokens % most == 0,
                 kConfig,
                 "bench --scaling: {} tokens cannot be cut into {} equal documents of 2 or more; "
                 "choose another --total-tokens",
                 plan.tokens,
                 most);
  const int64_t experts = model::preset_config(plan.preset).n_routed_experts;
  std::vector<ScalingRow> rows;
  for (const bool weak : {true, false}) {
    for (const std::string axis : {"fsdp", "ep", "cp"}) {
      for (const int64_t n : plan.ranks) {
        ScalingRow row;
        row.axis = axis;
        row.weak = weak;
        row.task.preset = plan.preset;
        row.task.numerics = model::Numerics::policy(plan.policy);
        row.task.repeats = plan.repeats;
        const int64_t tokens = weak ? n * plan.tokens_per_rank : plan.tokens;
        if (axis == "cp") {
          row.task.topology.cp = n;
          row.task.documents = {tokens};
        } else {
          row.task.topology.fsdp = n;
          if (axis == "ep") row.task.topology.ep = std::gcd(n, experts);
          row.task.documents = equal_parts(tokens, weak ? n : most);
        }
        rows.push_back(std::move(row));
      }
    }
  }
  return rows;
}

std::vector<ScalingRow> run_scaling(const ScalingPlan& plan,
                                    const std::function<void(std::string_view)>& say) {
  std::vector<ScalingRow> rows = scaling_rows(plan);
  double one_rank = 0;
  for (ScalingRow& row : rows) {
    const model::Topology& topology = row.task.topology;
    std::string mesh;
    for (const auto& [name, degree] : {std::pair("fsdp", topology.fsdp),
                                       std::pair("cp", topology.cp),
                                       std::pair("ep", topology.ep)})
      mesh += fmt::format("{}{}={}", mesh.empty() ? "" : ",", name, degree);
    std::string line;
    const Outcome outcome = run_ranks(
        topology.num_ranks(),
        {"step-worker",
         "--topology",
         mesh,
         "--documents",
         fmt::format("{}", fmt::join(row.task.documents, ",")),
         "--preset",
         plan.preset,
         "--policy",
         plan.policy,
         "--repeats",
         std::to_string(plan.repeats)},
        [&](std::string_view text) {
          if (text.starts_with('{')) line = text;
        },
        plan.threads);
    LOCKSTEP_CHECK(outcome.exit_code == 0 && !line.empty(),
                   kComm,
                   "bench --scaling: the {} ranks of {} ended with code {}: {}",
                   topology.num_ranks(),
                   model::to_string(topology),
                   outcome.exit_code,
                   own_errors(outcome.errors));
    row.time = step_time_from_line(line);
    if (topology.num_ranks() == 1) one_rank = row.time.seconds;
    row.efficiency =
        one_rank / row.time.seconds / static_cast<double>(row.weak ? 1 : topology.num_ranks());
    say(fmt::format("{} {}: {:.3f} s, {:.0f}% in calls, efficiency {:.0f}%",
                    row.weak ? "weak" : "strong",
                    model::to_string(topology),
                    row.time.seconds,
                    100 * row.time.comm_seconds() / row.time.seconds,
                    100 * row.efficiency));
  }
  return rows;
}

}  // namespace lockstep::harness
