#include "harness/launch/scenario.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "harness/launch/available.hpp"
#include "harness/launch/paths.hpp"
#include "harness/launch/scenario_keys.hpp"

namespace lockstep::harness {
namespace {

namespace fs = std::filesystem;

/// Reads one table: every key must be known and of its type; `required` ones must be there.
void read_table(KeyTarget& target, const TomlValue& table, std::string_view schema_table) {
  const std::vector<std::string> known = key_names(schema_table);
  for (const auto& [key, value] : table.members()) {
    const KeyRow* found = nullptr;
    for (const KeyRow& row : key_rows()) {
      if (row.info.table == schema_table && row.info.name == key) found = &row;
    }
    if (found == nullptr) {
      value.fail(ErrorKind::kInput,
                 "unknown key{}; keys of {} are {}",
                 did_you_mean(key, known),
                 schema_table.empty() ? "the top level" : fmt::format("[{}]", schema_table),
                 fmt::join(known, ", "));
    }
    value.require(found->info.type);
    found->take(target, value);
  }
  for (const KeyRow& row : key_rows()) {
    if (row.info.table != schema_table || row.info.fallback != "required") continue;
    if (table.node().as_table()->contains(row.info.name)) continue;
    table.fail(ErrorKind::kInput, "has no '{}': {}", row.info.name, row.info.doc);
  }
}

void require_table(const TomlValue& value, std::string_view written) {
  if (value.node().is_table()) return;
  value.fail(ErrorKind::kInput, "expected a table; write {}", written);
}

void check_sources(const Scenario& scenario, const TomlDocument& document) {
  const ModelSpec& model = scenario.model;
  const int sources = (model.preset.empty() ? 0 : 1) + (model.checkpoint.empty() ? 0 : 1) +
                      (model.golden.empty() ? 0 : 1);
  const std::string at = model.where.empty() ? document.file().string() : model.where;
  LOCKSTEP_CHECK(sources == 1,
                 kInput,
                 "scenario {}: [model] {}; give exactly one of preset, checkpoint, golden",
                 at,
                 sources == 0 ? "names no model" : "names more than one model");
  LOCKSTEP_CHECK(model.overrides.empty() || !model.preset.empty(),
                 kInput,
                 "scenario {}: [model] overrides change a preset; this model is a {}, whose "
                 "configuration is fixed",
                 at,
                 model.checkpoint.empty() ? "stored golden case" : "checkpoint");
  const DataSpec& data = scenario.data;
  const bool given = !data.documents.empty() || !data.file.empty();
  const std::string data_at = data.where.empty() ? document.file().string() : data.where;
  LOCKSTEP_CHECK(data.documents.empty() || data.file.empty(),
                 kInput,
                 "scenario {}: [data] has documents and file; give one of them",
                 data_at);
  LOCKSTEP_CHECK(given || !model.golden.empty(),
                 kInput,
                 "scenario {}: [data] has no tokens; give documents = [lengths] or file",
                 data_at);
  LOCKSTEP_CHECK(!given || model.golden.empty(),
                 kInput,
                 "scenario {}: [data] is given beside [model] golden, which brings the documents "
                 "its reference was computed with; leave [data] out",
                 data_at);
}

void check_compare(const Scenario& scenario, const CompareSpec& compare) {
  std::vector<std::string> names;
  for (const RunSpec& run : scenario.runs) names.push_back(run.name);
  const std::string subject = compare.what.substr(0, compare.what.find(':'));
  bool golden_side = false;
  for (const std::string* side : {&compare.left, &compare.right}) {
    if (parse_golden_ref(*side, scenario.model)) {
      golden_side = true;
      continue;
    }
    const RunSpec* run = scenario.find_run(*side);
    LOCKSTEP_CHECK(run != nullptr,
                   kInput,
                   "scenario {}: compare of '{}': there is no such run; runs are {}{}. A stored "
                   "reference is written golden:CASE/f64",
                   compare.where,
                   *side,
                   fmt::join(names, ", "),
                   did_you_mean(*side, names));
    LOCKSTEP_CHECK(subject != "grads" || run->grads,
                   kInput,
                   "scenario {}: compare of grads: [run.{}] computes none; set grads = true there",
                   compare.where,
                   run->name);
    LOCKSTEP_CHECK(subject != "trace" || !run->trace.empty(),
                   kInput,
                   "scenario {}: compare of {}: [run.{}] keeps no activations; set trace = \"{}\" "
                   "there",
                   compare.where,
                   compare.what,
                   run->name,
                   compare.what.substr(6));
  }
  const MetricInfo& metric = *find_metric(compare.metric);
  const std::string fits = fmt::format(" {} ", metric.fits);
  LOCKSTEP_CHECK(fits.find(" " + subject + " ") != std::string::npos,
                 kInput,
                 "scenario {}: metric {} cannot measure {}; it is for: {}",
                 compare.where,
                 compare.metric,
                 compare.what,
                 metric.fits);
  LOCKSTEP_CHECK(!compare.golden_limit || compare.metric == "rel_l2",
                 kInput,
                 "scenario {}: limit = \"golden\" is a relative L2 error; set metric = \"rel_l2\" "
                 "instead of {}, or give a number",
                 compare.where,
                 compare.metric);
  LOCKSTEP_CHECK(!compare.golden_limit || golden_side,
                 kInput,
                 "scenario {}: limit = \"golden\" needs a stored reference on one side, this "
                 "compares {} with {}",
                 compare.where,
                 compare.left,
                 compare.right);
}

/// Runs that replay come last, and those they replay keep their expert choice.
void settle_replay(Scenario& scenario) {
  std::vector<std::string> names;
  for (const RunSpec& run : scenario.runs) names.push_back(run.name);
  for (const RunSpec& run : scenario.runs) {
    if (run.replay.empty()) continue;
    RunSpec* source = nullptr;
    for (RunSpec& other : scenario.runs)
      if (other.name == run.replay && other.name != run.name) source = &other;
    LOCKSTEP_CHECK(
        source != nullptr,
        kInput,
        "scenario {}: replay = \"{}\": there is no other run of that name; runs are {}{}",
        run.where,
        run.replay,
        fmt::join(names, ", "),
        did_you_mean(run.replay, names));
    LOCKSTEP_CHECK(source->replay.empty(),
                   kInput,
                   "scenario {}: replay = \"{}\": that run takes the choice of {} itself; name {}",
                   run.where,
                   run.replay,
                   source->replay,
                   source->replay);
    if (source->trace != "*" && source->trace.find(kExpertsTrace) == std::string::npos)
      source->trace += fmt::format("{}{}", source->trace.empty() ? "" : ",", kExpertsTrace);
  }
  std::stable_partition(scenario.runs.begin(), scenario.runs.end(), [](const RunSpec& run) {
    return run.replay.empty();
  });
}

/// Runs that take weights know the run that has them.
void settle_weights(Scenario& scenario) {
  std::vector<std::string> names;
  for (const RunSpec& run : scenario.runs) {
    if (run.engine == "trainer") names.push_back(run.name);
  }
  for (RunSpec& run : scenario.runs) {
    if (run.weights_from.empty()) continue;
    const RunSpec* from = scenario.find_run(run.weights_from);
    LOCKSTEP_CHECK(
        from != nullptr && from->engine == "trainer",
        kInput,
        "scenario {}: weights_from = \"{}\": there is no trainer run of that name; those "
        "are {}{}",
        run.where,
        run.weights_from,
        names.empty() ? "none" : fmt::format("{}", fmt::join(names, ", ")),
        did_you_mean(run.weights_from, names));
    LOCKSTEP_CHECK(
        !from->stream_layers && from->replay.empty(),
        kInput,
        "scenario {}: weights_from = \"{}\": that run {}; name another",
        run.where,
        run.weights_from,
        from->stream_layers ? "streams its weights from disk" : "takes the experts of a third one");
    run.trainer = {*from};
  }
}

Scenario read_scenario(const TomlDocument& document) {
  Scenario scenario;
  scenario.file = document.file();
  scenario.name = document.file().stem().string();
  KeyTarget target{.scenario = &scenario};
  const TomlValue root(document, document.root(), "");

  // Top-level scalars first, so that the tables can rely on them.
  const std::vector<std::string> tables = {
      "model", "data", "run", "compare", "sweep", "fault", "expect"};
  std::vector<std::string> known = key_names("");
  known.insert(known.end(), tables.begin(), tables.end());
  for (const auto& [key, value] : root.members()) {
    const KeyRow* found = nullptr;
    for (const KeyRow& row : key_rows()) {
      if (row.info.table.empty() && row.info.name == key) found = &row;
    }
    if (found != nullptr) {
      value.require(found->info.type);
      found->take(target, value);
    } else if (std::find(tables.begin(), tables.end(), key) == tables.end()) {
      value.fail(ErrorKind::kInput,
                 "unknown key{}; a scenario has {}",
                 did_you_mean(key, known),
                 fmt::join(known, ", "));
    }
  }
  for (const auto& [key, value] : root.members()) {
    if (key == "model" || key == "data" || key == "expect") {
      require_table(value, fmt::format("[{}]", key));
      if (key == "model") scenario.model.where = value.where();
      if (key == "data") scenario.data.where = value.where();
      read_table(target, value, key);
    } else if (key == "run") {
      require_table(value, "[run.NAME]");
      for (const auto& [run, table] : value.members()) {
        require_table(table, fmt::format("[run.{}]", run));
        if (run.find_first_of("/\\: \t\n") != std::string::npos || run.empty() || run == "*") {
          table.fail(ErrorKind::kInput, "the name of a run is one word without slash or colon");
        }
        RunSpec spec;
        spec.name = run;
        spec.where = table.where();
        target.run = &spec;
        read_table(target, table, "run.NAME");
        if (spec.stream_layers && spec.grads) {
          table.fail(ErrorKind::kConfig,
                     "stream_layers drops weights after use, so grads cannot be computed; set one "
                     "of them to false");
        }
        const std::string problem = option_problem(spec);
        if (!problem.empty()) table.fail(ErrorKind::kConfig, "{}", problem);
        target.run = nullptr;
        scenario.runs.push_back(std::move(spec));
      }
    } else if (key == "compare" || key == "fault") {
      const toml::array* array = value.node().as_array();
      if (array == nullptr || !std::all_of(array->begin(), array->end(), [](const toml::node& n) {
            return n.is_table();
          })) {
        value.fail(ErrorKind::kInput, "expected tables; write [[{}]]", key);
      }
      for (size_t i = 0; i < array->size(); ++i) {
        const TomlValue table(document, (*array)[i], fmt::format("{}.{}", key, i));
        CompareSpec spec;
        spec.where = table.where();
        target.compare = &spec;
        read_table(target, table, key);
        target.compare = nullptr;
        if (key == "compare") scenario.compares.push_back(std::move(spec));
      }
    }
  }
  check_sources(scenario, document);
  LOCKSTEP_CHECK(!scenario.runs.empty(),
                 kInput,
                 "scenario {}: has no run; write a [run.NAME] table",
                 document.file().string());
  settle_replay(scenario);
  settle_weights(scenario);
  for (const CompareSpec& compare : scenario.compares) check_compare(scenario, compare);
  return scenario;
}

struct SweepAxis {
  std::string key, where;
  std::vector<SweepValue> values;
};

void collect_axes(const TomlValue& table, const std::string& prefix, std::vector<SweepAxis>& axes) {
  for (const auto& [key, value] : table.members()) {
    const std::string path = prefix.empty() ? key : fmt::format("{}.{}", prefix, key);
    if (value.node().is_table()) {
      collect_axes(value, path, axes);
      continue;
    }
    const toml::array* array = value.node().as_array();
    if (array == nullptr || array->empty()) {
      value.fail(ErrorKind::kInput, "expected an array with one entry per value to try");
    }
    if (path.find('.') == std::string::npos) {
      value.fail(ErrorKind::kInput,
                 "'{}' names no table; write for example \"run.*.{}\" or \"model.{}\"",
                 path,
                 path,
                 path);
    }
    if (path.starts_with("sweep.")) {
      value.fail(ErrorKind::kInput,
                 "a sweep cannot vary itself; name a key of another table, such as \"model.seed\" "
                 "or \"run.*.policy\"");
    }
    SweepAxis axis{path, value.where(), {}};
    for (size_t i = 0; i < array->size(); ++i) {
      const toml::node& node = (*array)[i];
      SweepValue entry{path, value.member(node).written(), static_cast<double>(i)};
      if (node.is_integer()) entry.x = static_cast<double>(node.ref<int64_t>());
      if (node.is_floating_point()) entry.x = node.ref<double>();
      if (const toml::array* list = node.as_array()) {
        entry.x = 0;
        for (const toml::node& item : *list) entry.x += item.value_or(0.0);
      }
      axis.values.push_back(std::move(entry));
    }
    axes.push_back(std::move(axis));
  }
}

std::pair<std::string_view, std::string_view> split_set(const std::string& set) {
  const size_t equals = set.find('=');
  LOCKSTEP_CHECK(equals != std::string::npos && equals > 0,
                 kInput,
                 "--set {}: not of the form key=value; write for example --set "
                 "run.cp1.policy=float64",
                 set);
  return {std::string_view(set).substr(0, equals), std::string_view(set).substr(equals + 1)};
}

}  // namespace

const RunSpec* Scenario::find_run(std::string_view run) const {
  for (const RunSpec& spec : runs) {
    if (spec.name == run) return &spec;
  }
  return nullptr;
}

std::string ScenarioPoint::label() const {
  std::string text;
  for (const SweepValue& value : values) {
    std::string key = value.key.substr(value.key.rfind('.') + 1);
    const auto same_end = std::count_if(values.begin(), values.end(), [&](const SweepValue& other) {
      return other.key.substr(other.key.rfind('.') + 1) == key;
    });
    if (same_end > 1) key = value.key;
    std::string written = value.value;
    written.erase(std::remove(written.begin(), written.end(), '"'), written.end());
    written.erase(std::remove(written.begin(), written.end(), '\''), written.end());
    written.erase(std::remove(written.begin(), written.end(), ' '), written.end());
    text += fmt::format("{}{}={}", text.empty() ? "" : " ", key, written);
  }
  return text;
}

ScenarioSet parse_scenario(std::string_view text,
                           const fs::path& file,
                           const std::vector<std::string>& sets) {
  const auto with_sets = [&] {
    TomlDocument document(text, file);
    for (const std::string& set : sets) {
      const auto [key, value] = split_set(set);
      document.set(key, value, "--set " + set);
    }
    return document;
  };
  const TomlDocument document = with_sets();
  std::vector<SweepAxis> axes;
  if (const toml::node* sweep = document.root().get("sweep")) {
    const TomlValue table(document, *sweep, "sweep");
    require_table(table, "[sweep]");
    collect_axes(table, "", axes);
  }
  ScenarioSet set;
  set.file = file;
  std::vector<size_t> at(axes.size(), 0);
  while (true) {
    ScenarioPoint point;
    TomlDocument varied = with_sets();
    for (size_t a = 0; a < axes.size(); ++a) {
      const SweepValue& value = axes[a].values[at[a]];
      const size_t slash = axes[a].where.rfind(':');
      const std::string line =
          slash == std::string::npos ? "" : " at line " + axes[a].where.substr(slash + 1);
      varied.set(value.key, value.value, fmt::format("[sweep]{}", line));
      point.values.push_back(value);
    }
    point.scenario = read_scenario(varied);
    set.points.push_back(std::move(point));
    // The last axis runs fastest.
    size_t a = axes.size();
    while (a > 0 && ++at[a - 1] == axes[a - 1].values.size()) at[--a] = 0;
    if (a == 0) break;
    LOCKSTEP_CHECK(set.points.size() < 10000,
                   kInput,
                   "scenario {}: [sweep] has more than 10000 combinations; sweep fewer keys",
                   file.string());
  }
  const Scenario& first = set.points.front().scenario;
  set.name = first.name;
  set.description = first.description;
  set.tags = first.tags;
  return set;
}

ScenarioSet load_scenario(const fs::path& file, const std::vector<std::string>& sets) {
  std::ifstream in(file, std::ios::binary);
  LOCKSTEP_CHECK(in.good(),
                 kInput,
                 "scenario {}: cannot be opened; check the path (`lockstep list scenarios` shows "
                 "those of the current folder)",
                 file.string());
  std::ostringstream text;
  text << in.rdbuf();
  return parse_scenario(text.str(), file, sets);
}

namespace {

/// What may have been meant by a path that is not there: a scenario by its name, or from another
/// folder.
std::string where_scenarios_are(const fs::path& path) {
  const fs::path folder = scenario_folder();
  if (folder.empty()) return "; name scenario files or folders";
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() == ".toml") names.push_back(entry.path().stem().string());
  }
  std::sort(names.begin(), names.end());
  const std::string name = path.stem().string();
  if (std::find(names.begin(), names.end(), name) != names.end())
    return fmt::format("; did you mean {}?", (folder / (name + ".toml")).string());
  return fmt::format("{}; name scenario files or folders, scenarios are in {}: {}",
                     did_you_mean(name, names),
                     folder.string(),
                     fmt::join(names, ", "));
}

}  // namespace

