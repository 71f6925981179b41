// The recurrence on raw pointers, without torch headers. S is the activation type in memory, R the
// computing type, C that of cached states.
#pragma once

#include "model/ops/kda_core.hpp"

namespace lockstep::model {

struct KdaDecodeRun {
  int64_t begin, end;  ///< rows
  int64_t slot;        ///< 0: nobody's
};

/// One head's tokens of one run: o rows written, state [D, D] (value dim first) advanced. call's
/// initial_state and chunks are not read.
template <typename S, typename R, typename C>
void kda_decode_head(
    const KdaCall<S, R>& call, const KdaDecodeRun& run, int64_t head, C* state, S* o);

}  // namespace lockstep::model
