// The architecture of a glm5_next text model, resolved from a Hugging Face config: every alias
// read, every default decided.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::model {

enum class MixerKind : uint8_t { kKda, kDsa };  ///< linear_attention / indexed (sparse) attention
enum class MlpKind : uint8_t { kDense, kMoe };  ///< dense / sparse
enum class ConfigDefaults : uint8_t {
  kRefuse,  ///< an error naming the key
  kHf,
  kTrainer
};  ///< what a missing architecture key means

struct ModelConfig {
  int64_t vocab_size = 0, hidden_size = 0, intermediate_size = 0, moe_intermediate_size = 0,
          num_hidden_layers = 0;

  // Sparse attention: heads share one latent of kv_lora_rank.
  int64_t num_attention_heads = 0, q_lora_rank = 0, kv_lora_rank = 0, qk_nope_head_dim = 0,
          v_head_dim = 0;
  // Indexer. index_topk counts tokens; index_topk / index_kpool pools are selected.
  int64_t index_n_heads = 0, index_head_dim = 0, index_topk = 0, index_kpool = 0;
  bool index_always_select_tail = true;

  // KDA. linear_lower_bound empty: the unbounded softplus gate.
  int64_t linear_num_heads = 0, linear_head_dim = 0, linear_conv_kernel_dim = 0;
  std::optional<double> linear_lower_bound;

  // Hyper-connections.
  int64_t hc_mult = 4, hc_sinkhorn_iters = 20;
  double hc_eps = 1e-6;

  // Mixture of experts.
  int64_t n_routed_experts = 0, num_experts_per_tok = 0, n_shared_experts = 1, n_group = 1,
          topk_group = 1;
  bool norm_topk_prob = true;
  double routed_scaling_factor = 1.0;
  bool softmax_scoring = false;        ///< scoring_func "softmax" instead of "sigmoid"
  std::optional<double> swiglu_limit;  ///< empty: no clamp

  double rms_norm_eps = 1e-5, initializer_range = 0.02;
  std::optional<int64_t> pad_token_id;  ///< row of the embedding that gets no gradient
  bool tie_word_embeddings = false;
  int64_t num_nextn_predict_layers = 0;  ///< MTP layers on disk, dropped here

  std::vector<MixerKind> mixers;     ///< one per layer
  std::vector<MlpKind> mlps;         ///< one per layer
  std::vector<bool> indexer_shared;  ///< one per layer; true: a DSA layer that reuses the last full
                                     ///< layer's selection

  bool composite =
      false;  ///< read from a composite glm5_next file; tensor names carry "language_model."
  std::string source_json;  ///< the file as read, from which export keeps pass-through keys; empty
                            ///< for presets

  [[nodiscard]] int64_t shared_width() const { return moe_intermediate_size * n_shared_experts; }
  [[nodiscard]] int64_t kda_width() const { return linear_num_heads * linear_head_dim; }
  [[nodiscard]] int64_t index_pools() const { return index_topk / index_kpool; }
};

}  // namespace lockstep::model
