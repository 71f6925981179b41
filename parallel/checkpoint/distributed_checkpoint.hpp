// Training state on disk, written by all ranks together and read by any number of them.
//
// A checkpoint is a folder: config.json and model.safetensors (masters under internal names, so
// that every tool that opens checkpoints opens it), one <moment>.safetensors per kind of optimizer
// state, and state.json, which is written last. All tensors are whole, so nothing in it depends on
// the topology that wrote it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "model/checkpoint/weight_source.hpp"
#include "model/config/numerics.hpp"
#include "parallel/fsdp/sharded_parameters.hpp"
#include "parallel/mesh/mesh.hpp"
#include "parallel/optim/optimizer.hpp"

namespace lockstep::parallel {

struct TrainingState {
  int64_t step = 0;  ///< optimizer steps done
  std::map<std::string, std::string>
      values;  ///< of the caller: seeds, generator state, data position
};

/// What of a rank goes into a checkpoint.
struct TrainingParts {
  const model::ModelConfig& config;
  const model::Numerics& num;
  const Mesh& mesh;
  ShardedParameters& params;
  Optimizer* optimizer;  ///< null: weights only
};

/// Writes `folder` (which must not exist) under a temporary name beside it and renames it when
/// every rank has written and synced its bytes: each writes its rows of the first replica straight
/// to their place in the files. A save that is killed leaves no folder of that name; what it left
/// is named
/// ".<name>.partial" and is overwritten by the next save. Collective; throws kInput on every rank
/// if one cannot write (full disk), naming that rank. The ranks must share the file system.
void save_checkpoint(const std::string& folder,
                     const TrainingState& state,
                     const TrainingParts& parts);

/// Names and bytes of the tensor files that save_checkpoint() writes, from the configuration alone.
std::vector<std::pair<std::string, uint64_t>> checkpoint_files(const model::ModelConfig& config,
                                                               const model::Numerics& num,
                                                               OptimizerKind optimizer);

/// Weights of a checkpoint, for ParamSpec::load_rows at any topology. Throws kInput for a folder
/// without state.json (a save that did not finish) or files shorter than it says.
std::unique_ptr<model::WeightSource> open_training_checkpoint(const std::string& folder);

/// Fills shards and moments with this rank's rows, and the optimizer's step count. Not collective.
/// Throws kInput when a tensor is missing or misshapen, or moments are absent or of another
/// optimizer.
TrainingState load_checkpoint(const std::string& folder, const TrainingParts& parts);

/// Newest complete checkpoint "<prefix><step>" in a folder, or empty.
std::string latest_checkpoint(const std::string& folder, const std::string& prefix);

}  // namespace lockstep::parallel
