#include "harness/runner/step_plan.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "harness/runner/flops.hpp"
#include "parallel/checkpoint/distributed_checkpoint.hpp"
#include "parallel/plan/footprint.hpp"
#include "parallel/plan/step_memory.hpp"
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
  MemoryUse memory;
  std::vector<Traffic> moved;
  double flops = 0, compute_s = 0, traffic_s = 0;
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

/// The sets of ranks of a circle, by first member.
std::vector<std::vector<int64_t>> groups_of(const model::Topology& topology, Circle circle) {
  std::vector<std::vector<int64_t>> groups;
  for (int64_t rank = 0; rank < topology.num_ranks(); ++rank) {
    std::vector<int64_t> ranks = parallel::members(topology, circle, rank);
    if (ranks.front() == rank) groups.push_back(std::move(ranks));
  }
  return groups;
}

/// Floating-point operations of a rank: tp shares mixers and MLPs, ep is even.
double flops_of(const StepPlanInput& in, const parallel::TokenPlan& tokens) {
  std::vector<TokenSpan> spans;
  const std::vector<int64_t>& documents = tokens.packing.cu_seqlens();
  const int64_t first = tokens.begin - tokens.row_begin, last = tokens.end - tokens.row_begin;
  for (size_t d = 0; d + 1 < documents.size(); ++d) {
    const int64_t begin = std::max(documents[d], first), end = std::min(documents[d + 1], last);
    if (begin < end) spans.push_back({begin - documents[d], end - documents[d]});
  }
  Flops flops = count_flops(in.config, spans);
  const auto tp = static_cast<double>(in.topology.tp);
  flops.mixers /= tp;
  flops.mlps /= tp;
  return flops.forward_backward() + (in.recompute ? flops.forward() - flops.head : 0);
}

/// Seconds that a rank's bytes take, one call after another; links of a host and of the network
/// work at the same time.
double traffic_seconds(const StepPlanInput& in, const std::vector<Traffic>& moved, int64_t rank) {
  double seconds = 0;
  for (const Traffic& t : moved) {
    const std::vector<int64_t> ranks = parallel::members(in.topology, t.circle, rank);
    const auto near = std::count_if(ranks.begin(), ranks.end(), [&](int64_t peer) {
      return peer != rank && peer / in.ranks_per_host == rank / in.ranks_per_host;
    });
    const auto peers = static_cast<double>(ranks.size() - 1);
    const double share = static_cast<double>(near) / peers,
                 bytes = static_cast<double>(std::max(t.bytes_sent, t.bytes_received));
    seconds += std::max(share * bytes / (in.link * 1e9), (1 - share) * bytes / (in.network * 1e9));
  }
  return seconds;
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
  result.memory = parallel::step_memory(step, parallel::OptimizerKind::kAdamW, rank);
  result.moved = parallel::step_traffic(step, rank);
  result.flops = flops_of(in, tokens);
  result.compute_s = result.flops / (in.tflops * 1e12);
  result.traffic_s = traffic_seconds(in, result.moved, rank);
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
                  "peak bytes");
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
                        bytes_text(ranks[r].memory.peak_total));
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
        return a.memory.peak_total < b.memory.peak_total;
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
  const MemoryUse& use = fullest->memory;
  text += fmt::format(
      "  tensor memory of its step:\n  {:<20} {:>14} {:>12}\n", "", "peak", "at the peak");
  for (const MemoryKind kind : kMemoryKinds) {
    if (use.peak_of(kind) == 0) continue;
    text += fmt::format("  {:<20} {:>14} {:>12}\n",
                        to_string(kind),
                        bytes_text(use.peak_of(kind)),
                        bytes_text(use.at_peak[static_cast<size_t>(kind)]));
  }
  return text + fmt::format("  {:<20} {:>14} {:>12}\n", "all", bytes_text(use.peak_total), "");
}

struct Host {
  std::vector<int64_t> ranks;
  int64_t peak = 0;
};

std::vector<Host> hosts_of(const StepPlanInput& in, const std::vector<Rank>& ranks) {
  std::vector<Host> hosts;
  for (size_t r = 0; r < ranks.size(); ++r) {
    const auto rank = static_cast<int64_t>(r);
    if (rank % in.ranks_per_host == 0) hosts.emplace_back();
    hosts.back().ranks.push_back(rank);
    hosts.back().peak += ranks[r].memory.peak_total;
  }
  return hosts;
}

std::string hosts_text(const std::vector<Host>& hosts) {
  std::string text = "  peak bytes of the ranks of a host:\n";
  for (size_t h = 0; h < hosts.size(); ++h)
    text += fmt::format("    host {:<3} ranks {}-{} {:>14}\n",
                        h,
                        hosts[h].ranks.front(),
                        hosts[h].ranks.back(),
                        bytes_text(hosts[h].peak));
  return text;
}

using Files = std::vector<std::pair<std::string, uint64_t>>;

std::string checkpoint_text(const Files& files) {
  std::string text = "  files of a checkpoint:\n";
  for (const auto& [name, bytes] : files)
    text += fmt::format("    {:<30} {:>14}\n", name, bytes_text(static_cast<int64_t>(bytes)));
  return text;
}

