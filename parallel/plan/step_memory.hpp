// Bytes of tensor memory that a rank needs in one training step, by what they are for, from the
// configuration alone.
#pragma once

#include "model/base/tensor_memory.hpp"
#include "parallel/plan/traffic.hpp"

namespace lockstep::parallel {

/// Peaks of a step of the trainer as tensor_memory() counts them: each kind by itself, and all of
/// them when their sum is largest. `now` is what stays when the step is over. One micro-batch; with
/// more the gradients are there from the first on. Memory of containers, of the transport and of
/// threads is in neither. Units are walked as the model walks them: what a
/// layer keeps and needs is layer_memory's, what is gathered, sent and reduced follows
/// ShardedParameters.
MemoryUse step_memory(const StepPlan& plan, int64_t rank);

}  // namespace lockstep::parallel
