#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "model/base/error.hpp"
#include "model/config/config_json.hpp"
#include "model/config/config_keys.hpp"
#include "model/config/config_members.hpp"

namespace lockstep::model {
namespace {

using nlohmann::json;

constexpr std::string_view kOrigin = "model overrides";

/// The text keys of an exported config and its linear_attn_config, while they are being changed.
struct Edit {
  Members text, dict, changes;

  [[nodiscard]] bool changed(std::string_view key) const {
    return std::any_of(
        changes.begin(), changes.end(), [&](const RawMember& m) { return m.key == key; });
  }
};

/// Another name of a changed key must not go on saying the old value.
void drop_other_names(Edit& edit) {
  const auto drop = [&](std::string_view key, std::string_view because) {
    if (!edit.changed(because) || edit.changed(key)) return;
    const size_t dot = key.find('.');
    if (dot == std::string_view::npos) {
      erase_member(edit.text, key);
    } else {
      erase_member(edit.dict, key.substr(dot + 1));
    }
  };
  keys::for_each_alias_pair([&](std::string_view first, std::string_view second) {
    drop(first, second);
    drop(second, first);
  });
  drop("num_key_value_heads", "num_attention_heads");
  for (const RawMember& change : edit.changes) {
    if (change.key != "linear_lower_bound") continue;
    // A dict without "safe_gate": false turns a null bound into -5.
    erase_member(edit.dict, "safe_gate");
    if (change.value == "null") set_member(edit.dict, "safe_gate", false);
  }
  if (edit.changed("num_hidden_layers") || edit.changed("layer_types")) {
    erase_member(edit.dict, "kda_layers");
    erase_member(edit.dict, "full_attn_layers");
    erase_member(edit.text, "index_topk_pattern");
  }
}

/// Shortens or extends the lists with one entry per layer.
void fit_layer_lists(Edit& edit) {
  constexpr size_t kMostLayers = 4096;  // a bound on work only; validate() judges the value
  const json depth = json::parse(find_member(edit.text, "num_hidden_layers")->value);
  if (!depth.is_number_unsigned()) return;
  const size_t num = std::min(depth.get<size_t>(), kMostLayers);
  const auto fit = [&](std::string_view key, auto&& entry) {
    if (edit.changed(key)) return;
    const RawMember* member = find_member(edit.text, key);
    if (member == nullptr) return;
    json list = json::parse(member->value);
    while (list.size() > num) list.erase(list.size() - 1);
    while (list.size() < num) list.push_back(entry(list.size()));
    set_member(edit.text, key, list);
  };
  fit("layer_types",
      [](size_t i) { return i % 4 == 3 ? "deepseek_sparse_attention" : "linear_attention"; });
  fit("mlp_layer_types", [](size_t) { return "sparse"; });
  fit("indexer_types", [](size_t) { return "full"; });
}

}  // namespace

ModelConfig with_overrides(const ModelConfig& config, std::string_view json_object) {
  check_json(json_object, kOrigin);
  Members root = raw_members(export_config(config), kOrigin);
  const RawMember* inner = config.composite ? find_member(root, "text_config") : nullptr;
  const bool nested = inner != nullptr;
  Edit edit;
  edit.changes = raw_members(json_object, kOrigin);
  edit.text = nested ? raw_members(inner->value, kOrigin) : root;
  edit.dict = raw_members(find_member(edit.text, "linear_attn_config")->value, kOrigin);

  std::set<std::string> known = {"index_topk_pattern",
                                 "index_topk_freq",
                                 "index_skip_topk_offset",
                                 "use_index_cache",
                                 "num_nextn_predict_layers"};
  for (const RawMember& member : edit.text) known.insert(member.key);
  for (const RawMember& change : edit.changes) {
    LOCKSTEP_CHECK(known.contains(change.key),
                   kConfig,
                   "{}: unknown key \"{}\"; known: {}",
                   kOrigin,
                   change.key,
                   fmt::join(known, ", "));
  }

  if (edit.changed("index_topk_pattern") || edit.changed("index_topk_freq")) {
    if (!edit.changed("indexer_types")) erase_member(edit.text, "indexer_types");
  }
  if (edit.changed("first_k_dense_replace") && !edit.changed("mlp_layer_types")) {
    erase_member(edit.text, "mlp_layer_types");
  }
  drop_other_names(edit);
  for (const RawMember& change : edit.changes) {
    set_member(edit.text, change.key, json::parse(change.value));
  }
  if (edit.changed("num_hidden_layers")) fit_layer_lists(edit);
  if (!edit.changed("linear_attn_config")) {
    set_member(edit.text, "linear_attn_config", json::parse(join_members(edit.dict, 2)));
  }
  if (nested) {
    find_member(root, "text_config")->value = join_members(edit.text, 4);
    set_member(root,
               "tie_word_embeddings",
               json::parse(find_member(edit.text, "tie_word_embeddings")->value));
  } else {
    root = std::move(edit.text);
  }
  return parse_config(join_members(root, 2), ConfigDefaults::kRefuse, kOrigin);
}

}  // namespace lockstep::model
