// Tables of config keys shared by the reader, the writer and overrides. Internal to this room.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

#include "model/config/model_config.hpp"

namespace lockstep::model::keys {

/// A size that every config must state. names[0] is written first, the others are aliases; a dot
/// leads into linear_attn_config.
struct SizeKey {
  std::array<std::string_view, 2> names;
  int64_t ModelConfig::*field;
  int64_t class_default;  ///< of both programs
};

inline constexpr std::array<SizeKey, 19> kSizes = {{
    {{"vocab_size", ""}, &ModelConfig::vocab_size, 154880},
    {{"hidden_size", ""}, &ModelConfig::hidden_size, 4096},
    {{"intermediate_size", ""}, &ModelConfig::intermediate_size, 12288},
    {{"moe_intermediate_size", ""}, &ModelConfig::moe_intermediate_size, 2048},
    {{"num_hidden_layers", ""}, &ModelConfig::num_hidden_layers, 45},
    {{"num_attention_heads", ""}, &ModelConfig::num_attention_heads, 64},
    {{"q_lora_rank", ""}, &ModelConfig::q_lora_rank, 1536},
    {{"kv_lora_rank", ""}, &ModelConfig::kv_lora_rank, 512},
    {{"qk_nope_head_dim", ""}, &ModelConfig::qk_nope_head_dim, 256},
    {{"v_head_dim", ""}, &ModelConfig::v_head_dim, 256},
    {{"index_n_heads", ""}, &ModelConfig::index_n_heads, 32},
    {{"index_head_dim", ""}, &ModelConfig::index_head_dim, 128},
    {{"index_topk", ""}, &ModelConfig::index_topk, 2048},
    {{"linear_num_heads", "linear_attn_config.num_heads"}, &ModelConfig::linear_num_heads, 64},
    {{"linear_head_dim", "linear_attn_config.head_dim"}, &ModelConfig::linear_head_dim, 128},
    {{"linear_conv_kernel_dim", "linear_attn_config.short_conv_kernel_size"},
     &ModelConfig::linear_conv_kernel_dim,
     4},
    {{"n_routed_experts", "num_local_experts"}, &ModelConfig::n_routed_experts, 288},
    {{"num_experts_per_tok", "num_experts_per_token"}, &ModelConfig::num_experts_per_tok, 8},
    {{"index_kpool", ""}, &ModelConfig::index_kpool, 0},  // 16 or 4: the programs disagree
}};

/// A count with one default everywhere.
struct CountKey {
  std::array<std::string_view, 2> names;
  int64_t ModelConfig::*field;
  int64_t default_value;
};

inline constexpr std::array<CountKey, 6> kCounts = {{
    {{"hc_mult", "mhc_num_residual_streams"}, &ModelConfig::hc_mult, 4},
    {{"hc_sinkhorn_iters", "mhc_sinkhorn_iterations"}, &ModelConfig::hc_sinkhorn_iters, 20},
    {{"n_shared_experts", ""}, &ModelConfig::n_shared_experts, 1},
    {{"n_group", ""}, &ModelConfig::n_group, 1},
    {{"topk_group", ""}, &ModelConfig::topk_group, 1},
    {{"num_nextn_predict_layers", ""}, &ModelConfig::num_nextn_predict_layers, 0},
}};

struct RealKey {
  std::string_view name;
  double ModelConfig::*field;
  double default_value;
};

inline constexpr std::array<RealKey, 4> kReals = {{
    {"hc_eps", &ModelConfig::hc_eps, 1e-6},
    {"rms_norm_eps", &ModelConfig::rms_norm_eps, 1e-5},
    {"initializer_range", &ModelConfig::initializer_range, 0.02},
    {"routed_scaling_factor", &ModelConfig::routed_scaling_factor, 2.5},
}};

struct FlagKey {
  std::array<std::string_view, 2> names;
  bool ModelConfig::*field;
  bool default_value;
};

inline constexpr std::array<FlagKey, 2> kFlags = {{
    {{"norm_topk_prob", "moe_renormalize"}, &ModelConfig::norm_topk_prob, true},
    {{"index_kpool_always_select_tail", ""}, &ModelConfig::index_always_select_tail, true},
}};

/// Keys of which this model knows one value only; another value is refused. `engine` marks those
/// that an engine reads and may refuse to miss, which export adds.
struct FixedKey {
  std::string_view name;
  std::string_view value;  ///< JSON
  bool engine;
  std::string_view why;
};

inline constexpr std::array<FixedKey, 13> kFixed = {{
    {"qk_rope_head_dim", "0", true, "attention here has no rotary part"},
    {"hidden_act", "\"silu\"", true, "the clamped SwiGLU is built on silu"},
    {"attention_bias", "false", true, "no projection of the text model has a bias"},
    {"attention_dropout", "0.0", false, "there is no dropout"},
    {"mla", "true", true, "attention here is latent attention"},
    {"mla_use_nope", "true", true, "attention here has no rotary part"},
    {"mla_nope", "true", true, "attention here has no rotary part"},
    {"mhc", "true", true, "plain residuals are not part of this model"},
    {"mhc_post_mult_value", "2.0", false, "the factor of the post coefficients is fixed"},
    {"logit_scale", "1.0", false, "logits are not scaled"},
    {"index_kpool_compress", "true", true, "the indexer always compresses its pools"},
    {"index_dsa_use_layernorm", "true", true, "indexer keys always pass a LayerNorm"},
    {"moe_layer_freq", "1", false, "give mlp_layer_types instead"},
}};

/// Written on export when absent: without them an engine refuses the file or reads it differently.
struct EngineKey {
  std::string_view name;
  std::string_view value;
};

inline constexpr std::array<EngineKey, 4> kEngine = {{
    {"topk_method", "\"noaux_tc\""},
    {"moe_router_dtype", "\"float32\""},
    {"indexer_rope_interleave", "true"},
    {"max_position_embeddings", "1048576"},
}};

/// Kind of a layer_types entry, or nothing if the name is unknown.
std::optional<MixerKind> mixer_of(std::string_view layer_type);
inline constexpr std::string_view kLayerTypeNames =
    "linear_attention, mamba (KDA); deepseek_sparse_attention, indexed_attention, full_attention, "
    "attention (sparse)";

/// Calls visit(first, second) for every pair of names that mean the same.
template <typename Visit>
void for_each_alias_pair(Visit&& visit) {
  const auto over = [&](const auto& table) {
    for (const auto& key : table) {
      if (!key.names[1].empty()) visit(key.names[0], key.names[1]);
    }
  };
  over(kSizes);
  over(kCounts);
  over(kFlags);
  visit(std::string_view("linear_lower_bound"),
        std::string_view("linear_attn_config.gate_lower_bound"));
  visit(std::string_view("mla_use_nope"), std::string_view("mla_nope"));
}

}  // namespace lockstep::model::keys
