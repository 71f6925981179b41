// Which part of each parameter a rank computes with, and the way back to whole parameters.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "model/checkpoint/weight_source.hpp"
#include "model/config/numerics.hpp"
#include "parallel/fsdp/sharded_parameters.hpp"
#include "parallel/tp/tensor_parallel.hpp"

namespace lockstep::parallel {

/// Experts (dim 0) first go to the ep ranks, then tp takes its slice, then what is left is sharded.
struct Placement {
  model::Parameter parameter;
  int64_t first = 0, last = 0;  ///< rows of dim 0 of this ep rank; all but for experts
  TpSlice slice;                ///< of those rows

  [[nodiscard]] std::vector<int64_t> shape() const;
  [[nodiscard]] Tensor of(const Tensor& whole) const {
    return slice.of(whole.narrow(0, first, last - first));
  }
};

/// Consecutive elements of a whole parameter that are consecutive in a rank's part, too.
struct Run {
  int64_t whole, part, count;
};

/// Rows [begin, end) of the part, as runs in part order (part 0 is the first element of row
/// `begin`).
std::vector<Run> runs(const Placement& placement, int64_t begin, int64_t end);

/// Experts of each ep rank, {0, ..., num_experts}.
std::vector<int64_t> expert_cuts(const model::ModelConfig& config, const model::Topology& topology);

/// Of the rank at `place`.
Placement place_parameter(const model::ModelConfig& config,
                          const model::Numerics& num,
                          const model::Topology& topology,
                          const Coordinates& place,
                          const model::Parameter& parameter);

/// Every parameter as the rank at `place` needs it before sharding; nothing loads them.
std::vector<ParamSpec> parameter_specs(const model::ModelConfig& config,
                                       const model::Numerics& num,
                                       const model::Topology& topology,
                                       const Coordinates& place);
/// The same for this rank, loaded from `source`, which must outlive the first use.
std::vector<ParamSpec> parameter_specs(const model::WeightSource& source,
                                       const model::Numerics& num,
                                       const Mesh& mesh);

/// The whole parameter-shaped tensor of which `rows` are this rank's: gathered over shards, tp and
/// ep. Collective over the replica.
Tensor gather_whole(const ShardedParameters& params,
                    const Shard& shard,
                    const Tensor& rows,
                    const model::ModelConfig& config,
                    const model::Numerics& num,
                    const Mesh& mesh);

}  // namespace lockstep::parallel
