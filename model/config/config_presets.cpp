#include <fmt/ranges.h>

#include "model/base/error.hpp"
#include "model/config/config_json.hpp"

namespace lockstep::model {
namespace {

/// Three KDA layers, then one sparse; the first layers dense.
void set_layers(ModelConfig& c, int64_t num_dense) {
  for (int64_t i = 0; i < c.num_hidden_layers; ++i) {
    c.mixers.push_back(i % 4 == 3 ? MixerKind::kDsa : MixerKind::kKda);
    c.mlps.push_back(i < num_dense ? MlpKind::kDense : MlpKind::kMoe);
    c.indexer_shared.push_back(false);
  }
}

ModelConfig flash() {
  ModelConfig c;
  c.vocab_size = 154880;
  c.hidden_size = 4096;
  c.intermediate_size = 12288;
  c.moe_intermediate_size = 2048;
  c.num_hidden_layers = 45;
  c.num_attention_heads = 64;
  c.q_lora_rank = 1536;
  c.kv_lora_rank = 512;
  c.qk_nope_head_dim = 256;
  c.v_head_dim = 256;
  c.index_n_heads = 32;
  c.index_head_dim = 128;
  c.index_topk = 2048;
  c.index_kpool = 4;
  c.linear_num_heads = 64;
  c.linear_head_dim = 128;
  c.linear_conv_kernel_dim = 4;
  c.linear_lower_bound = -5.0;
  c.n_routed_experts = 288;
  c.num_experts_per_tok = 8;
  c.routed_scaling_factor = 2.5;
  c.swiglu_limit = 10.0;
  c.pad_token_id = 154820;
  c.num_nextn_predict_layers = 1;
  c.composite = true;
  set_layers(c, 3);
  return c;
}

/// Small enough for every test: heads, ranks and widths are no powers of two on purpose. 24 indexer
/// heads, since with few of them pools tie at a score of exactly 0. The model of the golden case of
/// that name.
ModelConfig tiny() {
  ModelConfig c;
  c.vocab_size = 131;
  c.hidden_size = 96;
  c.intermediate_size = 160;
  c.moe_intermediate_size = 48;
  c.num_hidden_layers = 4;
  c.num_attention_heads = 4;
  c.q_lora_rank = 40;
  c.kv_lora_rank = 24;
  c.qk_nope_head_dim = 24;
  c.v_head_dim = 16;
  c.index_n_heads = 24;
  c.index_head_dim = 16;
  c.index_topk = 24;
  c.index_kpool = 4;
  c.linear_num_heads = 4;
  c.linear_head_dim = 16;
  c.linear_conv_kernel_dim = 4;
  c.linear_lower_bound = -5.0;
  c.n_routed_experts = 12;
  c.num_experts_per_tok = 3;
  c.routed_scaling_factor = 2.5;
  c.swiglu_limit = 10.0;
  c.pad_token_id = 5;
  set_layers(c, 1);
  return c;
}

/// The size at which speed on a CPU is compared.
ModelConfig mini() {
  ModelConfig c;
  c.vocab_size = 512;
  c.hidden_size = 256;
  c.intermediate_size = 768;
  c.moe_intermediate_size = 128;
  c.num_hidden_layers = 4;
  c.num_attention_heads = 4;
  c.q_lora_rank = 96;
  c.kv_lora_rank = 64;
  c.qk_nope_head_dim = 64;
  c.v_head_dim = 64;
  c.index_n_heads = 24;
  c.index_head_dim = 64;
  c.index_topk = 64;
  c.index_kpool = 4;
  c.linear_num_heads = 4;
  c.linear_head_dim = 64;
  c.linear_conv_kernel_dim = 4;
  c.linear_lower_bound = -5.0;
  c.n_routed_experts = 8;
  c.num_experts_per_tok = 2;
  c.routed_scaling_factor = 2.5;
  c.swiglu_limit = 10.0;
  c.pad_token_id = 0;
  set_layers(c, 1);
  return c;
}

}  // namespace

std::vector<std::string> preset_names() { return {"glm-5.3-flash", "tiny", "mini"}; }

ModelConfig preset_config(std::string_view name) {
  ModelConfig c;
  if (name == "glm-5.3-flash") {
    c = flash();
  } else if (name == "tiny") {
    c = tiny();
  } else if (name == "mini") {
    c = mini();
  } else {
    fail(ErrorKind::kConfig,
         "model preset '{}' does not exist; use one of: {}",
         name,
         fmt::join(preset_names(), ", "));
  }
  validate(c, fmt::format("preset {}", name));
  return c;
}

}  // namespace lockstep::model
