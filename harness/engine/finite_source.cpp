#include "harness/engine/finite_source.hpp"

#include <cmath>

namespace lockstep::harness {
namespace {

bool finite(const Tensor& tensor) {
  if (tensor.numel() == 0 || !tensor.is_floating_point()) return true;
  const auto [least, most] = at::aminmax(tensor.detach());  // NaN if one is in there
  return std::isfinite(least.item<double>()) && std::isfinite(most.item<double>());
}

}  // namespace

std::string NonFiniteWeights::text() const {
  if (names_.empty()) return {};
  return fmt::format("{} weight {} not finite; the first is {}",
                     names_.size(),
                     names_.size() == 1 ? "tensor is" : "tensors are",
                     first_);
}

void NonFiniteWeights::look(const std::string& name, const Tensor& values) {
  if (finite(values) || !names_.insert(name).second || !first_.empty()) return;
  first_ = fmt::format("{}: {} NaN and {} infinite of {} values",
                       name,
                       values.isnan().sum().item<int64_t>(),
                       values.isinf().sum().item<int64_t>(),
                       values.numel());
}

Tensor FiniteSource::load(const std::string& name) const {
  Tensor value = source_->load(name);
  if (!finite(value)) note(name);
  return value;
}

Tensor FiniteSource::load_rows(const std::string& name, int64_t begin, int64_t end) const {
  Tensor rows = source_->load_rows(name, begin, end);
  if (!finite(rows)) note(name);
  return rows;
}

/// Names the tensor of the checkpoint, whichever rows of the parameter were loaded.
void FiniteSource::note(const std::string& name) const {
  if (!found_->names_.insert(name).second || !found_->first_.empty()) return;
  found_->first_ = name;
  for (const auto& [disk_name, part] : source_->disk_tensors(name, source_->load(name))) {
    if (finite(part)) continue;
    found_->first_ = fmt::format("{}: {} NaN and {} infinite of {} values",
                                 disk_name,
                                 part.isnan().sum().item<int64_t>(),
                                 part.isinf().sum().item<int64_t>(),
                                 part.numel());
    return;
  }
}

}  // namespace lockstep::harness
