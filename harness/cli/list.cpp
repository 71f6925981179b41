#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "harness/cli/commands.hpp"
#include "harness/cli/operators.hpp"
#include "harness/launch/paths.hpp"
#include "harness/launch/schema.hpp"
#include "model/config/config_json.hpp"
#include "model/config/numerics.hpp"

namespace lockstep::harness {
namespace {

using Json = nlohmann::ordered_json;
using model::kNumSwitches;
using model::Numerics;
using model::Switch;

struct Found {
  std::string file, name, description;
  std::vector<std::string> tags;
};

/// Scenarios of ./scenarios; without such a folder those of the current one and of the source tree.
std::vector<Found> scenarios_here() {
  namespace fs = std::filesystem;
  std::vector<Found> found;
  std::vector<fs::path> files, folders = {scenario_folder()};
  std::error_code unread;
  if (folders.front() != "scenarios" && !fs::equivalent(folders.front(), ".", unread))
    folders.emplace_back(".");
  for (const fs::path& folder : folders) {
    if (!fs::is_directory(folder, unread)) continue;
    for (const auto& entry : fs::directory_iterator(folder)) {
      if (entry.path().extension() == ".toml") files.push_back(entry.path());
    }
  }
  std::sort(files.begin(), files.end());
  for (const auto& file : files) {
    try {
      const ScenarioSet set = load_scenario(file);
      found.push_back({file.string(), set.name, set.description, set.tags});
    } catch (const Error& error) {
      found.push_back(
          {file.string(), file.stem().string(), fmt::format("cannot run: {}", error.what()), {}});
    }
  }
  return found;
}

void list_scenarios(const Context& context) {
  const std::vector<Found> found = scenarios_here();
  if (context.json) {
    Json list = Json::array();
    for (const Found& s : found) {
      list.push_back(
          {{"file", s.file}, {"name", s.name}, {"description", s.description}, {"tags", s.tags}});
    }
    print(list.dump(2) + "\n");
    return;
  }
  for (const Found& s : found) {
    print(fmt::format("{:<48} {}{}\n",
                      s.file,
                      s.description,
                      s.tags.empty() ? "" : fmt::format(" [{}]", fmt::join(s.tags, ", "))));
  }
  if (found.empty())
    print("no scenario files in ./scenarios, here or in the source tree of this program\n");
}

std::string_view width_name(model::Width width) {
  return width == model::Width::kFloat64   ? "float64"
         : width == model::Width::kFloat32 ? "float32"
                                           : "bfloat16";
}

void list_policies(const Context& context) {
  const Numerics plain = Numerics::policy("float64");
  Json list = Json::array();
  for (const std::string& name : Numerics::policy_names()) {
    const Numerics policy = Numerics::policy(name);
    const auto differing = policy.differences(plain).size();
    list.push_back({{"name", name},
                    {"activations", width_name(policy.width())},
                    {"accumulation", policy.acc() == at::kDouble ? "float64" : "float32"},
                    {"switches_off_plain", differing}});
    if (!context.json) {
      print(fmt::format(
          "{:<20} activations {:<9} accumulation {:<8} {} switches off the plain value\n",
          name,
          width_name(policy.width()),
          policy.acc() == at::kDouble ? "float64" : "float32",
          differing));
    }
  }
  if (context.json) print(list.dump(2) + "\n");
}

void list_switches(const std::string& policy_name, const Context& context) {
  std::optional<Numerics> policy;
  if (!policy_name.empty()) policy = Numerics::policy(policy_name);
  Json list = Json::array();
  for (size_t i = 0; i < kNumSwitches; ++i) {
    const model::SwitchInfo& info = model::kSwitches[i];
    std::vector<std::string> values(
        info.values.begin(), info.values.begin() + static_cast<std::ptrdiff_t>(info.num_values()));
    const std::string chosen = policy ? std::string(policy->value(static_cast<Switch>(i))) : "";
    Json row{{"id", info.id}, {"name", info.name}, {"values", values}, {"doc", info.doc}};
    if (policy) row["value"] = chosen;
    list.push_back(row);
    if (!context.json) {
      print(fmt::format("{} {:<22} {:<36}{} {}\n",
                        info.id,
                        info.name,
                        fmt::format("{}", fmt::join(values, " | ")),
                        policy ? fmt::format(" = {:<14}", chosen) : "",
                        info.doc));
    }
  }
  if (context.json) print(list.dump(2) + "\n");
}

void list_operators(const Context& context) {
  Json list = Json::array();
  for (const OperatorInfo& op : kOperators) {
    list.push_back({{"name", op.name}, {"header", op.header}, {"doc", op.doc}});
    if (!context.json) print(fmt::format("{:<18} {:<34} {}\n", op.name, op.header, op.doc));
  }
  if (context.json) print(list.dump(2) + "\n");
}

void list_presets(const Context& context) {
  Json list = Json::array();
  for (const std::string& name : model::preset_names()) {
    const model::ModelConfig config = model::preset_config(name);
    list.push_back({{"name", name},
                    {"hidden_size", config.hidden_size},
                    {"num_hidden_layers", config.num_hidden_layers},
                    {"n_routed_experts", config.n_routed_experts},
                    {"vocab_size", config.vocab_size}});
    if (!context.json) {
      print(fmt::format("{:<16} hidden {}, {} layers, {} experts, vocabulary {}\n",
                        name,
                        config.hidden_size,
                        config.num_hidden_layers,
                        config.n_routed_experts,
                        config.vocab_size));
    }
  }
  if (context.json) print(list.dump(2) + "\n");
}

}  // namespace

int run_command_list(const ListOptions& options, const Context& context) {
  const std::vector<std::string> kinds = {
      "scenarios", "policies", "switches", "operators", "presets", "schema"};
  LOCKSTEP_CHECK(options.policy.empty() || options.what == "switches",
                 kInput,
                 "list: --policy {} belongs to `lockstep list switches`",
                 options.policy);
  LOCKSTEP_CHECK(!options.markdown || options.what == "schema",
                 kInput,
                 "list: --markdown belongs to `lockstep list schema`");
  if (options.what.empty() && context.json) {
    print(Json(kinds).dump() + "\n");
  } else if (options.what.empty()) {
    print(fmt::format("lockstep list WHAT: {}\n", fmt::join(kinds, ", ")));
  } else if (options.what == "scenarios") {
    list_scenarios(context);
  } else if (options.what == "policies") {
    list_policies(context);
  } else if (options.what == "switches") {
    list_switches(options.policy, context);
  } else if (options.what == "operators") {
    list_operators(context);
  } else if (options.what == "presets") {
    list_presets(context);
  } else if (options.what == "schema") {
    print(context.json       ? schema_json() + "\n"
          : options.markdown ? schema_markdown()
                             : schema_text());
  } else {
    fail(ErrorKind::kInput,
         "list: '{}' is not a list; use one of {}{}",
         options.what,
         fmt::join(kinds, ", "),
         did_you_mean(options.what, kinds));
  }
  return 0;
}

}  // namespace lockstep::harness
