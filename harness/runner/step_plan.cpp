#include "harness/runner/step_plan.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <utility>

#include "harness/runner/flops.hpp"
#include "harness/runner/plan_sections.hpp"
#include "parallel/checkpoint/distributed_checkpoint.hpp"
#include "parallel/plan/footprint.hpp"
#include "parallel/plan/placement.hpp"
#include "parallel/plan/step_memory.hpp"
#include "parallel/plan/traffic.hpp"

namespace lockstep::harness {
namespace {

using Json = nlohmann::ordered_json;
using parallel::Circle;
using parallel::Footprint;
using parallel::Traffic;

/// Tables and lists of more ranks are cut short.
constexpr int64_t kShownRanks = 64, kListedRanks = 4096;

/// What ranks of one kind have in common.
struct Kind {
  std::vector<Footprint> held;
  MemoryUse memory;
  std::vector<Traffic> moved;         ///< but for replica_sums, which each replica splits unevenly
  std::vector<int64_t> replica_sums;  ///< see step_traffic
};

Footprint sum_of(const std::vector<Footprint>& held) {
  Footprint sum;
  for (const Footprint& f : held) {
    sum.elements += f.elements;
    sum.parameters += f.parameters;
    sum.gradients += f.gradients;
    sum.optimizer += f.optimizer;
    sum.host += f.host;
  }
  return sum;
}

struct Moved {
  int64_t sent, received;
};

struct Rank {
  parallel::Coordinates place;
  int64_t first_token = 0, tokens = 0;
  const Kind* kind = nullptr;
  int64_t replica_bytes = 0;
  double flops = 0, compute_s = 0, traffic_s = 0;

  /// Of the training state, in the host's memory.
  [[nodiscard]] int64_t host_bytes() const { return sum_of(kind->held).host; }

  /// Bytes of line `i` of kind->moved.
  [[nodiscard]] Moved moved(size_t i) const {
    const Traffic& line = kind->moved[i];
    if (line.circle == Circle::kDp) return {replica_bytes, replica_bytes};
    return {line.bytes_sent, line.bytes_received};
  }
};

/// The sets of ranks of a circle, by first member.
std::vector<std::vector<int64_t>> groups_of(const model::Topology& topology, Circle circle) {
  std::vector<std::vector<int64_t>> groups;
  for (int64_t rank = 0; rank < topology.num_ranks(); ++rank) {
    if (parallel::circle_ranks(topology, circle, rank).first == rank)
      groups.push_back(parallel::members(topology, circle, rank));
  }
  return groups;
}

/// Floating-point operations of a rank: tp shares mixers and MLPs, ep is even.
double flops_of(const StepPlanInput& in, const Packing& held) {
  std::vector<TokenSpan> spans;
  for (const Segment& s : held.segments()) {
    if (s.length() > 0) spans.push_back({s.position, s.position + s.length()});
  }
  if (spans.empty()) return 0;
  Flops flops = count_flops(in.config, spans);
  const auto tp = static_cast<double>(in.topology.tp);
  flops.mixers /= tp;
  flops.mlps /= tp;
  return flops.forward_backward() + (in.recompute ? flops.forward() - flops.head : 0);
}

/// Members below rank `end`.
int64_t members_below(const parallel::CircleRanks& ranks, int64_t end) {
  if (end <= ranks.first) return 0;
  return std::min((end - ranks.first - 1) / ranks.step + 1, ranks.size);
}

/// Seconds that a rank's bytes take, one call after another, by circle; links of a host and of the
/// network work at the same time.
std::map<Circle, double> traffic_seconds(const StepPlanInput& in,
                                         const Rank& rank,
                                         int64_t number) {
  std::map<Circle, double> seconds;
  for (size_t i = 0; i < rank.kind->moved.size(); ++i) {
    const Moved moved = rank.moved(i);
    const parallel::CircleRanks ranks =
        parallel::circle_ranks(in.topology, rank.kind->moved[i].circle, number);
    const int64_t host = number / in.ranks_per_host * in.ranks_per_host,
                  near = members_below(ranks, host + in.ranks_per_host) -
                         members_below(ranks, host) - 1;
    const double share = static_cast<double>(near) / static_cast<double>(ranks.size - 1),
                 bytes = static_cast<double>(std::max(moved.sent, moved.received));
    seconds[rank.kind->moved[i].circle] +=
        std::max(share * bytes / (in.link * 1e9), (1 - share) * bytes / (in.network * 1e9));
  }
  return seconds;
}

/// All ranks of a plan. What a rank holds, needs and moves is worked out once for all that are of
/// its kind.
class Ranks {
 public:
  explicit Ranks(const StepPlanInput& in)
      : in_(in),
        step_{.config = in.config,
              .num = in.num,
              .topology = in.topology,
              .batch = in.batch,
              .cp_cuts = in.cp_cuts,
              .recompute = in.recompute,
              .balance = false,
              .optimizer = in.optimizer,
              .offload = in.offload,
              .routes = {}} {
    count_loads();
    const model::Topology& t = in.topology;
    list_.reserve(static_cast<size_t>(t.num_ranks()));
    for (int64_t number = 0; number < t.dp * t.fsdp; ++number) {
      const parallel::TokenRow row = step_.row(number);
      for (int64_t cp = 0; cp < t.cp; ++cp) {
        const Packing held = row.held(cp);
        const double flops = flops_of(in, held);
        for (int64_t tp = 0; tp < t.tp; ++tp) add(row, held, flops);
      }
    }
  }

