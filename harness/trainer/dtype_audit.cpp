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
  switch (point) {
    case AuditPoint::kLoad:
      return "export the checkpoint again with this tensor in float32, or choose a policy that "
             "casts it";
    case AuditPoint::kCheckpoint:
      return "the checkpoint must not be used to go on training";
    default:
      return "look for a cast of its whole group";
  }
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
  if (!num.is_bf16()) return;
  for (const model::Parameter& parameter : model::expected_parameters(config)) {
    if (model::parameter_dtype(parameter.name, num) != at::kFloat) continue;
    by_name_.emplace(parameter.name, rows_.size());
    published_.emplace(parameter.name, parameter.disk_dtype);
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
  if (point == AuditPoint::kLoad && published_.at(name) == dtype) return;
  fail(point == AuditPoint::kLoad ? ErrorKind::kInput : ErrorKind::kInternal,
       "dtype audit, point {}: policy {} keeps {} in float32, but it is {} there; {}",
       to_string(point),
       policy_,
       name,
       dtype_name(dtype),
       remedy(point));
}

void DtypeAudit::load(const model::WeightSource& source) {
  for (const AuditRow& row : rows_) see(AuditPoint::kLoad, row.name, source.spec(row.name).dtype);
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

}  // namespace lockstep::harness
