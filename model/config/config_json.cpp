#include "model/config/config_json.hpp"

#include <fmt/ranges.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "model/base/error.hpp"
#include "model/config/config_keys.hpp"
#include "model/config/json_text.hpp"

namespace lockstep::model {
namespace {

using nlohmann::json;

constexpr int64_t kLargestSize = (int64_t{1} << 31) - 1;

/// Reads typed keys of the text object, under all their names.
class Reader {
 public:
  Reader(const json& object, std::string_view origin, ConfigDefaults defaults)
      : object_(object), origin_(origin), defaults_(defaults) {}

  /// Value at a key or at "dict.key"; null pointer if absent.
  [[nodiscard]] const json* get(std::string_view path) const {
    const json* at = &object_;
    while (at != nullptr && !path.empty()) {
      const size_t dot = std::min(path.find('.'), path.size());
      const auto found = at->is_object() ? at->find(path.substr(0, dot)) : at->end();
      at = at->is_object() && found != at->end() ? &*found : nullptr;
      path = path.substr(std::min(dot + 1, path.size()));
    }
    return at;
  }
  [[nodiscard]] const json* not_null(std::string_view path) const {
    const json* value = get(path);
    return value != nullptr && !value->is_null() ? value : nullptr;
  }

  /// The first name with a value, after checking that all names with one agree.
  struct Found {
    std::string_view name;
    const json* value = nullptr;
  };
  template <size_t N>
  [[nodiscard]] Found find(const std::array<std::string_view, N>& names) const {
    Found first;
    for (std::string_view name : names) {
      const json* value = name.empty() ? nullptr : not_null(name);
      if (value == nullptr) continue;
      if (first.value == nullptr) first = {name, value};
      LOCKSTEP_CHECK(*first.value == *value,
                     kConfig,
                     "{}: {} is {} but {} is {}; they mean the same: keep one, or make them equal",
                     origin_,
                     first.name,
                     first.value->dump(),
                     name,
                     value->dump());
    }
    return first;
  }

  [[nodiscard]] int64_t integer(const Found& found) const {
    const bool fits = found.value->is_number_integer() &&
                      (!found.value->is_number_unsigned() ||
                       found.value->get<uint64_t>() <= static_cast<uint64_t>(kLargestSize)) &&
                      found.value->get<int64_t>() >= -kLargestSize;
    if (!fits) wrong(found, fmt::format("an integer up to {}", kLargestSize));
    return found.value->get<int64_t>();
  }
  [[nodiscard]] double real(const Found& found) const {
    if (!found.value->is_number()) wrong(found, "a number");
    return found.value->get<double>();
  }
  [[nodiscard]] bool flag(const Found& found) const {
    if (!found.value->is_boolean()) wrong(found, "true or false");
    return found.value->get<bool>();
  }
  [[nodiscard]] std::string text(const Found& found) const {
    if (!found.value->is_string()) wrong(found, "a string");
    return found.value->get<std::string>();
  }
  [[nodiscard]] std::vector<std::string> strings(const Found& found) const {
    if (!found.value->is_array()) wrong(found, "a list with one string per layer");
    std::vector<std::string> result;
    for (const json& entry : *found.value) {
      if (!entry.is_string()) wrong(found, "a list with one string per layer");
      result.push_back(entry.get<std::string>());
    }
    return result;
  }
  [[noreturn]] void wrong(const Found& found, std::string_view expected) const {
    fail(ErrorKind::kConfig,
         "{}: {} is {}; expected {}",
         origin_,
         found.name,
         found.value->dump(),
         expected);
  }

  /// A key whose absence is refused unless a program's defaults were asked for.
  [[noreturn]] void missing(std::string_view key, std::string_view hint) const {
    fail(ErrorKind::kConfig,
         "{}: {} is missing ({}); add it, or ask for one program's defaults with --defaults hf or "
         "--defaults trainer",
         origin_,
         key,
         hint);
  }

  [[nodiscard]] std::string_view origin() const { return origin_; }
  [[nodiscard]] ConfigDefaults defaults() const { return defaults_; }

