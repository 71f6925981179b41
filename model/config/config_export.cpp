#include <algorithm>
#include <nlohmann/json.hpp>

#include "model/config/config_json.hpp"
#include "model/config/config_keys.hpp"
#include "model/config/config_members.hpp"

namespace lockstep::model {
namespace {

using nlohmann::json;

json optional_real(const std::optional<double>& value) {
  return value ? json(*value) : json(nullptr);
}

/// layer_types in the spelling that was read.
void set_layer_types(Members& text, const ModelConfig& c) {
  std::string kda = "linear_attention", dsa = "deepseek_sparse_attention";
  bool same = false;
  if (const RawMember* member = find_member(text, "layer_types"); member != nullptr) {
    const json read = json::parse(member->value);
    same = read.is_array() && read.size() == c.mixers.size();
    bool saw_kda = false, saw_dsa = false;
    for (size_t i = 0; read.is_array() && i < read.size(); ++i) {
      const auto name = read[i].get<std::string>();
      const auto kind = keys::mixer_of(name);
      same = same && kind == c.mixers[i];
      if (kind == MixerKind::kKda && !std::exchange(saw_kda, true)) kda = name;
      if (kind == MixerKind::kDsa && !std::exchange(saw_dsa, true)) dsa = name;
    }
  }
  if (same) return;
  json names = json::array();
  for (MixerKind kind : c.mixers) names.push_back(kind == MixerKind::kKda ? kda : dsa);
  set_member(text, "layer_types", names);
}

void set_mlp_types(Members& text, const ModelConfig& c) {
  json names = json::array();
  for (MlpKind kind : c.mlps) names.push_back(kind == MlpKind::kDense ? "dense" : "sparse");
  set_member(text, "mlp_layer_types", names);
  // Readers that build the list from these two keys must come to the same list.
  const auto first_moe = std::find(c.mlps.begin(), c.mlps.end(), MlpKind::kMoe);
  if (std::find(first_moe, c.mlps.end(), MlpKind::kDense) == c.mlps.end()) {
    set_member(text, "first_k_dense_replace", first_moe - c.mlps.begin());
    set_member(text, "moe_layer_freq", 1);
  }
}

/// indexer_types, unless the entries of sparse layers already say the same.
void set_indexer_types(Members& text, const ModelConfig& c) {
  const bool any_shared =
      std::find(c.indexer_shared.begin(), c.indexer_shared.end(), true) != c.indexer_shared.end();
  if (any_shared) set_member(text, "use_index_cache", true);
  const RawMember* member = find_member(text, "indexer_types");
  const json read = member != nullptr ? json::parse(member->value) : json(nullptr);
  bool same = read.is_array() && read.size() == c.mixers.size();
  for (size_t i = 0; same && i < read.size(); ++i) {
    same = c.mixers[i] != MixerKind::kDsa || (read[i] == "shared") == c.indexer_shared[i];
  }
  if (same) return;
  json names = json::array();
  for (bool shared : c.indexer_shared) names.push_back(shared ? "shared" : "full");
  set_member(text, "indexer_types", names);
}

/// The dict of older readers: the same four values as the linear_* keys.
void set_linear_dict(Members& text, const ModelConfig& c, int indent) {
  const RawMember* member = find_member(text, "linear_attn_config");
  const bool has = member != nullptr && member->value != "null";
  Members dict = has ? raw_members(member->value, "linear_attn_config") : Members{};
  set_member(dict, "num_heads", c.linear_num_heads);
  set_member(dict, "head_dim", c.linear_head_dim);
  set_member(dict, "short_conv_kernel_size", c.linear_conv_kernel_dim);
  set_member(dict, "gate_lower_bound", optional_real(c.linear_lower_bound));
  if (!c.linear_lower_bound) set_member(dict, "safe_gate", false);
  std::string rendered = join_members(dict, indent + 2);
  if (!has) {
    erase_member(text, "linear_attn_config");
    text.push_back({"linear_attn_config", std::move(rendered)});
  } else if (json::parse(member->value) != json::parse(rendered)) {
    find_member(text, "linear_attn_config")->value = std::move(rendered);
  }
}

void write_text(Members& text, const ModelConfig& c, std::string_view dtype, int indent) {
  erase_member(text, "dtype");
  if (const RawMember* head = find_member(text, "head_dim"); head != nullptr) {
    const json value = json::parse(head->value);
    if (value.is_number() && value == 0) erase_member(text, "head_dim");
  }
  const auto own = [&](const auto& names, const json& value) {
    for (std::string_view name : names) {
      if (!name.empty() && name.find('.') == std::string_view::npos) set_member(text, name, value);
    }
  };
  for (const auto& key : keys::kSizes) own(key.names, c.*key.field);
  for (const auto& key : keys::kCounts) {
    const bool keep_out = key.field == &ModelConfig::num_nextn_predict_layers &&
                          c.num_nextn_predict_layers == 0 &&
                          find_member(text, key.names[0]) == nullptr;
    if (!keep_out) own(key.names, c.*key.field);
  }
  for (const auto& key : keys::kReals) own(std::array{key.name}, c.*key.field);
  for (const auto& key : keys::kFlags) own(key.names, c.*key.field);
  set_member(text, "num_key_value_heads", c.num_attention_heads);
  set_member(text, "qk_head_dim", c.qk_nope_head_dim);
  set_member(text, "swiglu_limit", optional_real(c.swiglu_limit));
  set_member(text, "scoring_func", c.softmax_scoring ? "softmax" : "sigmoid");
  set_member(text, "linear_lower_bound", optional_real(c.linear_lower_bound));
  set_member(text, "pad_token_id", c.pad_token_id ? json(*c.pad_token_id) : json(nullptr));
  set_member(text, "tie_word_embeddings", c.tie_word_embeddings);
  set_layer_types(text, c);
  set_mlp_types(text, c);
  set_indexer_types(text, c);
  set_linear_dict(text, c, indent);
  for (const keys::FixedKey& key : keys::kFixed) {
    if (key.engine) add_member(text, key.name, key.value);
  }
  for (const keys::EngineKey& key : keys::kEngine) add_member(text, key.name, key.value);
  if (!dtype.empty()) set_member(text, "dtype", std::string(dtype));
}

}  // namespace

std::string export_config(const ModelConfig& c, std::string_view dtype, bool quantized) {
  const bool from_file = !c.source_json.empty();
  Members root = from_file ? raw_members(c.source_json, "config") : Members{};
  const RawMember* inner = find_member(root, "text_config");
  const bool nested = c.composite && (!from_file || (inner != nullptr && inner->value != "null"));
  add_member(
      root,
      "architectures",
      c.composite ? R"(["Glm5NextForConditionalGeneration"])" : R"(["Glm5NextForCausalLM"])");
  set_member(root, "model_type", c.composite ? "glm5_next" : "glm5_next_text");
  if (!quantized) erase_member(root, "quantization_config");
  if (!nested) {
    write_text(root, c, dtype, 2);
    return join_members(root, 2) + "\n";
  }
  erase_member(root, "dtype");
  if (!dtype.empty()) set_member(root, "dtype", std::string(dtype));
  set_member(root, "tie_word_embeddings", c.tie_word_embeddings);
  Members text =
      from_file ? raw_members(find_member(root, "text_config")->value, "text_config") : Members{};
  if (!quantized) erase_member(text, "quantization_config");
  add_member(text, "model_type", "\"glm5_next_text\"");
  write_text(text, c, dtype, 4);
  add_member(root, "text_config", "{}");
  find_member(root, "text_config")->value = join_members(text, 4);
  return join_members(root, 2) + "\n";
}

std::string describe_config(const ModelConfig& c) {
  nlohmann::ordered_json out;
  out["composite"] = c.composite;
  for (const auto& key : keys::kSizes) out[std::string(key.names[0])] = c.*key.field;
  for (const auto& key : keys::kCounts) out[std::string(key.names[0])] = c.*key.field;
  for (const auto& key : keys::kReals) out[std::string(key.name)] = c.*key.field;
  for (const auto& key : keys::kFlags) out[std::string(key.names[0])] = c.*key.field;
  out["scoring_func"] = c.softmax_scoring ? "softmax" : "sigmoid";
  out["swiglu_limit"] = optional_real(c.swiglu_limit);
  out["linear_lower_bound"] = optional_real(c.linear_lower_bound);
  out["pad_token_id"] = c.pad_token_id ? json(*c.pad_token_id) : json(nullptr);
  out["tie_word_embeddings"] = c.tie_word_embeddings;
  auto& layers = out["layers"] = json::array();
  for (size_t i = 0; i < c.mixers.size(); ++i) {
    const bool dsa = c.mixers[i] == MixerKind::kDsa;
    layers.push_back({{"mixer", dsa ? "indexed_attention" : "linear_attention"},
                      {"mlp", c.mlps[i] == MlpKind::kDense ? "dense" : "sparse"}});
    if (dsa) layers.back()["indexer"] = c.indexer_shared[i] ? "shared" : "full";
  }
  return out.dump(2);
}

}  // namespace lockstep::model
