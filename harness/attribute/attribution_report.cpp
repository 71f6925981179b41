#include "harness/attribute/attribution_report.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "harness/result/json_text.hpp"
#include "harness/runner/runner.hpp"

namespace lockstep::harness {
namespace {

using Json = nlohmann::ordered_json;
using model::switch_info;

constexpr size_t kDrawnSwitches = 6;

std::string number(double value) { return format_number(value); }

/// "0.0123 +- 0.0004"
std::string spread_text(const Spread& spread) {
  if (spread.values.size() < 2) return number(spread.mean());
  return fmt::format("{} +- {}", number(spread.mean()), number(spread.half_width()));
}

std::string change_text(const SwitchCost& c) {
  return fmt::format("{} {}: {} -> {}", switch_info(c.id).id, switch_info(c.id).name, c.from, c.to);
}

/// The first module that the switch alone changes.
std::string first_layer(const Attribution& all, const SwitchCost& c) {
  for (size_t l = 0; l < c.layers.size(); ++l) {
    if (c.layers[l] > 0) return all.layer_names[l];
  }
  return "-";
}

/// Share of the distance that the two programs do not have by themselves.
double share(const Attribution& all, double cost) {
  const double explained = all.whole.mismatch_kl.mean() - all.same.mismatch_kl.mean();
  return explained == 0 ? 0 : cost / explained;
}

Json json(const Spread& spread) {
  Json values = Json::array();
  for (const double value : spread.values) values.push_back(json_number<Json>(value));
  return {{"mean", json_number<Json>(spread.mean())},
          {"half_width_95", json_number<Json>(spread.half_width())},
          {"values", values}};
}

Json json(const LogprobDistance& distance) {
  return {{"mismatch_kl", json(distance.mismatch_kl)}, {"max_logprob", json(distance.max_logprob)}};
}

Json json(const Candidate& c) {
  return {{"id", switch_info(c.id).id},
          {"name", switch_info(c.id).name},
          {"value", c.value},
          {"ties", c.ties},
          {"mean_abs_logprob", json_number<Json>(c.distance)}};
}

Detail detail(std::string name, std::string metric, const Spread& value, double floor) {
  Detail row;
  row.name = std::move(name);
  row.metric = std::move(metric);
  row.value = value.mean();
  row.noise_floor = floor;
  row.unit = "nat";
  if (value.values.size() > 1) row.note = fmt::format("+- {}", number(value.half_width()));
  return row;
}

RunRecord record(const RunSpec& run, const Attribution& all) {
  RunRecord out = begin_record(run);
  out.tokens = all.tokens;
  return out;
}

Comparison comparison(const Attribution& all, const LogprobDistance& distance, std::string left) {
  Comparison out;
  out.left = std::move(left);
  out.right = all.from.name;
  out.what = "logprobs";
  out.metric = "mismatch_kl";
  out.unit = "nat";
  out.value = distance.mismatch_kl.mean();
  return out;
}

}  // namespace

std::string text_of(const Attribution& all) {
  std::string text =
      fmt::format("{} ({}, {}) against {} ({}, {}): {} switches differ, {} {} of {} tokens\n",
                  all.to.name,
                  all.to.engine,
                  all.to.policy,
                  all.from.name,
                  all.from.engine,
                  all.from.policy,
                  all.costs.size(),
                  all.seeds,
                  all.seeds == 1 ? "seed" : "seeds",
                  all.tokens);
  const auto line = [](std::string_view what, const LogprobDistance& d) {
    return fmt::format("  {:<34} mismatch_kl {:<24} largest log-probability error {}\n",
                       what,
                       spread_text(d.mismatch_kl),
                       spread_text(d.max_logprob));
  };
  text += line("as they are", all.whole);
  text += line("all switches equal (the programs)", all.same);
  size_t width = 0, inert = 0;
  for (const SwitchCost& c : all.costs) width = std::max(width, change_text(c).size());
  text += fmt::format("  {:>4} {:<{}} {:>22} {:>7} {:>22} {:>11} {:>11}  {}\n",
                      "rank",
                      "switch",
                      width,
                      "cost alone",
                      "share",
                      "saved without it",
                      "cumulative",
                      "max alone",
                      "first changed");
  for (size_t i = 0; i < all.costs.size(); ++i) {
    const SwitchCost& c = all.costs[i];
    if (!c.refused.empty()) {
      text += fmt::format(
          "  {:>4} {:<{}} not possible alone: {}\n", "-", change_text(c), width, c.refused);
      continue;
    }
    if (c.inert && c.saved.mean() == 0) {
      ++inert;
      continue;
    }
    text += fmt::format("  {:>4} {:<{}} {:>22} {:>7} {:>22} {:>11} {:>11}  {}\n",
                        i + 1,
                        change_text(c),
                        width,
                        spread_text(c.cost),
                        fmt::format("{:.1f}%", 100 * share(all, c.cost.mean())),
                        spread_text(c.saved),
                        number(c.cumulative.mismatch_kl.mean()),
                        number(c.alone.max_logprob.mean()),
                        first_layer(all, c));
  }
  if (inert > 0) text += fmt::format("  {} of them change no byte of any logit here\n", inert);
  text += fmt::format("  sum of parts {} against the whole {}: {:.0f}%\n",
                      spread_text(all.parts),
                      spread_text(all.whole.mismatch_kl),
                      all.whole.mismatch_kl.mean() == 0
                          ? 100
                          : 100 * all.parts.mean() / all.whole.mismatch_kl.mean());
  if (all.seeds == 1) text += "  one seed: nothing is known of the spread; use --seeds 5\n";
  return text;
}

std::string text_of(const Explanation& found) {
  std::string text = fmt::format("nearest: policy {}, mean log-probability error {} nat{}\n",
                                 found.policy,
                                 number(found.start),
                                 found.start == 0 ? ", the same bits" : "");
  for (const Candidate& c : found.found) {
    text += fmt::format("  with {} {} = {}: {} nat{}\n",
                        switch_info(c.id).id,
                        switch_info(c.id).name,
                        c.value,
                        number(c.distance),
                        c.distance == 0 ? ", the same bits" : "");
    if (!c.ties.empty()) text += fmt::format("    as near: {}\n", fmt::join(c.ties, ", "));
  }
  if (found.end > 0) {
    text += fmt::format("  {} nat remain; nearest of the values tried last:\n", number(found.end));
    for (size_t i = 0; i < std::min<size_t>(5, found.others.size()); ++i) {
      const Candidate& c = found.others[i];
      text += fmt::format("    {} {} = {}: {} nat\n",
                          switch_info(c.id).id,
                          switch_info(c.id).name,
                          c.value,
                          number(c.distance));
    }
  }
  return text + fmt::format("  {} runs\n", found.evaluated);
}

std::string json_of(const Attribution& all) {
  Json costs = Json::array();
  for (const SwitchCost& c : all.costs) {
    Json row = {{"id", switch_info(c.id).id},
                {"name", switch_info(c.id).name},
                {"from", c.from},
                {"to", c.to}};
    if (!c.refused.empty()) {
      row["refused"] = c.refused;
      costs.push_back(row);
      continue;
    }
    Json layers = Json::object();
    for (size_t l = 0; l < c.layers.size(); ++l)
      layers[all.layer_names[l]] = json_number<Json>(c.layers[l]);
    row["inert"] = c.inert;
    row["cost"] = json(c.cost);
    row["is_clear"] = c.cost.is_clear();
    row["saved"] = json(c.saved);
    row["alone"] = json(c.alone);
    row["without"] = json(c.without);
    row["cumulative"] = json(c.cumulative);
    row["layers_rel_l2"] = layers;
    costs.push_back(row);
  }
  return json_text(Json{{"from", all.from.name},
                        {"to", all.to.name},
                        {"seeds", all.seeds},
                        {"tokens", all.tokens},
                        {"whole", json(all.whole)},
                        {"same", json(all.same)},
                        {"sum_of_parts", json(all.parts)},
                        {"switches", costs}});
}

std::string json_of(const Explanation& found) {
  Json steps = Json::array(), others = Json::array();
  for (const Candidate& c : found.found) steps.push_back(json(c));
  for (const Candidate& c : found.others) others.push_back(json(c));
  return json_text(Json{{"policy", found.policy},
                        {"start_mean_abs_logprob", json_number<Json>(found.start)},
                        {"end_mean_abs_logprob", json_number<Json>(found.end)},
                        {"found", steps},
                        {"others", others},
                        {"runs", found.evaluated}});
}

ScenarioResult result_of(const Attribution& all, const std::string& name) {
  ScenarioResult result;
  result.name = name + "_attribution";
  result.description =
      fmt::format("Which numerics switch makes how much of the distance of {} from {}?",
                  all.to.name,
                  all.from.name);
  result.runs = {record(all.from, all), record(all.to, all)};
  const double floor = all.same.mismatch_kl.mean();
  Comparison whole = comparison(all, all.whole, all.to.name);
  whole.noise_floor = floor;
  Series alone, together;
  alone.kind = together.kind = ChartKind::kOther;
  alone.chart = together.chart = "mismatch_kl by switch, in the order of cost";
  alone.name = "alone";
  together.name = "with all before it";
  alone.x_label = together.x_label = "switch";
  alone.y_label = together.y_label = "mismatch_kl";
  alone.unit = together.unit = "nat";
  alone.noise_floor = {floor};
  for (const SwitchCost& c : all.costs) {
    if (!c.refused.empty() || (c.inert && c.saved.mean() == 0)) continue;
    whole.details.push_back(detail(change_text(c), "cost alone", c.cost, floor));
    whole.details.push_back(detail(change_text(c), "saved without it", c.saved, floor));
    const auto x = static_cast<double>(alone.points.size() + 1);
    alone.points.push_back({x, c.alone.mismatch_kl.mean()});
    together.points.push_back({x, c.cumulative.mismatch_kl.mean()});
    alone.x_names.emplace_back(switch_info(c.id).id);
    together.x_names.emplace_back(switch_info(c.id).id);
    if (result.series.size() == kDrawnSwitches || c.layers.empty()) continue;
    Series layers;
    layers.kind = ChartKind::kLayer;
    layers.chart = "relative L2 error by layer, one switch alone";
    layers.name = change_text(c);
    layers.x_label = "module";
    layers.y_label = "rel_l2";
    for (size_t l = 0; l < c.layers.size(); ++l) {
      layers.points.push_back({static_cast<double>(l), c.layers[l]});
      layers.x_names.push_back(all.layer_names[l]);
    }
    result.series.push_back(std::move(layers));
  }
  result.series.insert(result.series.begin(), {std::move(alone), std::move(together)});
  result.comparisons = {std::move(whole),
                        comparison(all, all.same, all.to.name + ", all switches equal")};
  return result;
}

}  // namespace lockstep::harness