  [[nodiscard]] const std::vector<Rank>& list() const { return list_; }

 private:
  /// Numbers the different loads of ep circles: how many ranks have how many tokens.
  void count_loads() {
    const model::Topology& t = in_.topology;
    if (t.ep == 1) return;
    std::map<std::map<int64_t, int64_t>, int64_t> known;
    std::map<int64_t, int64_t> load;
    int64_t at = 0;
    for (int64_t number = 0; number < t.dp * t.fsdp; ++number) {
      const parallel::TokenRow row = step_.row(number);
      for (size_t cp = 0; cp + 1 < row.cuts.size(); ++cp) {
        ++load[row.cuts[cp + 1] - row.cuts[cp]];
        if (++at % t.ep != 0) continue;
        loads_.push_back(known.emplace(load, static_cast<int64_t>(known.size())).first->second);
        load.clear();
      }
    }
  }

  /// Leading sizes of parameters: that of each shard depends on nothing else. By tp rank and number
  /// of experts.
  struct Sizes {
    std::set<int64_t> dense, expert;
  };
  const Sizes& sizes(const parallel::Coordinates& place, int64_t experts) {
    const auto [found, added] = sizes_.emplace(std::pair(place.tp, experts), Sizes{});
    if (!added) return found->second;
    for (const parallel::ParamSpec& spec :
         parallel::parameter_specs(in_.config, in_.num, in_.topology, place))
      (spec.expert ? found->second.expert : found->second.dense).insert(spec.shape[0]);
    return found->second;
  }

  /// Everything that the footprint, memory and traffic of a rank depend on, but for its replica.
  std::vector<int64_t> key_of(int64_t number,
                              const parallel::Coordinates& place,
                              const parallel::TokenRow& row,
                              const Packing& held) {
    const model::Topology& t = in_.topology;
    const int64_t experts = parallel::even_share(in_.config.n_routed_experts, t.ep, place.ep);
    std::vector<int64_t> key{place.tp,
                             experts,
                             row.cuts.back(),
                             held.continues_from_left() ? 1 : 0,
                             held.continues_to_right() ? 1 : 0};
    if (t.ep > 1) {
      const int64_t circles = t.fsdp * t.cp / t.ep;
      key.push_back(loads_[static_cast<size_t>(place.dp * circles + place.expert_shard)]);
    }
    const auto shares = [&](Circle circle, const auto& counts) {
      const parallel::CircleRanks ranks = parallel::circle_ranks(t, circle, number);
      for (const int64_t count : counts)
        key.push_back(parallel::even_share(count, ranks.size, ranks.own));
    };
    const Sizes& leading = sizes(place, experts);
    shares(Circle::kShard, leading.dense);
    shares(Circle::kExpertShard, leading.expert);
    constexpr std::array<int64_t, 3> kScalars = {1, 2, 3};  // sums of losses, norms and counts
    shares(Circle::kShard, kScalars);
    shares(Circle::kTokens, kScalars);
    const std::vector<int64_t>& pieces = held.local_cu_seqlens();
    key.insert(key.end(), pieces.begin(), pieces.end());
    return key;
  }

