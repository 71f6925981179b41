#include "harness/launch/scenario_keys.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "harness/launch/available.hpp"
#include "model/config/numerics.hpp"

namespace lockstep::harness {
namespace {

using Kind = ErrorKind;
using T = KeyTarget;
using V = TomlValue;

/// Files are looked for beside the scenario first, then from the working directory; values given
/// on the command line are meant from the working directory.
std::filesystem::path locate(const Scenario& scenario, const V& value) {
  std::filesystem::path path = value.text();
  if (path.empty()) value.fail(Kind::kInput, "is empty; give a path");
  std::filesystem::path beside = scenario.file.parent_path() / path;
  std::error_code ignored;
  if (path.is_relative() && std::filesystem::exists(beside, ignored)) return beside;
  if (std::filesystem::exists(path, ignored)) return path;
  value.fail(Kind::kInput,
             "no such path; looked at {}{}",
             path.is_relative() ? beside.lexically_normal().string() + " and " : std::string(),
             path.string());
}

std::string json_of(const V& value) {
  const toml::node& node = value.node();
  if (const auto* text = node.as_string()) return nlohmann::json(text->get()).dump();
  if (node.is_integer() || node.is_boolean()) return value.written();
  if (node.is_floating_point()) return nlohmann::json(value.number()).dump();
  if (const toml::array* array = node.as_array()) {
    nlohmann::json list = nlohmann::json::array();
    for (const toml::node& item : *array) {
      if (const auto* text = item.as_string()) {
        list.push_back(text->get());
      } else if (const auto* number = item.as_integer()) {
        list.push_back(number->get());
      } else {
        value.fail(Kind::kInput, "lists may hold strings or whole numbers");
      }
    }
    return list.dump();
  }
  value.fail(Kind::kInput, "expected a number, a string, true, false or a list of them");
}

void take_topology(T& t, const V& value) {
  static const std::vector<std::pair<std::string, int64_t model::Topology::*>> axes = {
      {"dp", &model::Topology::dp},
      {"fsdp", &model::Topology::fsdp},
      {"cp", &model::Topology::cp},
      {"tp", &model::Topology::tp},
      {"ep", &model::Topology::ep}};
  for (const auto& [key, degree] : value.members()) {
    const auto row = std::find_if(
        axes.begin(), axes.end(), [&, name = key](const auto& axis) { return axis.first == name; });
    if (row == axes.end()) {
      degree.fail(Kind::kMesh, "unknown axis '{}'; axes are dp, fsdp, cp, tp, ep", key);
    }
    degree.require(KeyType::kInteger);
    t.run->topology.*(row->second) = degree.node().ref<int64_t>();
  }
  try {
    model::validate(t.run->topology);
  } catch (const Error& error) {
    value.fail(Kind::kMesh, "{}", error.what());
  }
  const std::string problem = topology_problem(t.run->topology, t.run->engine);
  if (!problem.empty()) value.fail(Kind::kMesh, "{}", problem);
}

void take_numerics(T& t, const V& value) {
  for (const auto& [key, setting] : value.members()) {
    if (!setting.node().is_string() && !setting.node().is_integer()) {
      setting.fail(Kind::kInput, "expected the name of a value, such as \"fp32\"");
    }
    const std::string chosen = setting.is_text() ? setting.text() : setting.written();
    try {
      model::Numerics::policy("float32").set(key, chosen);
    } catch (const Error& error) {
      setting.fail(error.kind(), "{}", error.what());
    }
    t.run->numerics.emplace_back(key, chosen);
  }
}

template <bool RunSpec::*Member>
void take_run_flag(T& t, const V& value) {
  t.run->*Member = value.flag();
}

[[noreturn]] void later(const V& value, std::string_view needs) {
  value.fail(Kind::kConfig, "needs {}, which this build does not have; leave the key out", needs);
}

const KeyRow kRows[] = {
    {{"", "name", KeyType::kText, "file name", "", "name in results, one word"},
     [](T& t, const V& v) {
       t.scenario->name = v.text();
       if (t.scenario->name.empty() ||
           t.scenario->name.find_first_of("/\\ \t\n") != std::string::npos) {
         v.fail(Kind::kInput, "must be one word without slashes, since result folders carry it");
       }
     }},
    {{"", "description", KeyType::kText, "", "", "the question this scenario answers"},
     [](T& t, const V& v) { t.scenario->description = v.text(); }},
    {{"", "tags", KeyType::kTexts, "[]", "", "words that `lockstep run --tag` selects by"},
     [](T& t, const V& v) { t.scenario->tags = v.texts(); }},
    {{"",
      "comm_timeout_ms",
      KeyType::kInteger,
      "300000",
      "ms",
      "deadline of every wait for a peer"},
     [](T& t, const V& v) { t.scenario->comm_timeout_ms = v.integer(1); }},

    {{"model", "preset", KeyType::kText, "", "", "built-in configuration, weights from `seed`"},
     [](T& t, const V& v) { t.scenario->model.preset = v.text(); }},
    {{"model", "checkpoint", KeyType::kText, "", "", "folder in Hugging Face format"},
     [](T& t, const V& v) { t.scenario->model.checkpoint = locate(*t.scenario, v); }},
    {{"model",
      "golden",
      KeyType::kText,
      "",
      "",
      "stored golden case: its configuration, weights and documents"},
     [](T& t, const V& v) { t.scenario->model.golden = v.text(); }},
    {{"model",
      "overrides",
      KeyType::kTable,
      "{}",
      "",
      "configuration keys (config.json names) that replace those of the preset"},
     [](T& t, const V& v) {
       for (const auto& [key, value] : v.members()) {
         t.scenario->model.overrides[key] = json_of(value);
       }
     }},
    {{"model", "seed", KeyType::kInteger, "0", "", "seed of the weights of a preset"},
     [](T& t, const V& v) { t.scenario->model.seed = static_cast<uint64_t>(v.integer(0)); }},
    {{"model",
      "defaults",
      KeyType::kText,
      "\"refuse\"",
      "",
      "meaning of missing architecture keys: refuse, hf or trainer"},
     [](T& t, const V& v) {
       const std::string word = v.text();
       using model::ConfigDefaults;
       if (word != "refuse" && word != "hf" && word != "trainer") {
         v.fail(Kind::kInput, "use \"refuse\", \"hf\" or \"trainer\"");
       }
       t.scenario->model.defaults = word == "refuse" ? ConfigDefaults::kRefuse
                                    : word == "hf"   ? ConfigDefaults::kHf
                                                     : ConfigDefaults::kTrainer;
     }},
    {{"model",
      "decay_bias",
      KeyType::kNumber,
      "0",
      "",
      "added to dt_bias of every KDA layer: large values forget faster"},
     [](T& t, const V& v) { t.scenario->model.decay_bias = v.number(); }},

    {{"data",
      "documents",
      KeyType::kIntegers,
      "",
      "tokens",
      "lengths of documents with random ids; 0 is an empty document"},
     [](T& t, const V& v) {
       t.scenario->data.documents = v.integers(0);
       int64_t left = kMostTokens;
       for (const int64_t length : t.scenario->data.documents) {
         if (length > left)
           v.fail(Kind::kInput,
                  "data.documents = {}: are more than {} tokens; use fewer or shorter documents",
                  v.written(),
                  kMostTokens);
         left -= length;
       }
     }},
    {{"data", "file", KeyType::kText, "", "", "{\"documents\": [[ids], [ids]]}"},
     [](T& t, const V& v) { t.scenario->data.file = locate(*t.scenario, v); }},
    {{"data", "seed", KeyType::kInteger, "0", "", "seed of random documents"},
     [](T& t, const V& v) { t.scenario->data.seed = static_cast<uint64_t>(v.integer(0)); }},

    {{"run.NAME", "engine", KeyType::kText, "\"trainer\"", "", "trainer or inference"},
     [](T& t, const V& v) {
       t.run->engine = v.text();
       const std::string problem = engine_problem(t.run->engine);
       if (!problem.empty()) v.fail(Kind::kConfig, "{}", problem);
     }},
    {{"run.NAME",
      "policy",
      KeyType::kText,
      "\"float32\"",
      "",
      "row of the numerics table (`lockstep list policies`)"},
     [](T& t, const V& v) {
       t.run->policy = v.text();
       const std::vector<std::string> names = model::Numerics::policy_names();
       if (std::find(names.begin(), names.end(), t.run->policy) == names.end()) {
         v.fail(Kind::kConfig,
                "unknown policy; use one of {}{}",
                fmt::join(names, ", "),
                did_you_mean(t.run->policy, names));
       }
     }},
    {{"run.NAME",
      "numerics",
      KeyType::kTable,
      "{}",
      "",
      "switches that differ from the policy, by id or name: { D09 = \"1\" }"},
     take_numerics},
    {{"run.NAME", "topology", KeyType::kTable, "{}", "ranks", "degrees of the axes: { cp = 2 }"},
     take_topology},
    {{"run.NAME", "device", KeyType::kText, "\"cpu\"", "", "cpu or cuda"},
     [](T& t, const V& v) {
       t.run->device = v.text();
       const std::string problem = device_problem(t.run->device);
       if (!problem.empty()) v.fail(Kind::kConfig, "{}", problem);
     }},
    {{"run.NAME", "grads", KeyType::kFlag, "false", "", "also the gradient of every parameter"},
     take_run_flag<&RunSpec::grads>},
    {{"run.NAME",
      "recompute",
      KeyType::kFlag,
      "false",
      "",
      "keep only layer inputs in forward and recompute each layer in backward"},
     take_run_flag<&RunSpec::recompute>},
    {{"run.NAME",
      "reference_ops",
      KeyType::kFlag,
      "false",
      "",
      "plain reference operators instead of the fast forms"},
     take_run_flag<&RunSpec::reference_ops>},
    {{"run.NAME",
      "stream_layers",
      KeyType::kFlag,
      "false",
      "",
      "weights stay on disk and are mapped layer by layer; no gradients"},
     take_run_flag<&RunSpec::stream_layers>},
    {{"run.NAME",
      "trace",
      KeyType::kText,
      "",
      "",
      "pattern of module names whose outputs are kept: \"layers.*\""},
     [](T& t, const V& v) {
       t.run->trace = v.text();
       if (t.run->trace.empty())
         v.fail(Kind::kInput, "is empty; write \"layers.*\", or leave it out");
     }},
    {{"run.NAME",
      "cp_cuts",
      KeyType::kIntegers,
      "[]",
      "rows",
      "where the row is cut over cp ranks, from 0 to its length; empty: near-even"},
     [](T& t, const V& v) { t.run->cp_cuts = v.integers(0); }},
    {{"run.NAME",
      "decode",
      KeyType::kInteger,
      "0",
      "tokens",
      "last tokens sent through decode steps"},
     [](T& t, const V& v) { t.run->decode = v.integer(0); }},
    {{"run.NAME", "prefill_chunk", KeyType::kInteger, "0", "tokens", "prefill piece; 0: whole"},
     [](T& t, const V& v) { t.run->prefill_chunk = v.integer(0); }},
    {{"run.NAME", "page_size", KeyType::kInteger, "0", "tokens", "latent cache page; 0: engine's"},
     [](T& t, const V& v) { t.run->page_size = v.integer(0); }},
    {{"run.NAME",
      "replay",
      KeyType::kText,
      "",
      "",
      "run of either engine whose expert choice the trainer takes instead of its own (sets D68)"},
     [](T& t, const V& v) {
       t.run->replay = v.text();
       t.run->numerics.emplace_back("D68", "replay");
     }},
    {{"run.NAME",
      "weights_from",
      KeyType::kText,
      "",
      "",
      "trainer run whose weights are synchronised into this one of the inference engine, in one "
      "job"},
     [](T& t, const V& v) {
       t.run->weights_from = v.text();
       if (t.run->weights_from.empty())
         v.fail(Kind::kInput, "is empty; name a run, or leave it out");
     }},
    {{"run.NAME",
      "train_steps",
      KeyType::kInteger,
      "0",
      "steps",
      "steps of AdamW (rate 1e-3) on the documents, with float32 masters, before the run"},
     [](T& t, const V& v) { t.run->train_steps = v.integer(0); }},

    {{"compare", "left", KeyType::kText, "required", "", "a run, or golden:CASE/REFERENCE"},
     [](T& t, const V& v) { t.compare->left = v.text(); }},
    {{"compare",
      "right",
      KeyType::kText,
      "required",
      "",
      "the side held to be true: a run, or golden:CASE/REFERENCE (golden:this/f64 is the case of "
      "[model] golden)"},
     [](T& t, const V& v) { t.compare->right = v.text(); }},
    {{"compare",
      "what",
      KeyType::kText,
      "\"logits\"",
      "",
      "logits, logprobs, loss, grads (the worst one is judged) or trace:PATTERN"},
     [](T& t, const V& v) {
       t.compare->what = v.text();
       static const std::vector<std::string> subjects = {
           "logits", "logprobs", "loss", "grads", "trace"};
       if (t.compare->what.starts_with("trace:")) {
         if (t.compare->what.size() == 6) {
           v.fail(Kind::kInput, "the pattern after trace: is empty; write trace:layers.*");
         }
         return;
       }
       if (t.compare->what == "trace" ||
           std::find(subjects.begin(), subjects.end(), t.compare->what) == subjects.end()) {
         v.fail(Kind::kInput,
                "cannot be compared; use logits, logprobs, loss, grads or trace:PATTERN{}",
                did_you_mean(t.compare->what, subjects));
       }
     }},
    {{"compare", "metric", KeyType::kText, "\"rel_l2\"", "", "see the table of metrics"},
     [](T& t, const V& v) {
       t.compare->metric = v.text();
       if (find_metric(t.compare->metric) != nullptr) return;
       std::vector<std::string> names;
       for (const MetricInfo& metric : metrics()) names.emplace_back(metric.name);
       v.fail(Kind::kInput,
              "unknown metric; use one of {}{}",
              fmt::join(names, ", "),
              did_you_mean(t.compare->metric, names));
     }},
    {{"compare",
      "limit",
      KeyType::kNumberOrText,
      "",
      "metric's",
      "pass bound; \"golden\": from the spread stored with the case; absent: recorded only"},
     [](T& t, const V& v) {
       if (!v.is_text()) {
         t.compare->limit = v.number();
         if (*t.compare->limit < 0) v.fail(Kind::kInput, "must be 0 or more");
         return;
       }
       if (v.text() != "golden") v.fail(Kind::kInput, "must be a number or \"golden\"");
       t.compare->golden_limit = true;
     }},

    {{"sweep",
      "\"TABLE.KEY\"",
      KeyType::kAny,
      "",
      "",
      "array of values of any key above (\"run.*.policy\" means every run); several keys give "
      "every combination"},
     nullptr},

    {{"fault", "kind", KeyType::kText, "required", "", "fault to inject"},
     [](T&, const V& v) { later(v, "fault injection"); }},
    {{"fault", "site", KeyType::kText, "", "", "where, such as cp/state_handoff"},
     [](T&, const V& v) { later(v, "fault injection"); }},
    {{"fault", "rank", KeyType::kInteger, "0", "", "world rank that is hit"},
     [](T&, const V& v) { later(v, "fault injection"); }},
    {{"fault", "step", KeyType::kInteger, "0", "", "step at which it happens"},
     [](T&, const V& v) { later(v, "fault injection"); }},

    {{"expect",
      "exit",
      KeyType::kInteger,
      "0",
      "",
      "exit code that this scenario is meant to end with (0 to 5)"},
     [](T& t, const V& v) {
       const int64_t code = v.integer(0);
       if (code > 5) v.fail(Kind::kInput, "exit codes are 0 to 5");
       t.scenario->expected_exit = static_cast<int>(code);
     }},
    {{"expect", "detector", KeyType::kText, "", "", "detector that has to fire"},
     [](T&, const V& v) { later(v, "fault detection"); }},
};

}  // namespace

std::span<const KeyRow> key_rows() { return kRows; }

std::vector<std::string> key_names(std::string_view table) {
  std::vector<std::string> names;
  for (const KeyRow& row : kRows) {
    if (row.info.table == table) names.emplace_back(row.info.name);
  }
  return names;
}

}  // namespace lockstep::harness
