// The KDA switches of a numerics policy, and the checks that all KDA forms share.
#pragma once

#include "model/ops/kda.hpp"
#include "model/ops/kda_core.hpp"

namespace lockstep::model {

/// Reads D03, D17-D26 and D71. `recurrent` picks the decode value of switches that tell prefill
/// from decode. Throws kConfig when lower_bound is not a negative number, or when rounded
/// exponentials (D25) could overflow inside a block.
KdaMode kda_mode(const Numerics& num, std::optional<double> lower_bound, bool recurrent);

/// Throws kShape naming the argument that does not fit the others.
void check_kda(const KdaInput& in, const Numerics& num);

}  // namespace lockstep::model