 private:
  const json& object_;
  std::string_view origin_;
  ConfigDefaults defaults_;
};

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

void check_length(const Reader& in, std::string_view key, size_t size, const ModelConfig& c) {
  LOCKSTEP_CHECK(static_cast<int64_t>(size) >= c.num_hidden_layers,
                 kConfig,
                 "{}: {} has {} entries but num_hidden_layers is {}; give one entry per layer",
                 in.origin(),
                 key,
                 size,
                 c.num_hidden_layers);
}

/// kda_layers and full_attn_layers repeat layer_types; files count them from 0 or from 1.
void check_layer_lists(const Reader& in, const ModelConfig& c) {
  for (const auto& [key, kind] :
       {std::pair<std::string_view, MixerKind>{"linear_attn_config.kda_layers", MixerKind::kKda},
        {"linear_attn_config.full_attn_layers", MixerKind::kDsa}}) {
    const json* list = in.not_null(key);
    if (list == nullptr) continue;
    if (!list->is_array()) in.wrong({key, list}, "a list of layer numbers");
    std::set<int64_t> given;
    for (const json& entry : *list) given.insert(in.integer({key, &entry}));
    std::set<int64_t> from_zero, from_one;
    for (size_t i = 0; i < c.mixers.size(); ++i) {
      if (c.mixers[i] != kind) continue;
      from_zero.insert(static_cast<int64_t>(i));
      from_one.insert(static_cast<int64_t>(i) + 1);
    }
    LOCKSTEP_CHECK(given == from_zero || given == from_one,
                   kConfig,
                   "{}: {} is {} but layer_types puts such layers at {}; make them agree, or "
                   "remove {}",
                   in.origin(),
                   key,
                   list->dump(),
                   from_zero,
                   key);
  }
}

void read_layers(const Reader& in, ModelConfig& c) {
  const auto num = static_cast<size_t>(std::max<int64_t>(c.num_hidden_layers, 0));
  const auto types = in.find(std::array<std::string_view, 1>{"layer_types"});
  if (types.value != nullptr) {
    const std::vector<std::string> names = in.strings(types);
    for (size_t i = 0; i < names.size(); ++i) {
      const auto kind = keys::mixer_of(names[i]);
      LOCKSTEP_CHECK(kind.has_value(),
                     kConfig,
                     "{}: layer_types[{}] is \"{}\"; allowed: {}",
                     in.origin(),
                     i,
                     names[i],
                     keys::kLayerTypeNames);
      if (i < num) c.mixers.push_back(*kind);
    }
    check_length(in, "layer_types", names.size(), c);
  } else {
    if (in.defaults() == ConfigDefaults::kRefuse) {
      in.missing("layer_types",
                 "transformers would take three linear_attention layers and one sparse, the "
                 "trainer sparse ones only");
    }
    for (size_t i = 0; i < num; ++i) {
      const bool kda = in.defaults() == ConfigDefaults::kHf && i % 4 != 3;
      c.mixers.push_back(kda ? MixerKind::kKda : MixerKind::kDsa);
    }
  }
  check_layer_lists(in, c);

  const auto mlps = in.find(std::array<std::string_view, 1>{"mlp_layer_types"});
  if (mlps.value != nullptr) {
    const std::vector<std::string> names = in.strings(mlps);
    for (size_t i = 0; i < names.size(); ++i) {
      LOCKSTEP_CHECK(names[i] == "dense" || names[i] == "sparse",
                     kConfig,
                     "{}: mlp_layer_types[{}] is \"{}\"; allowed: dense, sparse",
                     in.origin(),
                     i,
                     names[i]);
      if (i < num) c.mlps.push_back(names[i] == "dense" ? MlpKind::kDense : MlpKind::kMoe);
    }
    check_length(in, "mlp_layer_types", names.size(), c);
    return;
  }
  // transformers does not read first_k_dense_replace.
  const auto dense = in.find(std::array<std::string_view, 1>{"first_k_dense_replace"});
  const bool use = dense.value != nullptr && in.defaults() != ConfigDefaults::kHf;
  const int64_t num_dense = use ? in.integer(dense) : 3;
  for (size_t i = 0; i < num; ++i) {
    c.mlps.push_back(static_cast<int64_t>(i) < num_dense ? MlpKind::kDense : MlpKind::kMoe);
  }
}

/// One entry per layer, "F" and "S" accepted for "full" and "shared".
std::vector<bool> shared_entries(const Reader& in, const Reader::Found& found) {
  std::vector<std::string> names;
  if (found.value->is_string()) {
    for (char letter : in.text(found)) names.emplace_back(1, letter);
  } else {
    names = in.strings(found);
  }
  std::vector<bool> shared;
  for (size_t i = 0; i < names.size(); ++i) {
    const std::string& name = names[i];
    LOCKSTEP_CHECK(name == "full" || name == "shared" || name == "F" || name == "S",
                   kConfig,
                   "{}: {}[{}] is \"{}\"; allowed: full (F), shared (S)",
                   in.origin(),
                   found.name,
                   i,
                   name);
    shared.push_back(name == "shared" || name == "S");
  }
  return shared;
}

void read_indexer_types(const Reader& in, ModelConfig& c) {
  const size_t num = c.mixers.size();
  const auto on_sparse_layers = [&](std::vector<bool> shared, std::string_view key) {
    check_length(in, key, shared.size(), c);
    shared.resize(num);
    for (size_t i = 0; i < num; ++i) shared[i] = shared[i] && c.mixers[i] == MixerKind::kDsa;
    return shared;
  };
  const bool caches = in.not_null("use_index_cache") != nullptr &&
                      in.flag({"use_index_cache", in.not_null("use_index_cache")});
  const auto types = in.find(std::array<std::string_view, 1>{"indexer_types"});
  auto pattern = in.find(std::array<std::string_view, 1>{"index_topk_pattern"});
  if (types.value != nullptr) {
    c.indexer_shared = on_sparse_layers(shared_entries(in, types), types.name);
  }
  if (pattern.value != nullptr) {
    const auto shared = on_sparse_layers(shared_entries(in, pattern), pattern.name);
    LOCKSTEP_CHECK(types.value == nullptr || shared == c.indexer_shared,
                   kConfig,
                   "{}: indexer_types is {} but index_topk_pattern is {}; make them agree on the "
                   "sparse layers, or remove one",
                   in.origin(),
                   types.value->dump(),
                   pattern.value->dump());
    if (types.value == nullptr) {
      const bool ignored = in.defaults() == ConfigDefaults::kTrainer && !caches;
      c.indexer_shared = ignored ? std::vector<bool>(num) : shared;
    }
  }
  if (types.value != nullptr || pattern.value != nullptr) return;

  const auto number = [&](std::string_view key, int64_t otherwise) {
    const auto found = in.find(std::array{key});
    return found.value != nullptr ? in.integer(found) : otherwise;
  };
  const int64_t freq = std::max<int64_t>(number("index_topk_freq", 1), 1);
  const int64_t offset = number("index_skip_topk_offset", 2);
  std::vector<bool> hf(num), trainer(num);
  for (size_t i = 0; i < num; ++i) {
    const auto layer = static_cast<int64_t>(i);
    hf[i] = std::max<int64_t>(layer - offset + 1, 0) % freq != 0;
    trainer[i] = caches && layer % freq != 0;
  }
  hf = on_sparse_layers(hf, "index_topk_freq");
  trainer = on_sparse_layers(trainer, "index_topk_freq");
  LOCKSTEP_CHECK(
      in.defaults() != ConfigDefaults::kRefuse || hf == trainer,
      kConfig,
      "{}: index_topk_freq is {} without indexer_types, and the programs share different "
      "layers then; add indexer_types (full or shared per layer), or give --defaults hf "
      "or --defaults trainer",
      in.origin(),
      freq);
  c.indexer_shared = in.defaults() == ConfigDefaults::kTrainer ? trainer : hf;
}

}  // namespace

namespace keys {

std::optional<MixerKind> mixer_of(std::string_view layer_type) {
  if (layer_type == "linear_attention" || layer_type == "mamba") return MixerKind::kKda;
  if (layer_type == "deepseek_sparse_attention" || layer_type == "indexed_attention" ||
      layer_type == "full_attention" || layer_type == "attention") {
    return MixerKind::kDsa;
  }
  return std::nullopt;
}

}  // namespace keys

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
