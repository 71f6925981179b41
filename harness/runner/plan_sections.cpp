#include "harness/runner/plan_sections.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "harness/sync/weight_sync.hpp"
#include "parallel/plan/footprint.hpp"

namespace lockstep::harness {
namespace {

using Json = nlohmann::ordered_json;
using parallel::ModelSize;

constexpr int64_t kShownRanks = 64;

/// The model with its MTP layers.
ModelSize with_mtp(const model::ModelConfig& config, parallel::OptimizerKind optimizer) {
  ModelSize sum = parallel::model_size(config, optimizer);
  const ModelSize one = parallel::mtp_layer_size(config, optimizer);
  const int64_t layers = config.num_nextn_predict_layers;
  sum.parameters += layers * one.parameters;
  sum.active += layers * one.active;
  sum.weight_bytes += layers * one.weight_bytes;
  sum.training_bytes += layers * one.training_bytes;
  return sum;
}

Json to_json(const ModelSize& size) {
  return {{"parameters", size.parameters},
          {"active", size.active},
          {"active_with_embedding", size.active + size.embedding},
          {"weights_only_bytes", size.weight_bytes},
          {"training_bytes", size.training_bytes}};
}

}  // namespace

std::string bytes_text(int64_t bytes) {
  constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB", "PiB"};
  if (bytes < 1024) return fmt::format("{} B", bytes);
  double value = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  return fmt::format("{:.2f} {}", value, kUnits[unit]);
}

std::string bar(double value, double most) {
  constexpr double kLongest = 30;
  if (value <= 0 || most <= 0) return {};
  const std::string hashes(static_cast<size_t>(std::lround(kLongest * value / most)), '#');
  return hashes.empty() ? hashes : "  " + hashes;
}

PlanSection plan_parameters(const model::ModelConfig& config, parallel::OptimizerKind optimizer) {
  std::vector<ModelSize> sizes{parallel::model_size(config, optimizer)};
  std::string head = fmt::format("  {:<32} {:>17}", "parameters", "text model");
  PlanSection section;
  section.json = to_json(sizes[0]);
  if (config.num_nextn_predict_layers > 0) {
    sizes.push_back(with_mtp(config, optimizer));
    head += fmt::format(" {:>17}", "with MTP");
    section.json["with_mtp"] = to_json(sizes[1]);
  }
  section.text = head + '\n';
  const auto line = [&](const std::string& what, auto&& value_of) {
    section.text += fmt::format("    {:<30}", what);
    for (const ModelSize& size : sizes) section.text += fmt::format(" {:>17}", value_of(size));
    section.text += '\n';
  };
  const auto tera = [](int64_t bytes) {
    return fmt::format("{:.4g} TB", static_cast<double>(bytes) * 1e-12);
  };
  line("all", [](const ModelSize& s) { return s.parameters; });
  line("active", [](const ModelSize& s) { return s.active; });
  line("active and embedding", [](const ModelSize& s) { return s.active + s.embedding; });
  line("checkpoint of weights", [&](const ModelSize& s) { return tera(s.weight_bytes); });
  line(fmt::format("with masters and {} state", parallel::optimizer_name(optimizer)),
       [&](const ModelSize& s) { return tera(s.training_bytes); });
  line("bytes a parameter of that", [](const ModelSize& s) {
    return fmt::format("{:.2f}",
                       static_cast<double>(s.training_bytes) / static_cast<double>(s.parameters));
  });
  return section;
}

PlanSection plan_sync(const SyncSides& sides) {
  const TransferPlan plan(sides, SyncOptions{}.bucket_bytes);
  int64_t num_ranks = 0;
  for (const std::vector<int64_t>* ranks : {&sides.trainer_ranks, &sides.engine_ranks})
    for (const int64_t rank : *ranks) num_ranks = std::max(num_ranks, rank + 1);
  struct Moved {
    int64_t sent = 0, received = 0, copied = 0;
  };
  std::vector<Moved> moved(static_cast<size_t>(num_ranks));
  int64_t most = 0, all = 0;
  for (const Transfer& t : plan.transfers()) {
    Moved &from = moved[static_cast<size_t>(t.from)], &to = moved[static_cast<size_t>(t.to)];
    if (t.from == t.to) {
      from.copied += t.bytes;
    } else {
      from.sent += t.bytes;
      to.received += t.bytes;
      all += t.bytes;
    }
  }
  for (const Moved& m : moved) most = std::max({most, m.sent, m.received});
  const std::string engine =
      fmt::format("{} of tp = {}", sides.engine.name(), sides.engine_topology.tp);
  PlanSection section;
  section.text = fmt::format(
      "  weight sync of {} into an engine {}: {} between ranks in {} exchanges\n"
      "  {:>5} {:<16} {:>14} {:>14} {:>14}\n",
      model::to_string(sides.trainer_topology),
      engine,
      bytes_text(all),
      plan.buckets().size(),
      "rank",
      "",
      "sent",
      "received",
      "own");
  Json ranks = Json::array();
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    const Moved& m = moved[static_cast<size_t>(rank)];
    const std::string who = plan.trains(rank) && plan.serves(rank) ? "trainer, engine"
                            : plan.trains(rank)                    ? "trainer"
                                                                   : "engine";
    ranks.push_back({{"rank", rank},
                     {"trains", plan.trains(rank)},
                     {"serves", plan.serves(rank)},
                     {"bytes_sent", m.sent},
                     {"bytes_received", m.received},
                     {"bytes_own", m.copied}});
    if (rank >= kShownRanks) continue;
    section.text += fmt::format(
        "  {:>5} {:<16} {:>14} {:>14} {:>14}{}\n",
        rank,
        who,
        bytes_text(m.sent),
        bytes_text(m.received),
        bytes_text(m.copied),
        bar(static_cast<double>(std::max(m.sent, m.received)), static_cast<double>(most)));
  }
  if (num_ranks > kShownRanks)
    section.text +=
        fmt::format("  ... {} more ranks (--json lists all)\n", num_ranks - kShownRanks);
  section.json = {{"trainer_topology", model::to_string(sides.trainer_topology)},
                  {"engine_tp", sides.engine_topology.tp},
                  {"engine_policy", sides.engine.name()},
                  {"bytes", all},
                  {"exchanges", plan.buckets().size()},
                  {"ranks", ranks}};
  return section;
}

}  // namespace lockstep::harness
