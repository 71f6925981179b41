// What the units of the model keep and need, from the configuration alone. Follows decoder.cpp and
// the layers operator by operator: a change of what an operator saves is a change here.
#pragma once

#include <cstdint>
#include <vector>

#include "model/config/model_config.hpp"
#include "model/config/numerics.hpp"
#include "model/layers/memory_tape.hpp"

namespace lockstep::model {

/// What a rank computes with in one pass.
struct PassSizes {
  int64_t tokens = 0;         ///< of this rank
  int64_t row_tokens = 0;     ///< of the whole row of documents, which cp gathers
  std::vector<int64_t> cu;    ///< bounds of the local segments {0, ..., tokens}
  bool cut_sequence = false;  ///< cp > 1
  int64_t maps = 0;           ///< affine maps of states that are gathered, one a cp rank; 0: none
  bool exchanges = false;     ///< ep > 1
  bool split = false;         ///< tp > 1
  bool splits_sums = false;   ///< see TensorSplit
  // Shares of tp.
  int64_t kda_heads = 0, mla_heads = 0, dense_inner = 0, shared_inner = 0, expert_inner = 0;
  int64_t num_experts = 0;  ///< whose weights are here
};

/// rows: of all tokens for the experts of this ep rank. own_rows: those that this rank computes.
UnitMemory layer_memory(const ModelConfig& config,
                        const Numerics& num,
                        const PassSizes& sizes,
                        int64_t layer,
                        int64_t rows,
                        int64_t own_rows);
/// The embedding.
UnitMemory stem_memory(const ModelConfig& config, const Numerics& num, const PassSizes& sizes);
/// Final norm and log-probabilities, without logits.
UnitMemory head_memory(const ModelConfig& config, const Numerics& num, const PassSizes& sizes);

}  // namespace lockstep::model
