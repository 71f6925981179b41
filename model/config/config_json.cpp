#include "model/config/config_json.hpp"

#include <filesystem>

#include "model/config/config_keys.hpp"
#include "model/config/config_reader.hpp"
#include "model/config/json_text.hpp"

namespace lockstep::model {
namespace {

void check_fixed(const Reader& in) {
  for (const keys::FixedKey& key : keys::kFixed) {
    const json* value = in.not_null(key.name);
    if (value == nullptr) continue;
    if (key.name == "moe_layer_freq" && in.not_null("mlp_layer_types") != nullptr) continue;
    LOCKSTEP_CHECK(*value == json::parse(key.value),
                   kConfig,
                   "{}: {} is {}, but only {} is supported: {}",
                   in.origin(),
                   key.name,
                   value->dump(),
                   key.value,
                   key.why);
  }
}

void read_sizes(const Reader& in, ModelConfig& c) {
  for (const keys::SizeKey& key : keys::kSizes) {
    const auto found = in.find(key.names);
    if (found.value != nullptr) {
      c.*key.field = in.integer(found);
      continue;
    }
    const std::string_view name = key.names[0];
    LOCKSTEP_CHECK(name != "q_lora_rank" || in.get(name) == nullptr,
                   kConfig,
                   "{}: q_lora_rank is null; sparse attention needs a query rank: give a positive "
                   "integer (GLM-5.3 Flash: 1536)",
                   in.origin());
    const bool disputed = name == "index_kpool";
    if (in.defaults() == ConfigDefaults::kRefuse) {
      in.missing(name,
                 disputed ? "transformers would read 16, the trainer 4"
                          : fmt::format("GLM-5.3 Flash: {}", key.class_default));
    }
    const int64_t pool = in.defaults() == ConfigDefaults::kHf ? 16 : 4;
    c.*key.field = disputed ? pool : key.class_default;
  }
}

void read_scalars(const Reader& in, ModelConfig& c) {
  for (const keys::CountKey& key : keys::kCounts) {
    const auto found = in.find(key.names);
    c.*key.field = found.value != nullptr ? in.integer(found) : key.default_value;
  }
  for (const keys::RealKey& key : keys::kReals) {
    const auto found = in.find(std::array{key.name});
    c.*key.field = found.value != nullptr ? in.real(found) : key.default_value;
  }
  for (const keys::FlagKey& key : keys::kFlags) {
    const auto found = in.find(key.names);
    c.*key.field = found.value != nullptr ? in.flag(found) : key.default_value;
  }

  const json* limit = in.get("swiglu_limit");
  if (limit == nullptr) {
    if (in.defaults() == ConfigDefaults::kRefuse) {
      in.missing("swiglu_limit", "transformers would clamp at 10, the trainer would not clamp");
    }
    if (in.defaults() == ConfigDefaults::kHf) c.swiglu_limit = 10.0;
  } else if (!limit->is_null()) {
    c.swiglu_limit = in.real({"swiglu_limit", limit});
  }

  const auto scoring = in.find(std::array<std::string_view, 1>{"scoring_func"});
  if (scoring.value != nullptr) {
    const std::string name = in.text(scoring);
    if (name != "sigmoid" && name != "softmax") in.wrong(scoring, "\"sigmoid\" or \"softmax\"");
    c.softmax_scoring = name == "softmax";
  }

  const auto kv_heads = in.find(std::array<std::string_view, 1>{"num_key_value_heads"});
  LOCKSTEP_CHECK(
      kv_heads.value == nullptr || in.integer(kv_heads) == c.num_attention_heads,
      kConfig,
      "{}: num_key_value_heads is {} but num_attention_heads is {}; all heads share one latent, so "
      "they must be equal: set num_key_value_heads to {}",
      in.origin(),
      kv_heads.value->dump(),
      c.num_attention_heads,
      c.num_attention_heads);

  constexpr int64_t kClassPad = 154820;
  if (const json* pad = in.get("pad_token_id"); pad == nullptr) {
    if (kClassPad < c.vocab_size) c.pad_token_id = kClassPad;
  } else if (!pad->is_null()) {
    c.pad_token_id = in.integer({"pad_token_id", pad});
  }
}

/// The lower bound of the decay: linear_lower_bound, or gate_lower_bound with safe_gate.
void read_lower_bound(const Reader& in, ModelConfig& c) {
  const json* own = in.get("linear_lower_bound");
  const json* dict = in.not_null("linear_attn_config");
  std::optional<double> from_dict;
  bool dict_says = false;
  if (dict != nullptr) {
    const json* bound = in.get("linear_attn_config.gate_lower_bound");
    const json* safe = in.not_null("linear_attn_config.safe_gate");
    const bool is_safe = safe == nullptr || in.flag({"linear_attn_config.safe_gate", safe});
    // Without safe_gate: false, a null bound means -5 wherever the dict is read.
    const bool null_bound = bound != nullptr ? bound->is_null() : own != nullptr && own->is_null();
    dict_says = bound != nullptr || null_bound;
    if (bound != nullptr && !bound->is_null()) {
      from_dict = in.real({"linear_attn_config.gate_lower_bound", bound});
    } else if (null_bound && is_safe) {
      from_dict = -5.0;
    }
  }
  std::optional<double> from_key;
  if (own != nullptr && !own->is_null()) from_key = in.real({"linear_lower_bound", own});
  const auto show = [](const std::optional<double>& v) {
    return v ? fmt::format("{}", *v) : std::string("null (no bound)");
  };
  LOCKSTEP_CHECK(own == nullptr || !dict_says || from_key == from_dict,
                 kConfig,
                 "{}: linear_lower_bound is {} but linear_attn_config.gate_lower_bound with "
                 "safe_gate means {}; make them equal (no bound: both null and safe_gate false)",
                 in.origin(),
                 show(from_key),
                 show(from_dict));
  c.linear_lower_bound = own != nullptr ? from_key : dict_says ? from_dict : -5.0;
}

}  // namespace

ModelConfig parse_config(std::string_view json_text,
                         ConfigDefaults defaults,
                         std::string_view origin) {
  check_json(json_text, origin);
  const json root = json::parse(json_text);
  LOCKSTEP_CHECK(root.is_object(), kInput, "{}: a config must be a JSON object", origin);
  const bool nested = root.contains("text_config") && !root["text_config"].is_null();
  std::string type = nested ? "glm5_next" : "glm5_next_text";
  if (root.contains("model_type")) {
    LOCKSTEP_CHECK(
        root["model_type"] == "glm5_next" || root["model_type"] == "glm5_next_text",
        kConfig,
        "{}: model_type is {}; allowed: \"glm5_next\" (composite), \"glm5_next_text\" (text)",
        origin,
        root["model_type"].dump());
    type = root["model_type"].get<std::string>();
  }
  LOCKSTEP_CHECK(!nested || type == "glm5_next",
                 kConfig,
                 "{}: model_type is \"glm5_next_text\" but the file has a text_config; set "
                 "model_type to \"glm5_next\", or move the keys of text_config to the top",
                 origin);
  const json& text = nested ? root["text_config"] : root;
  LOCKSTEP_CHECK(text.is_object(), kConfig, "{}: text_config must be an object", origin);
  LOCKSTEP_CHECK(!nested || !text.contains("model_type") || text["model_type"] == "glm5_next_text",
                 kConfig,
                 "{}: text_config.model_type is {}; allowed: \"glm5_next_text\"",
                 origin,
                 text["model_type"].dump());

  const Reader in(text, origin, defaults);
  ModelConfig c;
  c.composite = type == "glm5_next";
  c.source_json = std::string(json_text);
  const json* dict = in.not_null("linear_attn_config");
  if (dict != nullptr && !dict->is_object()) in.wrong({"linear_attn_config", dict}, "an object");
  check_fixed(in);
  read_sizes(in, c);
  read_scalars(in, c);
  read_lower_bound(in, c);
  read_layers(in, c);
  read_indexer_types(in, c);

  const json* inner = in.not_null("tie_word_embeddings");
  const Reader outer_in(root, origin, defaults);
  const json* outer = outer_in.not_null("tie_word_embeddings");
  if (inner == nullptr) inner = outer;
  if (outer == nullptr) outer = inner;
  if (inner != nullptr) {
    c.tie_word_embeddings = in.flag({"tie_word_embeddings", inner});
    LOCKSTEP_CHECK(*inner == *outer,
                   kConfig,
                   "{}: tie_word_embeddings is {} but text_config.tie_word_embeddings is {}; make "
                   "them equal",
                   origin,
                   outer->dump(),
                   inner->dump());
  }
  validate(c, origin);
  return c;
}

ModelConfig load_config(const std::string& path, ConfigDefaults defaults) {
  const bool folder = std::filesystem::is_directory(path);
  const std::string file = folder ? (std::filesystem::path(path) / "config.json").string() : path;
  return parse_config(read_text_file(file), defaults, file);
}

}  // namespace lockstep::model
