// What a scenario computes with: weights and documents.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "golden/store/golden_case.hpp"
#include "harness/engine/documents.hpp"
#include "harness/launch/scenario.hpp"
#include "model/checkpoint/weight_source.hpp"
#include "model/config/numerics.hpp"

namespace lockstep::harness {

struct Workload {
  std::shared_ptr<const model::WeightSource> source;
  Documents documents = make_documents({});
  std::string checkpoint;  ///< "preset tiny, seed 3", folder name, "golden tiny, seed 1"
  std::vector<std::pair<std::string, std::string>> provenance;
};

/// The configuration alone: no weights are read. Throws kConfig, kInput or kGolden naming the file
/// and line of [model].
model::ModelConfig resolve_config(const ModelSpec& model);

/// Opens weights (headers only, or by formula) and reads or draws the documents. Throws as
/// resolve_config, and kInput for documents that the model cannot take.
Workload load_workload(const Scenario& scenario);

/// Weights and documents of a stored case: weights by formula from its seed, or those of the
/// checkpoint that was stored with it.
Workload golden_workload(const golden::GoldenCase& stored);

/// `source` with decay_bias added to dt_bias of every KDA layer.
std::shared_ptr<const model::WeightSource> with_decay_bias(
    std::shared_ptr<const model::WeightSource> source, double decay_bias);

/// The numerics of a run: its policy with its switches.
model::Numerics numerics_of(const RunSpec& run);

/// Adds SWITCH=VALUE of a command line. Throws kInput where the switch has another value already.
void add_numerics(RunSpec& run, const std::string& id, const std::string& value);

}  // namespace lockstep::harness
