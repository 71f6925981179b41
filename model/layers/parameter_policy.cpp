#include "model/layers/parameter_policy.hpp"

namespace lockstep::model {
namespace {

bool has(std::string_view name, std::string_view part) {
  return name.find(part) != std::string_view::npos;
}

}  // namespace

at::ScalarType parameter_dtype(std::string_view name, const Numerics& num) {
  if (!num.is_bf16()) return num.act();
  const auto pick = [](bool fp32) { return fp32 ? at::kFloat : at::kBFloat16; };
  if (has(name, "_hc.fn")) return pick(num.is<Switch::kHcFn>("fp32"));
  if (has(name, "_hc.")) return pick(num.is<Switch::kHcBaseScale>("fp32"));
  if (has(name, "self_attn.A_log") || has(name, "self_attn.dt_bias"))
    return pick(num.is<Switch::kKdaDecayParams>("fp32"));
  if (has(name, "self_attn.conv1d")) return pick(num.is<Switch::kConvWeight>("fp32"));
  if (has(name, "indexer.k_norm") || has(name, "indexer.ape"))
    return pick(num.is<Switch::kIndexerLayerNorm>("fp32"));
  if (has(name, "e_score_correction_bias")) return pick(num.is<Switch::kRouterBias>("fp32"));
  if (has(name, "mlp.gate.weight")) return pick(num.is<Switch::kRouterWeight>("fp32"));
  return at::kBFloat16;
}

bool is_frozen(std::string_view name) {
  return has(name, "indexer.") || has(name, "e_score_correction_bias");
}

}  // namespace lockstep::model
