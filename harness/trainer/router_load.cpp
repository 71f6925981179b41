#include "harness/trainer/router_load.hpp"

#include <charconv>

namespace lockstep::harness {
namespace {

std::optional<int64_t> layer_before(const std::string& name, std::string_view rest) {
  constexpr std::string_view kPrefix = "layers.";
  if (!name.starts_with(kPrefix) || !name.ends_with(rest)) return std::nullopt;
  int64_t layer = 0;
  const char* end = name.data() + name.size() - rest.size();
  const auto [stop, error] = std::from_chars(name.data() + kPrefix.size(), end, layer);
  return error == std::errc() && stop == end ? std::optional(layer) : std::nullopt;
}

}  // namespace

RouterLoad::RouterLoad(const model::ModelConfig& config)
    : counts_(at::zeros({config.num_hidden_layers, config.n_routed_experts}, at::kLong)) {}

bool RouterLoad::wants(const std::string& name) const {
  return layer_before(name, ".mlp.gate.experts").has_value();
}

void RouterLoad::record(const std::string& name, const Tensor& experts) {
  counts_[*layer_before(name, ".mlp.gate.experts")].add_(
      at::bincount(experts.flatten(), {}, counts_.size(1)));
}

std::optional<int64_t> RouterLoad::layer_of_bias(const std::string& parameter) {
  return layer_before(parameter, ".mlp.gate.e_score_correction_bias");
}

}  // namespace lockstep::harness
