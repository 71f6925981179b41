#include "harness/trainer/dtype_audit.hpp"

#include "model/checkpoint/parameters.hpp"
#include "model/layers/parameter_policy.hpp"
#include "parallel/checkpoint/distributed_checkpoint.hpp"

namespace lockstep::harness {
namespace {

class WatchedParameters final : public model::ParamView {
 public:
  WatchedParameters(DtypeAudit& audit, model::ParamView& inner) : audit_(audit), inner_(inner) {}
  Tensor get(const std::string& name) override {
    Tensor value = inner_.get(name);
    audit_.see(AuditPoint::kForward, name, value.scalar_type());
    return value;
  }
  [[nodiscard]] bool wants_grad(const std::string& name) const override {
    return inner_.wants_grad(name);
  }
  void enter(int64_t unit, model::Pass pass) override { inner_.enter(unit, pass); }
  void leave(int64_t unit, model::Pass pass) override { inner_.leave(unit, pass); }
  void add_grads(int64_t unit, std::vector<model::NamedGrad> grads) override {
    inner_.add_grads(unit, std::move(grads));
  }

 private:
  DtypeAudit& audit_;
  model::ParamView& inner_;
};

const char* remedy(AuditPoint point) {
  return point == AuditPoint::kCheckpoint ? "the checkpoint must not be used to go on training"
                                          : "look for a cast of its whole group";
}

/// Parameters that `num` keeps in float32 though it computes in bfloat16.
std::vector<model::Parameter> float32_parameters(const model::ModelConfig& config,
                                                 const model::Numerics& num) {
  std::vector<model::Parameter> kept;
  if (!num.is_bf16()) return kept;
  for (model::Parameter& parameter : model::expected_parameters(config)) {
    if (model::parameter_dtype(parameter.name, num) == at::kFloat)
      kept.push_back(std::move(parameter));
  }
  return kept;
}

}  // namespace

std::string_view to_string(AuditPoint point) {
  switch (point) {
    case AuditPoint::kLoad:
      return "load";
    case AuditPoint::kShard:
      return "shard";
    case AuditPoint::kForward:
      return "forward";
    case AuditPoint::kOptimizer:
      return "optimizer";
    default:
      return "checkpoint";
  }
}

DtypeAudit::DtypeAudit(const model::ModelConfig& config, const model::Numerics& num)
    : policy_(num.name()) {
  for (const model::Parameter& parameter : float32_parameters(config, num)) {
    by_name_.emplace(parameter.name, rows_.size());
    AuditRow row{parameter.name, {}};
    row.dtypes.fill(at::ScalarType::Undefined);
    rows_.push_back(std::move(row));
  }
}

void DtypeAudit::see(AuditPoint point, const std::string& name, at::ScalarType dtype) {
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) return;
  rows_[found->second].dtypes[static_cast<size_t>(point)] = dtype;
  if (dtype == at::kFloat || dtype == at::kDouble) return;
  if (point == AuditPoint::kLoad && stored_.contains(name) && stored_.at(name) == dtype) return;
  fail(ErrorKind::kInternal,
       "dtype audit, point {}: policy {} keeps {} in float32, but it is {} there; {}",
       to_string(point),
       policy_,
       name,
       dtype_name(dtype),
       remedy(point));
}

void DtypeAudit::load(const model::WeightSource& source) {
  for (const AuditRow& row : rows_) {
    const at::ScalarType stored = source.spec(row.name).dtype;
    if (stored != at::kFloat && stored != at::kDouble) stored_.emplace(row.name, stored);
    see(AuditPoint::kLoad, row.name, source.load_rows(row.name, 0, 1).scalar_type());
  }
}

void DtypeAudit::shards(const parallel::ShardedParameters& params) {
  for (const parallel::Shard& shard : params.shards())
    see(AuditPoint::kShard, shard.spec.name, shard.value.scalar_type());
}

void DtypeAudit::optimizer(const parallel::ShardedParameters& params,
                           parallel::Optimizer& optimizer) {
  for (const parallel::Shard& shard : params.shards()) {
    if (!shard.spec.trainable) continue;
    for (const auto& [moment, value] : optimizer.state(shard.spec.name))
      see(AuditPoint::kOptimizer, shard.spec.name, value.scalar_type());
  }
}

void DtypeAudit::checkpoint(const std::string& folder) {
  if (rows_.empty()) return;
  const auto saved = parallel::open_training_checkpoint(folder);
  for (const AuditRow& row : rows_)
    see(AuditPoint::kCheckpoint, row.name, saved->spec(row.name).dtype);
}

std::unique_ptr<model::ParamView> DtypeAudit::watch(model::ParamView& params) {
  return std::make_unique<WatchedParameters>(*this, params);
}

std::string stored_in_less(const model::WeightSource& source, const model::Numerics& num) {
  std::vector<std::string> names;
  for (const model::Parameter& parameter : float32_parameters(source.config(), num)) {
    const at::ScalarType stored = source.spec(parameter.name).dtype;
    if (parameter.disk_dtype == at::kFloat && at::elementSize(stored) < 4)
      names.push_back(parameter.name);
  }
  if (names.empty()) return {};
  return fmt::format(
      "{} parameters that {} keeps in float32 are stored in {} (the first: {}); their low bits "
      "were gone before this run",
      names.size(),
      num.name(),
      dtype_name(source.spec(names.front()).dtype),
      names.front());
}

}  // namespace lockstep::harness