  void add(const parallel::TokenRow& row, const Packing& held, double flops) {
    const auto number = static_cast<int64_t>(list_.size());
    Rank rank;
    rank.place = parallel::coordinates(in_.topology, number);
    rank.first_token = row.begin + row.cuts[static_cast<size_t>(rank.place.cp)];
    rank.tokens = held.local_tokens();
    const auto [found, added] = kinds_.emplace(key_of(number, rank.place, row, held), Kind{});
    Kind& kind = found->second;
    if (added) {
      kind.held = parallel::footprint(step_, number);
      kind.memory = parallel::step_memory(step_, number);
      kind.moved = parallel::step_traffic(step_, number, &kind.replica_sums);
    }
    rank.kind = &kind;
    if (in_.topology.dp > 1)
      rank.replica_bytes =
          parallel::replica_bytes(step_, kind.replica_sums, in_.topology.dp, rank.place.dp);
    rank.flops = flops;
    rank.compute_s = flops / (in_.tflops * 1e12);
    for (const auto& [circle, seconds] : traffic_seconds(in_, rank, number))
      rank.traffic_s += seconds;
    list_.push_back(rank);
  }

  const StepPlanInput& in_;
  parallel::StepPlan step_;
  std::vector<int64_t> loads_;  ///< by ep circle
  std::map<std::pair<int64_t, int64_t>, Sizes> sizes_;
  std::map<std::vector<int64_t>, Kind> kinds_;
  std::vector<Rank> list_;
};

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
  const size_t shown = std::min(ranks.size(), static_cast<size_t>(kShownRanks));
  for (size_t r = 0; r < shown; ++r) {
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
                        bytes_text(ranks[r].kind->memory.peak_total));
  }
  const size_t left_out = ranks.size() - shown;
  if (left_out > 0)
    text += fmt::format("  ... {} more ranks ({})\n",
                        left_out,
                        in.topology.num_ranks() > kListedRanks
                            ? fmt::format("--json lists the first {}", kListedRanks)
                            : "--json lists all");
  if (ranks.size() > 1) text += "  who talks to whom:\n";
  for (const Circle circle : parallel::kCircles) {
    const parallel::CircleRanks of_first = parallel::circle_ranks(in.topology, circle, 0);
    if (of_first.size == 1) continue;
    text += fmt::format("    {:<12}", parallel::circle_name(circle));
    if (left_out > 0) {
      text += fmt::format(" {} groups of {} ranks, the first {{{} {}{}}}\n",
                          in.topology.num_ranks() / of_first.size,
                          of_first.size,
                          of_first.first,
                          of_first.first + of_first.step,
                          of_first.size > 2 ? " ..." : "");
      continue;
    }
    for (const auto& group : groups_of(in.topology, circle))
      text += fmt::format(" {{{}}}", fmt::join(group, " "));
    text += '\n';
  }
  return text;
}

std::string memory_text(const StepPlanInput& in, const std::vector<Rank>& ranks) {
  const auto fullest =
      std::max_element(ranks.begin(), ranks.end(), [](const auto& a, const auto& b) {
        return a.kind->memory.peak_total < b.kind->memory.peak_total;
      });
  const auto line = [](std::string_view what, const Footprint& f) {
    return fmt::format("  {:<20} {:>14} {:>12} {:>12} {:>12} {:>12}\n",
                       what,
                       f.elements,
                       bytes_text(f.parameters),
                       bytes_text(f.gradients),
                       bytes_text(f.optimizer),
                       bytes_text(f.host));
  };
  std::string text = fmt::format(
      "  bytes held by rank {}, the fullest, with {}, offload {}:\n"
      "  {:<20} {:>14} {:>12} {:>12} {:>12} {:>12}\n",
      fullest - ranks.begin(),
      parallel::optimizer_name(in.optimizer),
      parallel::offload_name(in.offload),
      "",
      "elements",
      "parameters",
      "gradients",
      "optimizer",
      "on the host");
  for (const Footprint& f : fullest->kind->held) text += line(f.category, f);
  text += line("all", sum_of(fullest->kind->held));
  const MemoryUse& use = fullest->kind->memory;
  text += fmt::format(
      "  tensor memory of its step:\n  {:<20} {:>14} {:>12}\n", "", "peak", "at the peak");
  for (const MemoryKind kind : kMemoryKinds) {
    if (use.peak_of(kind) == 0) continue;
    text += fmt::format("  {:<20} {:>14} {:>12}{}\n",
                        to_string(kind),
                        bytes_text(use.peak_of(kind)),
                        bytes_text(use.at_peak[static_cast<size_t>(kind)]),
                        bar(static_cast<double>(use.at_peak[static_cast<size_t>(kind)]),
                            static_cast<double>(use.peak_total)));
  }
  return text + fmt::format("  {:<20} {:>14}\n", "all", bytes_text(use.peak_total));
}

struct Host {
  int64_t first = 0, last = 0;  ///< ranks
  int64_t peak = 0;             ///< of all ranks, on devices where they have some
  int64_t host = 0;             ///< that they keep in its memory instead
};

