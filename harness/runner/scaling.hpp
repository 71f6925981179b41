// How the time of a training step changes with the number of ranks: one step on the ranks of an
// mpirun, and series of such steps, started one after the other.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "model/config/numerics.hpp"
#include "model/config/topology.hpp"
#include "parallel/comm/group.hpp"

namespace lockstep::harness {

struct StepTask {
  std::string preset = "mini";
  model::Topology topology;
  std::vector<int64_t> documents;  ///< tokens of each
  model::Numerics numerics = model::Numerics::policy("float32");
  int repeats = 3;
};

/// What the ranks of an axis did in a step.
struct AxisTime {
  std::string axis;
  int64_t ranks = 1, calls = 0;
  double bytes_sent = 0, planned_bytes = 0;  ///< mean over all ranks of the run
  double seconds = 0;  ///< inside calls, waiting for slower ranks included; mean over ranks
};

/// Forward, backward and optimizer on all ranks. Seconds are those of the slowest rank, in the
/// fastest of the repeats, after a first step that does not count.
struct StepTime {
  double seconds = 0;
  std::vector<AxisTime> axes;
  bool as_planned = true;  ///< calls and bytes of every rank are those of step_traffic

  [[nodiscard]] double comm_seconds() const;
};

/// On every rank of the world, which has as many ranks as the topology. The same on all of them.
StepTime time_step(const StepTask& task, const parallel::Group& world);

/// One line of JSON, from the ranks to the process that started them.
std::string to_line(const StepTime& time);
StepTime step_time_from_line(std::string_view line);

struct ScalingPlan {
  std::string preset = "mini", policy = "float32";
  std::vector<int64_t> ranks = {1, 2, 4, 8};
  int64_t tokens_per_rank = 1024;  ///< weak: the work of each rank stays the same
  int64_t tokens = 4096;           ///< strong: the work of all ranks together stays the same
  int threads = 1;                 ///< of each rank
  int repeats = 3;
};

struct ScalingRow {
  std::string axis;  ///< which axis grows: "fsdp", "ep" (over fsdp) or "cp"
  bool weak = false;
  StepTask task;
  StepTime time;
  /// Rate of tokens as a share of that many single ranks.
  double efficiency = 1;
};

/// The steps of a plan, without times: weak then strong for fsdp, ep and cp. With fsdp and ep a
/// rank has documents of its own; with cp all ranks share one document. Throws kConfig for ranks
/// that are not ascending from 1, or tokens that do not divide.
std::vector<ScalingRow> scaling_rows(const ScalingPlan& plan);

/// Starts mpirun for each row. Throws kComm or kInternal with what the ranks said.
std::vector<ScalingRow> run_scaling(const ScalingPlan& plan,
                                    const std::function<void(std::string_view)>& say);

}  // namespace lockstep::harness
