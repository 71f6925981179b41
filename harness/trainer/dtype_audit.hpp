// Parameters that a bfloat16 policy keeps in float32, watched wherever their dtype could be lost: a
// rounded one gives no error, only a model that is slightly another.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "model/checkpoint/weight_source.hpp"
#include "model/config/numerics.hpp"
#include "model/seams/param_view.hpp"
#include "parallel/fsdp/sharded_parameters.hpp"
#include "parallel/optim/optimizer.hpp"

namespace lockstep::harness {

enum class AuditPoint : uint8_t {
  kLoad,        ///< as it comes from the file, against what the file holds
  kShard,       ///< the rows this rank keeps
  kForward,     ///< as a layer gets it
  kOptimizer,   ///< moments
  kCheckpoint,  ///< as a saved checkpoint holds it
};
inline constexpr size_t kNumAuditPoints = 5;
std::string_view to_string(AuditPoint point);

struct AuditRow {
  std::string name;
  /// By point; Undefined where the parameter was not seen.
  std::array<at::ScalarType, kNumAuditPoints> dtypes;
};

/// One process's audit. Every check throws kInternal naming the parameter and the point when a
/// float32 parameter is not float32 there.
class DtypeAudit {
 public:
  /// No rows for policies that compute in one dtype.
  DtypeAudit(const model::ModelConfig& config, const model::Numerics& num);

  /// What the file holds in float32 must arrive so. A file may hold less: see stored_in_less.
  void load(const model::WeightSource& source);
  void shards(const parallel::ShardedParameters& params);
  void optimizer(const parallel::ShardedParameters& params, parallel::Optimizer& optimizer);
  void checkpoint(const std::string& folder);
  /// Parameters as layers see them, from this view. `params` must outlive it.
  std::unique_ptr<model::ParamView> watch(model::ParamView& params);

  [[nodiscard]] const std::vector<AuditRow>& rows() const { return rows_; }
  /// Does nothing for parameters that are not in rows().
  void see(AuditPoint point, const std::string& name, at::ScalarType dtype);

 private:
  std::string policy_;
  std::vector<AuditRow> rows_;
  std::map<std::string, size_t> by_name_;
  std::map<std::string, at::ScalarType> stored_;  ///< narrower than float32 in the file
};

/// One line on the parameters that `num` keeps in float32, that were published in float32 and that
/// this source has in less, as checkpoints written by transformers do: their low bits were gone
/// before the run. Empty: none.
std::string stored_in_less(const model::WeightSource& source, const model::Numerics& num);

}  // namespace lockstep::harness
