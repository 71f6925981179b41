// One step of the whole model over the rows of a batch.
#pragma once

#include "harness/inference/mixers.hpp"

namespace lockstep::harness {

/// Final hidden states [T, D] act of the batch's rows, after the last norm. Writes the caches and
/// advances the batch's sequences. No gradient.
Tensor engine_forward(const StepContext& ctx);

}  // namespace lockstep::harness
