#include "harness/engine/trace.hpp"

namespace lockstep::harness {
namespace {

bool glob(std::string_view pattern, std::string_view name) {
  if (pattern.empty()) return name.empty();
  if (pattern.front() == '*') {
    for (size_t skip = 0; skip <= name.size(); ++skip) {
      if (glob(pattern.substr(1), name.substr(skip))) return true;
    }
    return false;
  }
  return !name.empty() && (pattern.front() == '?' || pattern.front() == name.front()) &&
         glob(pattern.substr(1), name.substr(1));
}

}  // namespace

bool matches(std::string_view pattern, std::string_view name) {
  while (!pattern.empty()) {
    const size_t comma = pattern.find(',');
    if (glob(pattern.substr(0, comma), name)) return true;
    if (comma == std::string_view::npos) break;
    pattern.remove_prefix(comma + 1);
  }
  return false;
}

bool PatternTrace::wants(const std::string& name) const { return matches(pattern_, name); }

void PatternTrace::record(const std::string& name, const Tensor& value) {
  values_.emplace_back(name, value.detach());
  if (!value.requires_grad()) return;
  const size_t slot = gradients_->size();
  gradients_->emplace_back("grad:" + name, at::zeros_like(value.detach()));
  value.register_hook(
      [kept = gradients_, slot](const Tensor& grad) { (*kept)[slot].second = grad.detach(); });
}

PatternTrace::Named PatternTrace::gradients() const { return *gradients_; }

}  // namespace lockstep::harness
