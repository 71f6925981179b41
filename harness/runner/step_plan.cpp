#include "harness/runner/step_plan.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "parallel/plan/footprint.hpp"
#include "parallel/plan/token_plan.hpp"
#include "parallel/plan/traffic.hpp"

namespace lockstep::harness {
namespace {

using Json = nlohmann::ordered_json;
using parallel::Circle;
using parallel::Footprint;
using parallel::Traffic;

struct Rank {
  parallel::Coordinates place;
  int64_t first_token = 0, tokens = 0;
  std::vector<Footprint> held;
  int64_t gathered = 0;
  std::vector<Traffic> moved;
};

/// "1.50 MiB"; bytes below one KiB as they are.
std::string bytes_text(int64_t bytes) {
  constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB", "PiB"};
  if (bytes < 1024) return fmt::format("{} B", bytes);
  double value = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  return fmt::format("{:.2f} {}", value, kUnits[unit]);
}

Footprint sum_of(const std::vector<Footprint>& held) {
  Footprint sum;
  for (const Footprint& f : held) {
    sum.elements += f.elements;
    sum.parameters += f.parameters;
    sum.gradients += f.gradients;
    sum.optimizer += f.optimizer;
  }
  return sum;
}

int64_t total_of(const Rank& rank) {
  const Footprint sum = sum_of(rank.held);
  return sum.parameters + sum.gradients + sum.optimizer + rank.gathered;
}

/// The sets of ranks of a circle, by first member.
std::vector<std::vector<int64_t>> groups_of(const model::Topology& topology, Circle circle) {
  std::vector<std::vector<int64_t>> groups;
  for (int64_t rank = 0; rank < topology.num_ranks(); ++rank) {
    std::vector<int64_t> ranks = parallel::members(topology, circle, rank);
    if (ranks.front() == rank) groups.push_back(std::move(ranks));
  }
  return groups;
}

Rank plan_rank(const StepPlanInput& in, int64_t rank) {
  const parallel::StepPlan step{.config = in.config,
                                .num = in.num,
                                .topology = in.topology,
                                .batch = in.batch,
                                .cp_cuts = in.cp_cuts,
                                .recompute = in.recompute,
                                .balance = false,
                                .routes = {}};
  Rank result;
  result.place = parallel::coordinates(in.topology, rank);
  const parallel::TokenPlan tokens = step.tokens(rank);
  result.first_token = tokens.begin;
  result.tokens = tokens.end - tokens.begin;
  result.held = parallel::footprint(in.config, in.num, in.topology, rank);
  result.gathered = parallel::gathered_bytes(in.config, in.num, in.topology, rank);
  result.moved = parallel::step_traffic(step, rank);
  return result;
}

std::string mesh_text(const StepPlanInput& in, const std::vector<Rank>& ranks) {
  std::string text =
      fmt::format("  {:>5} {:>4} {:>4} {:>4} {:>4} {:>4} {:>12} {:>12} {:>12} {:>12}\n",
                  "rank",
                  "dp",
                  "fsdp",
                  "cp",
                  "tp",
                  "ep",
                  "expert fsdp",
                  "first token",
                  "tokens",
                  "bytes held");
  for (size_t r = 0; r < ranks.size(); ++r) {
    const parallel::Coordinates& c = ranks[r].place;
    text += fmt::format("  {:>5} {:>4} {:>4} {:>4} {:>4} {:>4} {:>12} {:>12} {:>12} {:>12}\n",
                        r,
                        c.dp,
                        c.fsdp,
                        c.cp,
                        c.tp,
                        c.ep,
                        c.expert_shard,
                        ranks[r].first_token,
                        ranks[r].tokens,
                        bytes_text(total_of(ranks[r])));
  }
  if (ranks.size() > 1) text += "  who talks to whom:\n";
  for (const Circle circle : parallel::kCircles) {
    const auto groups = groups_of(in.topology, circle);
    if (groups.size() == ranks.size()) continue;
    text += fmt::format("    {:<12}", parallel::circle_name(circle));
    for (const auto& group : groups) text += fmt::format(" {{{}}}", fmt::join(group, " "));
    text += '\n';
  }
  return text;
}

std::string memory_text(const std::vector<Rank>& ranks) {
  const auto fullest =
      std::max_element(ranks.begin(), ranks.end(), [](const auto& a, const auto& b) {
        return total_of(a) < total_of(b);
      });
  const auto line = [](std::string_view what, const Footprint& f) {
    return fmt::format("  {:<20} {:>14} {:>12} {:>12} {:>12}\n",
                       what,
                       f.elements,
                       bytes_text(f.parameters),
                       bytes_text(f.gradients),
                       bytes_text(f.optimizer));
  };
  std::string text =
      fmt::format("  bytes held by rank {}, the fullest:\n  {:<20} {:>14} {:>12} {:>12} {:>12}\n",
                  fullest - ranks.begin(),
                  "",
                  "elements",
                  "parameters",
                  "gradients",
                  "optimizer");
  for (const Footprint& f : fullest->held) text += line(f.category, f);
  text += line("all", sum_of(fullest->held));
  if (fullest->gathered > 0)
    text += fmt::format(
        "  {:<20} {:>14} {:>12}\n", "gathered, at most", "", bytes_text(fullest->gathered));
  return text;
}

std::string traffic_text(const std::vector<Rank>& ranks) {
  struct Sum {
    int64_t calls = 0, most = 0, all = 0;
  };
  std::vector<std::pair<std::pair<Circle, std::string>, Sum>> lines;
  for (const Rank& rank : ranks) {
    for (const Traffic& t : rank.moved) {
      const std::pair<Circle, std::string> key(t.circle, t.what);
      auto found = std::find_if(
          lines.begin(), lines.end(), [&](const auto& line) { return line.first == key; });
      if (found == lines.end()) found = lines.insert(lines.end(), {key, {}});
      Sum& sum = found->second;
      sum.calls = std::max(sum.calls, t.calls);
      sum.most = std::max(sum.most, t.bytes_sent);
      sum.all += t.bytes_sent;
    }
  }
  if (lines.empty()) return "  one rank moves nothing\n";
  std::stable_sort(lines.begin(), lines.end(), [](const auto& a, const auto& b) {
    return a.first.first < b.first.first;
  });
  std::string text = fmt::format(
      "  bytes sent in a step, forward and backward:\n  {:<12} {:<22} {:>7} {:>14} {:>14}\n",
      "axis",
      "",
      "calls",
      "by one rank",
      "by all");
  for (const auto& [key, sum] : lines)
    text += fmt::format("  {:<12} {:<22} {:>7} {:>14} {:>14}\n",
                        parallel::circle_name(key.first),
                        key.second,
                        sum.calls,
                        bytes_text(sum.most),
                        bytes_text(sum.all));
  return text;
}

Json rank_json(size_t number, const Rank& rank) {
  Json held = Json::array(), moved = Json::array();
  for (const Footprint& f : rank.held)
    held.push_back({{"category", f.category},
                    {"elements", f.elements},
                    {"parameter_bytes", f.parameters},
                    {"gradient_bytes", f.gradients},
                    {"optimizer_bytes", f.optimizer}});
  for (const Traffic& t : rank.moved)
    moved.push_back({{"axis", parallel::circle_name(t.circle)},
                     {"what", t.what},
                     {"calls", t.calls},
                     {"bytes_sent", t.bytes_sent},
                     {"bytes_received", t.bytes_received}});
  return {{"rank", number},
          {"dp", rank.place.dp},
          {"fsdp", rank.place.fsdp},
          {"cp", rank.place.cp},
          {"tp", rank.place.tp},
          {"ep", rank.place.ep},
          {"expert_fsdp", rank.place.expert_shard},
          {"first_token", rank.first_token},
          {"tokens", rank.tokens},
          {"memory", held},
          {"gathered_bytes", rank.gathered},
          {"traffic", moved}};
}

}  // namespace

StepPlanText describe_step(const StepPlanInput& input) {
  model::validate(input.topology);
  if (const auto reason = parallel::cp_blocker(input.topology, input.batch, input.cp_cuts))
    fail(ErrorKind::kMesh, "plan: {} is blocked: {}", model::to_string(input.topology), *reason);
  std::vector<Rank> ranks;
  for (int64_t rank = 0; rank < input.topology.num_ranks(); ++rank)
    ranks.push_back(plan_rank(input, rank));
  StepPlanText plan;
  plan.text = mesh_text(input, ranks);
  if (input.topology.cp > 1)
    plan.text += fmt::format("  nothing blocks cp = {} on this batch\n", input.topology.cp);
  plan.text += memory_text(ranks) + traffic_text(ranks);
  Json list = Json::array(), circles = Json::object();
  for (size_t r = 0; r < ranks.size(); ++r) list.push_back(rank_json(r, ranks[r]));
  for (const Circle circle : parallel::kCircles)
    circles[std::string(parallel::circle_name(circle))] = groups_of(input.topology, circle);
  plan.json = Json{
      {"topology", model::to_string(input.topology)},
      {"num_ranks", input.topology.num_ranks()},
      {"num_tokens", input.batch.global_tokens()},
      {"num_documents", input.batch.num_documents()},
      {"groups", circles},
      {"ranks",
       list}}.dump(2);
  return plan;
}

}  // namespace lockstep::harness
