#include "harness/launch/schema.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "harness/launch/scenario_keys.hpp"

namespace lockstep::harness {
namespace {

struct TableDoc {
  std::string_view table, written, doc;
};
constexpr TableDoc kTables[] = {
    {"", "top level", "what the scenario is"},
    {"model", "[model]", "one of preset, checkpoint, golden; one model for all runs"},
    {"data", "[data]", "one of documents, file; not given with a golden model, which has its own"},
    {"run.NAME", "[run.NAME]", "one table per run, NAME is free"},
    {"compare", "[[compare]]", "one table per comparison, carried out after all runs"},
    {"sweep", "[sweep]", "the whole scenario is repeated for every combination of values"},
    {"fault", "[[fault]]", "faults to inject"},
    {"expect", "[expect]", "how the scenario is meant to end"},
};

std::string fallback_text(const KeyInfo& key) {
  return std::string(key.fallback.empty() ? "-" : key.fallback);
}

}  // namespace

std::string_view name(KeyType type) noexcept {
  switch (type) {
    case KeyType::kText:
      return "a string";
    case KeyType::kTexts:
      return "an array of strings";
    case KeyType::kInteger:
      return "a whole number";
    case KeyType::kIntegers:
      return "an array of whole numbers";
    case KeyType::kNumber:
      return "a number";
    case KeyType::kNumberOrText:
      return "a number or a string";
    case KeyType::kFlag:
      return "true or false";
    case KeyType::kTable:
      return "a table";
    case KeyType::kAny:
      return "an array";
  }
  return "?";
}

std::vector<KeyInfo> scenario_keys() {
  std::vector<KeyInfo> keys;
  for (const KeyRow& row : key_rows()) keys.push_back(row.info);
  return keys;
}

const std::vector<MetricInfo>& metrics() {
  static const std::vector<MetricInfo> table = {
      {"rel_l2", "", "norm(left - right) / norm(right)", false, "logits logprobs loss grads trace"},
      {"max_abs", "", "largest absolute difference", false, "logits logprobs loss grads trace"},
      {"ulp_max",
       "ulp",
       "largest distance in representable numbers of the narrower dtype",
       false,
       "logits logprobs loss grads trace"},
      {"cosine", "", "cosine of the angle between the two", true, "logits logprobs grads trace"},
      {"kl", "nat", "mean over tokens of KL(right || left) of the softmaxes", false, "logits"},
      {"top1", "", "share of tokens whose most likely token is the same", true, "logits"},
      {"mismatch_kl",
       "nat",
       "mean over tokens of exp(l) - l - 1, l = left - right log-probability",
       false,
       "logprobs"},
      {kSameChoice, "", "share of rows that chose the same experts or keys", true, "trace"},
  };
  return table;
}

const MetricInfo* find_metric(std::string_view name) noexcept {
  for (const MetricInfo& metric : metrics()) {
    if (metric.name == name) return &metric;
  }
  return nullptr;
}

std::string schema_text() {
  std::string text;
  for (const TableDoc& table : kTables) {
    text += fmt::format("{}  ({})\n", table.written, table.doc);
    for (const KeyRow& row : key_rows()) {
      if (row.info.table != table.table) continue;
      text += fmt::format("  {:<16} {:<26} default {:<12} {}{}\n",
                          row.info.name,
                          name(row.info.type),
                          fallback_text(row.info),
                          row.info.doc,
                          row.info.unit.empty() ? "" : fmt::format(" [{}]", row.info.unit));
    }
    text += '\n';
  }
  text += "metrics\n";
  for (const MetricInfo& metric : metrics()) {
    text += fmt::format("  {:<12} {} (for {}; {} is good{})\n",
                        metric.name,
                        metric.doc,
                        metric.fits,
                        metric.at_least ? "large" : "small",
                        metric.unit.empty() ? "" : fmt::format("; unit {}", metric.unit));
  }
  return text;
}

std::string schema_markdown() {
  std::string text;
  for (const TableDoc& table : kTables) {
    text += fmt::format(
        "### {}\n\n{}.\n\n| key | type | default | unit | meaning |\n|---|---|---|---|---|\n",
        table.table.empty() ? "Top level" : fmt::format("`{}`", table.written),
        table.doc);
    for (const KeyRow& row : key_rows()) {
      if (row.info.table != table.table) continue;
      text += fmt::format("| `{}` | {} | {} | {} | {} |\n",
                          row.info.name,
                          name(row.info.type),
                          fallback_text(row.info),
                          row.info.unit,
                          row.info.doc);
    }
    text += '\n';
  }
  text += "### Metrics\n\n| metric | meaning | for | good | unit |\n|---|---|---|---|---|\n";
  for (const MetricInfo& metric : metrics()) {
    std::string doc;
    for (const char c : metric.doc) {
      if (c == '|') doc += '\\';  // a bare bar would end the table cell
      doc += c;
    }
    text += fmt::format("| `{}` | {} | {} | {} | {} |\n",
                        metric.name,
                        doc,
                        metric.fits,
                        metric.at_least ? "large" : "small",
                        metric.unit);
  }
  return text;
}

std::string schema_json() {
  nlohmann::ordered_json keys = nlohmann::ordered_json::array();
  for (const KeyRow& row : key_rows()) {
    keys.push_back({{"table", row.info.table},
                    {"key", row.info.name},
                    {"type", name(row.info.type)},
                    {"default", row.info.fallback},
                    {"unit", row.info.unit},
                    {"doc", row.info.doc}});
  }
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const MetricInfo& metric : metrics()) {
    list.push_back({{"metric", metric.name},
                    {"unit", metric.unit},
                    {"doc", metric.doc},
                    {"good", metric.at_least ? "large" : "small"},
                    {"for", metric.fits}});
  }
  return nlohmann::ordered_json{{"keys", keys}, {"metrics", list}}.dump(2);
}

}  // namespace lockstep::harness