std::vector<fs::path> find_scenarios(const std::vector<fs::path>& paths) {
  std::vector<fs::path> files;
  for (const fs::path& path : paths) {
    std::error_code error;
    if (fs::is_directory(path, error)) {
      std::vector<fs::path> inside;
      for (const auto& entry : fs::directory_iterator(path)) {
        if (entry.path().extension() == ".toml") inside.push_back(entry.path());
      }
      LOCKSTEP_CHECK(!inside.empty(),
                     kInput,
                     "scenarios: folder {} holds no .toml file; name scenario files or a folder "
                     "with some",
                     path.string());
      std::sort(inside.begin(), inside.end());
      files.insert(files.end(), inside.begin(), inside.end());
    } else {
      LOCKSTEP_CHECK(fs::exists(path, error),
                     kInput,
                     "scenarios: {} does not exist{}",
                     path.string(),
                     where_scenarios_are(path));
      files.push_back(path);
    }
  }
  return files;
}

std::optional<GoldenRef> parse_golden_ref(std::string_view side, const ModelSpec& model) {
  if (!side.starts_with("golden:")) return std::nullopt;
  const std::string_view rest = side.substr(7);
  const size_t slash = rest.rfind('/');
  LOCKSTEP_CHECK(slash != std::string_view::npos && slash > 0 && slash + 1 < rest.size(),
                 kInput,
                 "compare: '{}' is not golden:CASE/REFERENCE; write for example golden:tiny/f64",
                 side);
  GoldenRef ref{std::string(rest.substr(0, slash)), std::string(rest.substr(slash + 1))};
  if (ref.golden_case == "this") {
    LOCKSTEP_CHECK(!model.golden.empty(),
                   kInput,
                   "compare: '{}' means the case of [model] golden, which is not given; name the "
                   "case",
                   side);
    ref.golden_case = model.golden;
  }
  return ref;
}

}  // namespace lockstep::harness
