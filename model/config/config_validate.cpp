#include "model/base/error.hpp"
#include "model/config/config_json.hpp"
#include "model/config/config_keys.hpp"

namespace lockstep::model {
namespace {

void validate_experts(const ModelConfig& c, std::string_view origin) {
  LOCKSTEP_CHECK(c.n_shared_experts >= 0,
                 kConfig,
                 "{}: n_shared_experts is {}; allowed: 0 or more",
                 origin,
                 c.n_shared_experts);
  LOCKSTEP_CHECK(
      c.n_group >= 1 && c.n_routed_experts % c.n_group == 0,
      kConfig,
      "{}: n_group is {}, which does not divide n_routed_experts {}; use a divisor of it",
      origin,
      c.n_group,
      c.n_routed_experts);
  LOCKSTEP_CHECK(c.n_group == 1 || c.n_routed_experts / c.n_group >= 2,
                 kConfig,
                 "{}: n_group {} leaves {} expert in a group of n_routed_experts {}; a group is "
                 "scored by its two best, so use n_group <= {}",
                 origin,
                 c.n_group,
                 c.n_routed_experts / c.n_group,
                 c.n_routed_experts,
                 c.n_routed_experts / 2);
  LOCKSTEP_CHECK(c.topk_group >= 1 && c.topk_group <= c.n_group,
                 kConfig,
                 "{}: topk_group is {}; allowed: 1 to n_group {}",
                 origin,
                 c.topk_group,
                 c.n_group);
  const int64_t reachable = c.n_routed_experts / c.n_group * c.topk_group;
  LOCKSTEP_CHECK(c.num_experts_per_tok <= reachable,
                 kConfig,
                 "{}: num_experts_per_tok is {}, but only {} experts can be chosen "
                 "(n_routed_experts {} x topk_group {} / n_group {}); lower it or raise topk_group",
                 origin,
                 c.num_experts_per_tok,
                 reachable,
                 c.n_routed_experts,
                 c.topk_group,
                 c.n_group);
}

void validate_layers(const ModelConfig& c, std::string_view origin) {
  const auto num = static_cast<size_t>(c.num_hidden_layers);
  LOCKSTEP_CHECK(c.mixers.size() == num && c.mlps.size() == num && c.indexer_shared.size() == num,
                 kConfig,
                 "{}: num_hidden_layers is {} but layer_types, mlp_layer_types and indexer_types "
                 "have {}, {} and {} entries; give one entry per layer",
                 origin,
                 num,
                 c.mixers.size(),
                 c.mlps.size(),
                 c.indexer_shared.size());
  bool has_full = false;
  for (size_t i = 0; i < num; ++i) {
    if (c.mixers[i] != MixerKind::kDsa) continue;
    LOCKSTEP_CHECK(!c.indexer_shared[i] || has_full,
                   kConfig,
                   "{}: indexer_types[{}] is \"shared\" but no sparse layer before it is \"full\"; "
                   "make the first sparse layer \"full\"",
                   origin,
                   i);
    has_full = has_full || !c.indexer_shared[i];
  }
}

}  // namespace

void validate(const ModelConfig& c, std::string_view origin) {
  for (const keys::SizeKey& key : keys::kSizes) {
    LOCKSTEP_CHECK(c.*key.field >= 1,
                   kConfig,
                   "{}: {} is {}; allowed: 1 or more",
                   origin,
                   key.names[0],
                   c.*key.field);
  }
  LOCKSTEP_CHECK(c.index_topk % c.index_kpool == 0,
                 kConfig,
                 "{}: index_topk {} is not a multiple of index_kpool {}; whole pools are selected, "
                 "so use index_topk {} or another index_kpool",
                 origin,
                 c.index_topk,
                 c.index_kpool,
                 (c.index_topk / c.index_kpool + 1) * c.index_kpool);
  for (const auto& [name, value] : {std::pair<std::string_view, int64_t>{"hc_mult", c.hc_mult},
                                    {"hc_sinkhorn_iters", c.hc_sinkhorn_iters}}) {
    LOCKSTEP_CHECK(value >= 1, kConfig, "{}: {} is {}; allowed: 1 or more", origin, name, value);
  }
  for (const keys::RealKey& key : keys::kReals) {
    const double value = c.*key.field;
    const bool positive = key.name == "rms_norm_eps" || key.name == "routed_scaling_factor";
    LOCKSTEP_CHECK(positive ? value > 0 : value >= 0,
                   kConfig,
                   "{}: {} is {}; allowed: numbers {} 0",
                   origin,
                   key.name,
                   value,
                   positive ? ">" : ">=");
  }
  LOCKSTEP_CHECK(!c.swiglu_limit || *c.swiglu_limit > 0,
                 kConfig,
                 "{}: swiglu_limit is {}; allowed: a number > 0, or null for no clamp",
                 origin,
                 *c.swiglu_limit);
  LOCKSTEP_CHECK(!c.linear_lower_bound || *c.linear_lower_bound < 0,
                 kConfig,
                 "{}: linear_lower_bound is {}; allowed: a number < 0, or null for the unbounded "
                 "gate",
                 origin,
                 *c.linear_lower_bound);
  LOCKSTEP_CHECK(!c.pad_token_id || (*c.pad_token_id >= 0 && *c.pad_token_id < c.vocab_size),
                 kConfig,
                 "{}: pad_token_id is {}; allowed: 0 to vocab_size - 1 = {}, or null",
                 origin,
                 *c.pad_token_id,
                 c.vocab_size - 1);
  LOCKSTEP_CHECK(c.num_nextn_predict_layers >= 0,
                 kConfig,
                 "{}: num_nextn_predict_layers is {}; allowed: 0 or more",
                 origin,
                 c.num_nextn_predict_layers);
  validate_experts(c, origin);
  validate_layers(c, origin);
}

}  // namespace lockstep::model
