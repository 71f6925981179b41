// Parts of a step on paper that are of the whole job: its parameters, and its weight sync.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "harness/sync/transfer_plan.hpp"
#include "parallel/optim/optimizer.hpp"

namespace lockstep::harness {

struct PlanSection {
  std::string text;             ///< a table for people
  nlohmann::ordered_json json;  ///< an object
};

/// "1.50 MiB"; bytes below one KiB as they are.
std::string bytes_text(int64_t bytes);
/// Two blanks and a bar of a chart, of `value` where the longest is of `most`; else nothing.
std::string bar(double value, double most);

/// Parameters of the text model and what of them one token uses, bytes of a checkpoint; the same
/// with MTP layers, where the configuration has some.
PlanSection plan_parameters(const model::ModelConfig& config, parallel::OptimizerKind optimizer);

/// Bytes that each rank of the job sends and receives in a weight sync.
PlanSection plan_sync(const SyncSides& sides);

}  // namespace lockstep::harness
