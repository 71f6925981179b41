// Expert parallelism: each rank of a group holds a contiguous range of the experts; token rows
// travel to them and back.
#pragma once

#include <memory>
#include <vector>

#include "model/seams/token_exchange.hpp"
#include "parallel/comm/group.hpp"

namespace lockstep::parallel {

/// Rank r of `group` holds experts [cuts[r], cuts[r + 1]). dispatch: the counts of every (rank,
/// expert) are exchanged, then the rows, and what arrives is put in (expert, source rank, source
/// row) order, so that with tokens ordered by rank an expert sees them in token order whatever ep
/// is. Bytes per rank and layer: 8 (E + E_local size) of counts, and twice R D of rows, forward and
/// backward. Throws kMesh when cuts do not fit the group.
std::unique_ptr<model::TokenExchange> expert_parallel(const Group& group,
                                                      std::vector<int64_t> cuts);

/// The same result from plain collectives: every rank gathers all rows and takes its own. A
/// reference to compare with, bit for bit.
std::unique_ptr<model::TokenExchange> expert_parallel_reference(const Group& group,
                                                                std::vector<int64_t> cuts);

}  // namespace lockstep::parallel
