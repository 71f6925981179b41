#include "parallel/optim/optimizer.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "model/base/tensor_memory.hpp"
#include "parallel/optim/muon.hpp"
#include "parallel/optim/update.hpp"

namespace lockstep::parallel {
namespace {

/// A parameter that is whole on every tp rank is counted by the first one.
bool counted_here(const Shard& shard, const Mesh& mesh) {
  return shard.spec.tp_split || mesh.place().tp == 0;
}

constexpr int kPartBits = 22;
using SquareParts = std::array<int64_t, 3>;

/// Adds the squares of float32 numbers below 2^exponent to a sum in units of 2^(2 exponent - 22),
/// - 44 and - 66: whole numbers, so any order gives the same. Good for 2^40 numbers, each within
/// 2^-66 of the largest possible square.
void add_squares(const Tensor& grad, int64_t exponent, SquareParts& sum) {
  const Tensor dense = grad.contiguous();
  const auto* g = static_cast<const float*>(dense.const_data_ptr());
  const double scale = std::ldexp(1.0, static_cast<int>(-exponent));
  constexpr double kUnit = 1 << kPartBits;
  for (int64_t i = 0; i < dense.numel(); ++i) {
    double rest = static_cast<double>(g[i]) * scale;
    rest *= rest;
    for (int64_t& part : sum) {
      rest *= kUnit;
      const auto whole = static_cast<int64_t>(rest);
      part += whole;
      rest -= static_cast<double>(whole);
    }
  }
}

constexpr int64_t kAllZero = INT16_MIN, kNotFinite = INT16_MAX;

/// The lowest exponent with every number below 2^exponent, kAllZero or kNotFinite: ordered, so that
/// the largest is that of several tensors.
int64_t exponent_of(const Tensor& grad) {
  if (grad.numel() == 0) return kAllZero;
  const auto [low, high] = at::aminmax(grad);
  const double largest = std::max(-low.item<double>(), high.item<double>());
  if (!std::isfinite(largest)) return kNotFinite;
  return largest == 0 ? kAllZero : std::ilogb(largest) + 1;
}

/// Calls f(T*) with a null pointer of the masters' type.
template <typename F>
auto with_type(const Tensor& value, F&& f) {
  LOCKSTEP_CHECK(value.scalar_type() == at::kFloat || value.scalar_type() == at::kDouble,
                 kInternal,
                 "optimizer: masters must be float32 or float64, got {}",
                 describe(value));
  return value.scalar_type() == at::kDouble ? f(static_cast<double*>(nullptr))
                                            : f(static_cast<float*>(nullptr));
}

double square_sum(const Tensor& grad) {
  const Tensor dense = grad.contiguous();
  return with_type(dense, [&]<typename T>(T*) {
    return sum_of_squares(dense.numel(), static_cast<const T*>(dense.const_data_ptr()));
  });
}

}  // namespace

std::string_view optimizer_name(OptimizerKind kind) {
  switch (kind) {
    case OptimizerKind::kAdamW:
      return "adamw";
    case OptimizerKind::kMuon:
      return "muon";
    default:
      return "sgd";
  }
}

OptimizerKind parse_optimizer(std::string_view name) {
  for (const OptimizerKind kind : kOptimizers)
    if (optimizer_name(kind) == name) return kind;
  fail(ErrorKind::kConfig, "optimizer '{}' does not exist; use adamw, sgd or muon", name);
}

void check_optimizer(OptimizerKind kind, const model::Topology& topology) {
  LOCKSTEP_CHECK(kind != OptimizerKind::kMuon || topology.tp == 1,
                 kConfig,
                 "optimizer: Muon needs whole matrices, which tp = {} splits; use tp = 1 or AdamW",
                 topology.tp);
}

Optimizer::Optimizer(ShardedParameters& params, const Mesh& mesh, OptimizerOptions options)
    : params_(params), mesh_(mesh), options_(options) {
  set_lr(options.lr);
  check_optimizer(options.kind, mesh.topology());
  for (const double beta : {options.beta1, options.beta2, options.momentum}) {
    LOCKSTEP_CHECK(beta >= 0 && beta < 1, kConfig, "optimizer: beta = {} must be in [0, 1)", beta);
  }
  LOCKSTEP_CHECK(options.clip_norm >= 0 && options.eps >= 0 && options.weight_decay >= 0,
                 kConfig,
                 "optimizer: clip_norm = {}, eps = {} and weight_decay = {} must not be negative",
                 options.clip_norm,
                 options.eps,
                 options.weight_decay);
  const MemoryScope memory(MemoryKind::kMoments);
  for (const Shard& shard : params_.shards()) {
    if (!shard.spec.trainable) continue;
    auto& state = state_[shard.spec.name];
    for (const std::string_view name : state_names(options.kind, shard.spec))
      state.emplace(name, at::zeros_like(shard.value));
  }
}

void Optimizer::set_lr(double lr) {
  LOCKSTEP_CHECK(lr >= 0 && std::isfinite(lr),
                 kConfig,
                 "optimizer: lr = {} must be a finite number that is not negative",
                 lr);
  options_.lr = lr;
}

std::vector<std::string_view> Optimizer::state_names(OptimizerKind kind) {
  switch (kind) {
    case OptimizerKind::kAdamW:
      return {"exp_avg", "exp_avg_sq"};
    case OptimizerKind::kMuon:
      return {"exp_avg", "exp_avg_sq", "momentum"};
    default:
      return {};
  }
}

std::vector<std::string_view> Optimizer::state_names(OptimizerKind kind, const ParamSpec& spec) {
  if (kind != OptimizerKind::kMuon) return state_names(kind);
  if (muon_matrices(spec) != MuonMatrices::kNone) return {"momentum"};
  return state_names(OptimizerKind::kAdamW);
}

std::map<std::string, Tensor>& Optimizer::state(const std::string& parameter) {
  return state_[parameter];
}

double Optimizer::exact_grad_norm() const {
  int64_t exponent = kAllZero;
  for (const Shard& shard : params_.shards()) {
    if (shard.grad.defined()) exponent = std::max(exponent, exponent_of(shard.grad));
  }
  exponent = mesh_.all().all_reduce_max(exponent, "gradient norm");
  if (exponent == kNotFinite) return std::numeric_limits<double>::quiet_NaN();
  if (exponent == kAllZero) return 0;
  SquareParts parts{};
  for (const Shard& shard : params_.shards()) {
    if (shard.grad.defined() && counted_here(shard, mesh_))
      add_squares(shard.grad, exponent, parts);
  }
  Tensor sum = at::tensor(std::vector<int64_t>(parts.begin(), parts.end()), at::kLong);
  mesh_.shard().all_reduce_sum(sum, "gradient norm");
  mesh_.tp().all_reduce_sum(sum, "gradient norm");
  double square = 0;
  for (int64_t part = 2; part >= 0; --part)
    square = std::ldexp(square + static_cast<double>(sum[part].item<int64_t>()), -kPartBits);
  return std::ldexp(std::sqrt(square), static_cast<int>(exponent));
}

double Optimizer::grad_norm() const {
  if (params_.exact()) return exact_grad_norm();
  // Experts are shared out over all of fsdp x cp too (ep times expert fsdp), so the shard circle
  // and tp hold every row of a replica once.
  double mine = 0;
  for (const Shard& shard : params_.shards()) {
    if (shard.grad.defined() && counted_here(shard, mesh_)) mine += square_sum(shard.grad);
  }
  Tensor sum = at::full({1}, mine, at::kDouble);
  mesh_.shard().all_reduce_sum(sum, "gradient norm");
  mesh_.tp().all_reduce_sum(sum, "gradient norm");
  return std::sqrt(sum.item<double>());
}

/// Moves the momentum; the shard's step of rate 1, in the masters' dtype.
Tensor Optimizer::muon_direction(const Shard& shard, double clip_factor) {
  const MemoryScope memory(MemoryKind::kActivations);
  const Tensor& momentum = state_.at(shard.spec.name).at("momentum");
  momentum.mul_(options_.momentum);
  if (shard.grad.defined()) momentum.add_(shard.grad, clip_factor);
  const std::vector<int64_t>& shape = shard.spec.shape;
  Tensor direction;
  int64_t rows = shape[shape.size() - 2];
  switch (muon_matrices(shard.spec)) {
    case MuonMatrices::kRows:
      rows = 1;
      direction = orthogonalised(momentum.unsqueeze(1)).squeeze(1);
      break;
    case MuonMatrices::kStack:
      direction = orthogonalised(momentum);
      break;
    default:
      direction = orthogonalised(params_.gather(shard, momentum))
                      .narrow(0, shard.begin, shard.end - shard.begin);
  }
  const double scale = 0.2 * std::sqrt(static_cast<double>(std::max(rows, shape.back())));
  return direction.to(momentum.scalar_type()).mul(scale).contiguous();
}

/// Moves one shard. Returns how many elements stayed the same.
int64_t Optimizer::update(Shard& shard, double clip_factor) {
  const bool muon =
      options_.kind == OptimizerKind::kMuon && muon_matrices(shard.spec) != MuonMatrices::kNone;
  const Tensor grad = muon                   ? muon_direction(shard, clip_factor)
                      : shard.grad.defined() ? shard.grad.to(shard.value.scalar_type()).contiguous()
                                             : Tensor();
  const double shrink = 1 - options_.lr * options_.weight_decay;
  const auto steps = static_cast<double>(num_steps_);
  return with_type(shard.value, [&]<typename T>(T*) {
    const int64_t count = shard.value.numel();
    const auto* g = grad.defined() ? static_cast<const T*>(grad.const_data_ptr()) : nullptr;
    auto* value = static_cast<T*>(shard.value.mutable_data_ptr());
    if (muon) return sgd_step(shrink, -options_.lr, count, g, value);
    if (options_.kind == OptimizerKind::kSgd)
      return sgd_step(shrink, -options_.lr * clip_factor, count, g, value);
    const auto moment = [&](const char* name) {
      return static_cast<T*>(state_.at(shard.spec.name).at(name).mutable_data_ptr());
    };
    const AdamWStep step{.beta1 = options_.beta1,
                         .beta2 = options_.beta2,
                         .eps = options_.eps,
                         .clip = clip_factor,
                         .shrink = shrink,
                         .scale = -options_.lr / (1 - std::pow(options_.beta1, steps)),
                         .correct2 = 1 - std::pow(options_.beta2, steps)};
    return adamw_step(step, count, g, value, moment("exp_avg"), moment("exp_avg_sq"));
  });
}

OptimizerStep Optimizer::step() {
  const at::NoGradGuard no_grad;
  OptimizerStep result;
  result.grad_norm = grad_norm();
  if (!std::isfinite(result.grad_norm)) {
    for (const Shard& shard : params_.shards()) {
      LOCKSTEP_CHECK(!shard.grad.defined() || std::isfinite(square_sum(shard.grad)),
                     kInput,
                     "optimizer step {}: the gradient of {} is not finite; nothing was changed. "
                     "Look for the first layer whose activations are not finite",
                     num_steps_ + 1,
                     shard.spec.name);
    }
    fail(ErrorKind::kInput,
         "optimizer step {}: the gradient of a parameter on another rank is not finite; nothing "
         "was changed",
         num_steps_ + 1);
  }
  if (options_.clip_norm > 0 && result.grad_norm > options_.clip_norm)
    result.clip_factor = options_.clip_norm / result.grad_norm;
  ++num_steps_;
  int64_t num_parameters = 0, num_unchanged = 0;
  for (Shard& shard : params_.shards()) {
    if (!shard.spec.trainable) continue;
    const int64_t unchanged = update(shard, result.clip_factor);
    if (counted_here(shard, mesh_)) {
      num_parameters += shard.value.numel();
      num_unchanged += unchanged;
    }
  }
  Tensor counts = at::tensor({num_parameters, num_unchanged}, at::kLong);
  mesh_.shard().all_reduce_sum(counts, "optimizer counts");
  mesh_.tp().all_reduce_sum(counts, "optimizer counts");
  result.num_parameters = counts[0].item<int64_t>();
  result.num_unchanged = counts[1].item<int64_t>();
  return result;
}

void update_router_bias(Shard& bias, const Tensor& load, double speed) {
  const at::NoGradGuard no_grad;
  const Tensor mean = load.to(at::kDouble).mean();
  const Tensor change = (mean - load.to(at::kDouble)).sign().mul(speed);
  bias.value.copy_(
      bias.value.to(at::kDouble).add(change.narrow(0, bias.begin, bias.end - bias.begin)));
}

}  // namespace lockstep::parallel