const Rank& slowest_of(const std::vector<Rank>& ranks) {
  return *std::max_element(ranks.begin(), ranks.end(), [](const auto& a, const auto& b) {
    return a.compute_s + a.traffic_s < b.compute_s + b.traffic_s;
  });
}

std::string time_text(const StepPlanInput& in, const std::vector<Rank>& ranks) {
  const Rank& slow = slowest_of(ranks);
  return fmt::format(
      "  a step takes {:.3g} s with bytes moved beside arithmetic, {:.3g} s one after the other: "
      "{:.4g} TFLOP\n  at {:g} TFLOP/s in {:.3g} s, bytes at {:g} GB/s in a host and {:g} GB/s "
      "between hosts in {:.3g} s\n",
      std::max(slow.compute_s, slow.traffic_s),
      slow.compute_s + slow.traffic_s,
      slow.flops / 1e12,
      in.tflops,
      slow.compute_s,
      in.link,
      in.network,
      slow.traffic_s);
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
  Json held = Json::array(), moved = Json::array(), peaks = Json::object();
  for (const MemoryKind kind : kMemoryKinds)
    peaks[std::string(to_string(kind))] = rank.memory.peak_of(kind);
  peaks["all"] = rank.memory.peak_total;
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
          {"gathered_bytes",
           rank.memory.peak_of(MemoryKind::kGathered) +
               rank.memory.peak_of(MemoryKind::kGatheredExperts)},
          {"peak_bytes", peaks},
          {"traffic", moved},
          {"flops", rank.flops},
          {"compute_seconds", rank.compute_s},
          {"traffic_seconds", rank.traffic_s}};
}

/// Which ranks have nothing to do, and why; empty when all have tokens.
std::string idle_text(const StepPlanInput& in, const std::vector<Rank>& ranks) {
  std::vector<size_t> idle;
  for (size_t r = 0; r < ranks.size(); ++r) {
    if (ranks[r].tokens == 0) idle.push_back(r);
  }
  if (idle.empty()) return {};
  const int64_t rows = in.topology.dp * in.topology.fsdp;
  constexpr size_t kShown = 8;
  const std::vector<size_t> shown(
      idle.begin(), idle.begin() + static_cast<int64_t>(std::min(idle.size(), kShown)));
  const std::string where = fmt::format("{} of {} ranks ({}{}) get",
                                        idle.size(),
                                        ranks.size(),
                                        fmt::join(shown, " "),
                                        idle.size() > kShown ? " ..." : "");
  return fmt::format(
      "{} no tokens: documents go whole to the dp x fsdp = {} rows of ranks, and cp "
      "cuts each row; give at least {} documents of near-even lengths, long enough "
      "to be cut into {}",
      where,
      rows,
      rows,
      in.topology.cp);
}

}  // namespace

StepPlanText describe_step(const StepPlanInput& input) {
  model::validate(input.topology);
  StepPlanText plan;
  Json json = {{"topology", model::to_string(input.topology)},
               {"num_ranks", input.topology.num_ranks()},
               {"num_tokens", input.batch.global_tokens()},
               {"num_documents", input.batch.num_documents()},
               {"cp_blocker", nullptr}};
  if (const auto reason = parallel::cp_blocker(input.topology, input.batch, input.cp_cuts)) {
    plan.blocked = fmt::format("{} is blocked: {}", model::to_string(input.topology), *reason);
    json["cp_blocker"] = *reason;
    plan.json = json.dump(2);
    return plan;
  }
  std::vector<Rank> ranks;
  for (int64_t rank = 0; rank < input.topology.num_ranks(); ++rank)
    ranks.push_back(plan_rank(input, rank));
  plan.warning = idle_text(input, ranks);
  if (!plan.warning.empty()) json["warning"] = plan.warning;
  const std::vector<Host> hosts = hosts_of(input, ranks);
  const Files files =
      parallel::checkpoint_files(input.config, input.num, parallel::OptimizerKind::kAdamW);
  plan.text = mesh_text(input, ranks);
  if (input.topology.cp > 1)
    plan.text += fmt::format("  nothing blocks cp = {} on this batch\n", input.topology.cp);
  plan.text += memory_text(ranks) + hosts_text(hosts) + checkpoint_text(files) +
               traffic_text(ranks) + time_text(input, ranks);
  Json list = Json::array(), circles = Json::object();
  for (size_t r = 0; r < ranks.size(); ++r) list.push_back(rank_json(r, ranks[r]));
  for (const Circle circle : parallel::kCircles)
    circles[std::string(parallel::circle_name(circle))] = groups_of(input.topology, circle);
  json["groups"] = circles;
  json["ranks"] = list;
  for (const Host& host : hosts)
    json["hosts"].push_back({{"ranks", host.ranks}, {"peak_bytes", host.peak}});
  for (const auto& [name, bytes] : files) json["checkpoint"][name] = bytes;
  const Rank& slow = slowest_of(ranks);
  json["time"] = {{"tflops", input.tflops},
                  {"link_gb_per_s", input.link},
                  {"network_gb_per_s", input.network},
                  {"seconds_overlapped", std::max(slow.compute_s, slow.traffic_s)},
                  {"seconds_in_turn", slow.compute_s + slow.traffic_s}};
  plan.json = json.dump(2);
  return plan;
}

}  // namespace lockstep::harness
