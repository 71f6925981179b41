// Context parallelism: one row of packed documents, cut into contiguous shards, one per rank.
#pragma once

#include <memory>
#include <vector>

#include "model/seams/sequence.hpp"
#include "parallel/comm/group.hpp"

namespace lockstep::parallel {

/// The seam of a row cut at `cuts` (rank r of `group` holds rows [cuts[r], cuts[r + 1]); any sizes,
/// 0 included). The group must outlive every graph built with the seam.
///
/// Recurrent state: `handover` (D62) passes it from rank to rank, which gives the serial
/// recurrence's value, bit for bit if cuts are multiples of its chunk, and makes ranks wait in
/// turn. Otherwise each rank sends its last segment as an affine map and composes what it needs,
/// forward and (transposed, in reverse order) backward.
///
/// Bytes a rank receives per call: gather_rows T - T_local rows forward, and as many backward;
/// conv_halo (ranks - 1)(width - 1) rows each way; states by hand-over one state each way; composed
/// 2 (ranks - 1) states forward and ranks - 1 backward. Throws kMesh when cuts do not cover the row
/// in order.
std::unique_ptr<model::SequenceSeam> context_parallel(const Group& group,
                                                      std::vector<int64_t> cuts,
                                                      bool handover);

}  // namespace lockstep::parallel
