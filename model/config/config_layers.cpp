#include <fmt/ranges.h>

#include <set>

#include "model/config/config_keys.hpp"
#include "model/config/config_reader.hpp"

namespace lockstep::model {
namespace {

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

}  // namespace

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

}  // namespace lockstep::model
