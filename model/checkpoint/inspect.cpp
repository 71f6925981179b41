#include <fmt/ranges.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "model/checkpoint/checkpoint_source.hpp"
#include "model/checkpoint/convert.hpp"

namespace lockstep::model {
namespace {

using Json = nlohmann::ordered_json;

/// Config, match and problems of a folder whose files could be read.
struct Findings {
  std::string config, naming, problems;
  std::vector<std::string> dropped;
};

/// The scheme of the tensors whose name tells one; "mixed" if several do.
std::string naming_of(const std::vector<Parameter>& parameters, const NameMatch& match) {
  std::set<std::string_view> seen;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Binding& binding = match.bindings[i];
    const auto& parts = parameters[i].parts_in(binding.naming);
    if (binding.tensors.size() != parts.size()) continue;
    size_t same = 0;
    for (Naming naming : kNamings) {
      const auto& others = parameters[i].parts_in(naming);
      same += others.size() == parts.size() && others.front().name == parts.front().name;
    }
    if (same == 1) seen.insert(naming_name(binding.naming));
  }
  return seen.empty() ? "released" : seen.size() > 1 ? "mixed" : std::string(*seen.begin());
}

Findings find_out(const std::string& folder, const Safetensors& files, ConfigDefaults defaults) {
  Findings result;
  try {
    const ModelConfig config = load_config(folder, defaults);
    result.config = describe_config(config);
    const auto parameters = expected_parameters(config);
    const NameMatch match = match_names(config, parameters, files.tensors());
    result.problems = match.problems();
    result.dropped = match.dropped;
    result.naming = naming_of(parameters, match);
  } catch (const Error& error) {
    result.problems = error.what();
  }
  return result;
}

}  // namespace

Inspection inspect(const std::string& folder, ConfigDefaults defaults) {
  const Safetensors files = Safetensors::open(folder);
  const Findings found = find_out(folder, files, defaults);

  Json json;
  json["folder"] = folder;
  json["naming"] = found.naming.empty() ? Json(nullptr) : Json(found.naming);
  std::string text = folder + "\n";
  for (const auto& file : files.files()) {
    const std::string name = std::filesystem::path(file->path()).filename().string();
    json["files"].push_back({{"name", name}, {"bytes", file->size()}});
    text += fmt::format("  {}  {} bytes\n", name, file->size());
  }

  std::map<std::string, std::pair<int64_t, uint64_t>> by_dtype;  // elements, bytes
  int64_t elements = 0;
  std::string table;
  json["tensors"] = Json::array();
  for (const auto& [name, info] : files.tensors()) {
    const std::string dtype(safetensors_dtype(info.dtype));
    by_dtype[dtype].first += info.numel();
    by_dtype[dtype].second += info.bytes();
    elements += info.numel();
    json["tensors"].push_back(
        {{"name", name}, {"dtype", dtype}, {"shape", info.shape}, {"file", info.shard}});
    table += fmt::format(
        "  {:<8} {:<20} {}\n", dtype, fmt::format("[{}]", fmt::join(info.shape, ", ")), name);
  }
  auto& totals = json["totals"];
  totals["tensors"] = files.tensors().size();
  totals["elements"] = elements;
  totals["bytes"] = files.total_bytes();
  text += fmt::format(
      "{} tensors, {} elements, {} bytes", files.tensors().size(), elements, files.total_bytes());
  for (const auto& [dtype, sums] : by_dtype) {
    totals["by_dtype"][dtype] = {{"elements", sums.first}, {"bytes", sums.second}};
    text += fmt::format("; {} {} bytes", dtype, sums.second);
  }
  text += fmt::format("\nnaming: {}\n", found.naming.empty() ? "unknown" : found.naming);

  json["dropped"] = found.dropped;
  json["config"] = found.config.empty() ? Json(nullptr) : Json::parse(found.config);
  json["problems"] = found.problems.empty() ? Json(nullptr) : Json(found.problems);
  text += found.problems.empty() ? "config and tensors belong together\n"
                                 : fmt::format("problems: {}\n", found.problems);
  text += fmt::format("not part of the text model: {} tensors\n", found.dropped.size());
  text += "config: " + (found.config.empty() ? std::string("unreadable") : found.config) +
          "\ntensors:\n" + table;
  return {text, json.dump(2) + "\n", found.problems.empty(), found.problems};
}

}  // namespace lockstep::model
