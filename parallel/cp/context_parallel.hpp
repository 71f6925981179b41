// Context parallelism: one row of packed documents, cut into contiguous shards, one per rank.
#pragma once

#include <memory>
#include <vector>

#include "model/seams/sequence.hpp"
#include "parallel/comm/group.hpp"

namespace lockstep::parallel {

/// The seam of a row cut at `cuts` (rank r of `group` holds rows [cuts[r], cuts[r + 1]); any sizes,
/// 0 included). State is handed from rank to rank, so its value is the serial recurrence's. The
/// group must outlive every graph built with the seam. Volume per call and rank: gather_rows sends
/// T_local rows (all-gather), conv_halo width - 1 rows, the state one [sizes] tensor. Throws kMesh
/// when cuts do not cover the row in order.
std::unique_ptr<model::SequenceSeam> context_parallel(const Group& group,
                                                      std::vector<int64_t> cuts);

}  // namespace lockstep::parallel
