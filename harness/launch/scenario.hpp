// A scenario file, checked: one question, the runs that answer it, and what is compared.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "model/config/model_config.hpp"
#include "model/config/topology.hpp"

namespace lockstep::harness {

/// Exactly one of preset, checkpoint and golden is set.
struct ModelSpec {
  std::string preset;                ///< name of a built-in configuration, weights by seed
  std::filesystem::path checkpoint;  ///< Hugging Face format folder
  std::string golden;                ///< stored golden case: configuration, weights and documents
  std::map<std::string, std::string> overrides;  ///< configuration key -> JSON value, presets only
  uint64_t seed = 0;
  model::ConfigDefaults defaults = model::ConfigDefaults::kRefuse;
  double decay_bias = 0;  ///< added to every KDA dt_bias
  std::string where;      ///< "file:line" of the table, for messages
};

struct DataSpec {
  std::vector<int64_t> documents;  ///< lengths of random documents
  std::filesystem::path file;      ///< {"documents": [[ids], ...]}
  uint64_t seed = 0;
  std::string where;
};

/// Modules whose outputs are the expert choice of a run.
inline constexpr std::string_view kExpertsTrace = "*.mlp.gate.experts";

struct RunSpec {
  std::string name;
  std::string engine = "trainer", policy = "float32", device = "cpu", trace;
  std::vector<std::pair<std::string, std::string>> numerics;  ///< switch id -> value
  model::Topology topology;
  std::vector<int64_t> cp_cuts;  ///< empty: near-even
  std::string replay;            ///< run whose expert choice is taken; empty: own choice
  std::string weights_from;      ///< trainer run whose weights are served; empty: the model's
  std::vector<RunSpec> trainer;  ///< that run, or nothing
  int64_t train_steps = 0;       ///< of the optimizer on the documents, before the run
  bool grads = false, recompute = false, reference_ops = false, stream_layers = false;
  int64_t decode = 0, prefill_chunk = 0, page_size = 0;  ///< inference; page_size 0: the engine's
  std::string where;

  /// Ranks of the run; with a trainer, on the same ranks, the most of both.
  [[nodiscard]] int64_t num_ranks() const {
    const int64_t own = topology.num_ranks();
    return trainer.empty() ? own : std::max(own, trainer.front().num_ranks());
  }
};

struct CompareSpec {
  std::string left, right, what = "logits", metric = "rel_l2";
  std::optional<double> limit;  ///< empty: recorded only, unless golden_limit
  bool golden_limit = false;    ///< the limit comes from the spread stored with the golden case
  std::string where;
};

struct Scenario {
  std::string name, description;
  std::vector<std::string> tags;
  std::filesystem::path file;
  ModelSpec model;
  DataSpec data;
  std::vector<RunSpec> runs;  ///< in file order
  std::vector<CompareSpec> compares;
  int64_t comm_timeout_ms = 300000;
  int expected_exit = 0;  ///< [expect] exit

  [[nodiscard]] const RunSpec* find_run(std::string_view run) const;
};

/// One swept key and its value at this point.
struct SweepValue {
  std::string key, value;  ///< value as written in TOML
  double x = 0;  ///< the number; for a list of numbers their sum; else the position in the list
};

/// A scenario at one point of its sweep; without [sweep] a file has one point with no values.
struct ScenarioPoint {
  Scenario scenario;
  std::vector<SweepValue> values;
  /// "" or "documents=[64], policy=float32", for result names; the shortest unambiguous key names.
  [[nodiscard]] std::string label() const;
};

struct ScenarioSet {
  std::string name, description;
  std::vector<std::string> tags;
  std::filesystem::path file;
  std::vector<ScenarioPoint> points;
};

/// Reads and checks a file and applies `sets` ("run.cp1.policy=float64"; run.* means every run),
/// then expands its sweep. Everything that can be known without computing is checked here: unknown
/// keys and wrong types, policies, switches, topologies, metrics, runs that compares name, files.
/// Throws kInput, kConfig, kMesh or kGolden naming file, line and what to change.
ScenarioSet load_scenario(const std::filesystem::path& file,
                          const std::vector<std::string>& sets = {});

/// Same from text; `file` names it in messages and anchors relative paths.
ScenarioSet parse_scenario(std::string_view text,
                           const std::filesystem::path& file,
                           const std::vector<std::string>& sets = {});

/// The .toml files named by paths: files as they are, folders searched without recursion in name
/// order. Throws kInput for a missing path or a folder without scenario files.
std::vector<std::filesystem::path> find_scenarios(const std::vector<std::filesystem::path>& paths);

/// Where a side of a compare points.
struct GoldenRef {
  std::string golden_case, reference;  ///< "tiny", "f64"
};
/// "golden:tiny/f64" -> parts; empty when `side` is a run name. "golden:this/f64" means the case
/// that [model] golden names. Throws kInput for a malformed reference.
std::optional<GoldenRef> parse_golden_ref(std::string_view side, const ModelSpec& model);

}  // namespace lockstep::harness
