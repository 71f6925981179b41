// What one run computed, in memory and as a folder on disk.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "harness/launch/scenario.hpp"
#include "model/base/torch.hpp"

namespace lockstep::harness {

/// Rows [begin, end) of the global row that one rank held.
struct RankRows {
  int64_t begin = 0, end = 0;
};

struct RunOutput {
  Tensor logits;    ///< [T, V]
  Tensor logprobs;  ///< [T], NaN at a document's last token
  double loss = 0;
  int64_t num_targets = 0, tokens = 0, ranks = 1;
  std::map<std::string, Tensor> grads;
  std::vector<std::pair<std::string, Tensor>> trace;
  std::vector<int64_t> cu_seqlens;  ///< document boundaries of the row
  std::vector<RankRows> rank_rows;  ///< one per rank
  double seconds = 0, forward_s = 0, backward_s = 0;
  int64_t peak_bytes = 0;  ///< largest over ranks
  int64_t sync_bytes = 0;  ///< of weights between ranks, before the run
  double sync_s = 0;
  std::vector<std::string> warnings;  ///< of the trainer: what makes these numbers worthless
};

/// Writes folder/rank0.safetensors (logits, logprobs, loss, grads/NAME, trace/NAME) and run.json,
/// the latter last, so that a folder with run.json is complete. Throws kInput naming path and
/// cause.
void save_run(const std::filesystem::path& folder, const RunSpec& run, const RunOutput& output);

/// Inverse of save_run. Throws kInput when something is missing or damaged.
RunOutput load_run(const std::filesystem::path& folder);

}  // namespace lockstep::harness
