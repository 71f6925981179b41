// Collectives as nodes of the autograd graph: what schemes are made of. The reverse of a collective
// is a collective, so every rank of the group must run the same backward, in the same order.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "parallel/comm/group.hpp"

namespace lockstep::parallel {

/// What ranks do with a gathered tensor decides what its gradients are.
enum class GatheredUse {
  kDiffers,     ///< each rank uses it in its own way: gradients are added over ranks
  kReplicated,  ///< every rank computes the same with it: each rank's gradient is already whole
};

// All take tensors of any strides and give contiguous ones; the result does not depend on strides.
// Names of backward calls are `what` with " gradient" behind. Groups are kept alive by the graph.

/// Rows of all ranks in rank order; rows[r] = rows of rank r. Backward: this rank's rows of the
/// gradient, summed over ranks in ascending order for kDiffers (a reduce-scatter), cut out for
/// kReplicated (no communication).
Tensor gather_rows(const Group& group,
                   const Tensor& local,
                   const std::vector<int64_t>& rows,
                   GatheredUse use,
                   std::string_view what);

/// This rank's rows of the sum over ranks. Backward: an all-gather.
Tensor reduce_scatter_rows(const Group& group,
                           const Tensor& partial,
                           const std::vector<int64_t>& rows,
                           std::string_view what);

/// Sum over ranks, the same on all. Backward: identity, since what follows is the same on all
/// ranks.
Tensor sum_over_ranks(const Group& group, const Tensor& partial, std::string_view what);

/// The tensor itself, the same on all ranks, of which each then uses it in its own way. Backward:
/// sum over ranks. The mirror image of sum_over_ranks.
Tensor share_with_ranks(const Group& group, const Tensor& tensor, std::string_view what);

/// send[r] rows to each rank r, receive[r] from it. Backward: the other way.
Tensor exchange_rows(const Group& group,
                     const Tensor& rows,
                     const std::vector<int64_t>& send,
                     const std::vector<int64_t>& receive,
                     std::string_view what);

}  // namespace lockstep::parallel