std::vector<Host> hosts_of(const StepPlanInput& in, const std::vector<Rank>& ranks) {
  std::vector<Host> hosts;
  for (size_t r = 0; r < ranks.size(); ++r) {
    const auto rank = static_cast<int64_t>(r);
    if (rank % in.ranks_per_host == 0) hosts.push_back({rank, rank, 0, 0});
    hosts.back().last = rank;
    hosts.back().peak += ranks[r].kind->memory.peak_total;
    hosts.back().host += ranks[r].host_bytes();
  }
  return hosts;
}

std::string hosts_text(const std::vector<Host>& hosts) {
  std::string text = fmt::format(
      "  bytes of all ranks of a host:\n    {:<24} {:>14} {:>14}\n", "", "peak", "on the host");
  const size_t shown = std::min(hosts.size(), static_cast<size_t>(kShownRanks));
  for (size_t h = 0; h < shown; ++h)
    text += fmt::format("    {:<24} {:>14} {:>14}\n",
                        fmt::format("host {:<3} ranks {}-{}", h, hosts[h].first, hosts[h].last),
                        bytes_text(hosts[h].peak),
                        bytes_text(hosts[h].host));
  if (shown < hosts.size()) text += fmt::format("    ... {} more hosts\n", hosts.size() - shown);
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
  std::string text = fmt::format(
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
  const auto line = [&](std::string_view what, double seconds) {
    text += fmt::format(
        "    {:<16} {:>10.3g} s{}\n", what, seconds, bar(seconds, slow.compute_s + slow.traffic_s));
  };
  line("arithmetic", slow.compute_s);
  for (const auto& [circle, seconds] : traffic_seconds(in, slow, &slow - ranks.data()))
    line(parallel::circle_name(circle), seconds);
  return text;
}

std::string traffic_text(const std::vector<Rank>& ranks) {
  struct Sum {
    int64_t calls = 0, most = 0, all = 0;
  };
  std::vector<std::pair<std::pair<Circle, std::string>, Sum>> lines;
  std::map<const Kind*, std::vector<size_t>> places;  // of a kind's lines in `lines`
  for (const Rank& rank : ranks) {
    const auto [place, added] = places.emplace(rank.kind, std::vector<size_t>{});
    for (const Traffic& t : rank.kind->moved) {
      if (!added) break;
      const std::pair<Circle, std::string> key(t.circle, t.what);
      auto found = std::find_if(
          lines.begin(), lines.end(), [&](const auto& line) { return line.first == key; });
      if (found == lines.end()) found = lines.insert(lines.end(), {key, {}});
      place->second.push_back(static_cast<size_t>(found - lines.begin()));
    }
    for (size_t i = 0; i < rank.kind->moved.size(); ++i) {
      const Moved moved = rank.moved(i);
      Sum& sum = lines[place->second[i]].second;
      sum.calls = std::max(sum.calls, rank.kind->moved[i].calls);
      sum.most = std::max(sum.most, moved.sent);
      sum.all += moved.sent;
    }
  }
  if (lines.empty()) return "  one rank moves nothing\n";
  std::stable_sort(lines.begin(), lines.end(), [](const auto& a, const auto& b) {
    return a.first.first < b.first.first;
  });
  int64_t most = 0;
  for (const auto& [key, sum] : lines) most = std::max(most, sum.most);
  std::string text = fmt::format(
      "  bytes sent in a step, forward and backward:\n  {:<12} {:<22} {:>7} {:>14} {:>14}\n",
      "axis",
      "",
      "calls",
      "by one rank",
      "by all");
  for (const auto& [key, sum] : lines)
    text += fmt::format("  {:<12} {:<22} {:>7} {:>14} {:>14}{}\n",
                        parallel::circle_name(key.first),
                        key.second,
                        sum.calls,
                        bytes_text(sum.most),
                        bytes_text(sum.all),
                        bar(static_cast<double>(sum.most), static_cast<double>(most)));
  return text;
}

Json rank_json(int64_t number, const Rank& rank) {
  Json held = Json::array(), moved = Json::array(), peaks = Json::object(),
       at_peak = Json::object();
  for (const MemoryKind kind : kMemoryKinds) {
    peaks[std::string(to_string(kind))] = rank.kind->memory.peak_of(kind);
    at_peak[std::string(to_string(kind))] = rank.kind->memory.at_peak[static_cast<size_t>(kind)];
  }
  peaks["all"] = rank.kind->memory.peak_total;
  for (const Footprint& f : rank.kind->held)
    held.push_back({{"category", f.category},
                    {"elements", f.elements},
                    {"parameter_bytes", f.parameters},
                    {"gradient_bytes", f.gradients},
                    {"optimizer_bytes", f.optimizer},
                    {"host_bytes", f.host}});
  for (size_t i = 0; i < rank.kind->moved.size(); ++i) {
    const Traffic& t = rank.kind->moved[i];
    moved.push_back({{"axis", parallel::circle_name(t.circle)},
                     {"what", t.what},
                     {"calls", t.calls},
                     {"bytes_sent", rank.moved(i).sent},
                     {"bytes_received", rank.moved(i).received}});
  }
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
           rank.kind->memory.peak_of(MemoryKind::kGathered) +
               rank.kind->memory.peak_of(MemoryKind::kGatheredExperts)},
          {"peak_bytes", peaks},
          {"bytes_at_peak", at_peak},
          {"host_bytes", rank.host_bytes()},
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
               {"optimizer", parallel::optimizer_name(input.optimizer)},
               {"offload", parallel::offload_name(input.offload)},
               {"cp_blocker", nullptr}};
  if (const auto reason = parallel::cp_blocker(input.topology, input.batch, input.cp_cuts)) {
    plan.blocked = fmt::format("{} is blocked: {}", model::to_string(input.topology), *reason);
    json["cp_blocker"] = *reason;
    plan.json = json.dump(2);
    return plan;
  }
  const Ranks planned(input);
  const std::vector<Rank>& ranks = planned.list();
  plan.warning = idle_text(input, ranks);
  if (!plan.warning.empty()) json["warning"] = plan.warning;
  const std::vector<Host> hosts = hosts_of(input, ranks);
  const Files files = parallel::checkpoint_files(input.config, input.num, input.optimizer);
  const PlanSection parameters = plan_parameters(input.config, input.optimizer);
  json["model"] = parameters.json;
  plan.text = parameters.text + mesh_text(input, ranks);
  if (input.topology.cp > 1)
    plan.text += fmt::format("  nothing blocks cp = {} on this batch\n", input.topology.cp);
  plan.text += memory_text(input, ranks) + hosts_text(hosts) + checkpoint_text(files) +
               traffic_text(ranks) + time_text(input, ranks);
  Json list = Json::array(), circles = Json::object();
  const int64_t num_ranks = input.topology.num_ranks(), listed = std::min(num_ranks, kListedRanks);
  for (int64_t r = 0; r < listed; ++r) list.push_back(rank_json(r, ranks[static_cast<size_t>(r)]));
  for (const Circle circle : parallel::kCircles) {
    if (listed == num_ranks)
      circles[std::string(parallel::circle_name(circle))] = groups_of(input.topology, circle);
  }
  json["groups"] = circles;
  json["ranks"] = list;
  Json& host_list = json["hosts"] = Json::array();
  for (const Host& host : hosts) {
    if (host.first >= listed) break;
    std::vector<int64_t> on_host(static_cast<size_t>(host.last - host.first + 1));
    std::iota(on_host.begin(), on_host.end(), host.first);
    host_list.push_back({{"ranks", on_host}, {"peak_bytes", host.peak}, {"host_bytes", host.host}});
  }
  if (listed < num_ranks)
    json["left_out"] = {{"ranks", num_ranks - listed},
                        {"hosts", hosts.size() - host_list.size()},
                        {"groups", "all"}};
  for (const auto& [name, bytes] : files) json["checkpoint"][name] = bytes;
  const Rank& slow = slowest_of(ranks);
  const int64_t slowest = &slow - ranks.data();
  Json by_axis = Json::object();
  for (const auto& [circle, seconds] : traffic_seconds(input, slow, slowest))
    by_axis[std::string(parallel::circle_name(circle))] = seconds;
  json["time"] = {{"tflops", input.tflops},
                  {"link_gb_per_s", input.link},
                  {"network_gb_per_s", input.network},
                  {"rank", slowest},
                  {"compute_seconds", slow.compute_s},
                  {"traffic_seconds", by_axis},
                  {"seconds_overlapped", std::max(slow.compute_s, slow.traffic_s)},
                  {"seconds_in_turn", slow.compute_s + slow.traffic_s}};
  if (input.sync) {
    const PlanSection sync = plan_sync(*input.sync);
    plan.text += sync.text;
    json["weight_sync"] = sync.json;
  }
  plan.json = json.dump(2);
  return plan;
}

}  // namespace lockstep::harness
