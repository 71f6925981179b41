#include "golden/compare/model_order.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <optional>

namespace lockstep::golden {
namespace {

using Part = ModelPlace::Part;
using Words = std::vector<std::string_view>;

constexpr int64_t kEmbedding = -1, kAfterLayers = std::numeric_limits<int64_t>::max();

/// Modules of a layer as they are computed, a module after its parts. Where namings differ, all of
/// them. A name belongs to the longest row that it equals or continues after a dot.
constexpr auto kLayerModules = std::to_array<std::string_view>({
    "attn_hc.fn",
    "hc_attn_fn",
    "attn_hc.base",
    "hc_attn_base",
    "attn_hc.scale",
    "hc_attn_scale",
    "attn_hc.post",
    "attn_hc.comb",
    "attn_hc.collapsed",
    "attn_hc",
    "input_layernorm",
    // KDA
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.q_conv1d",
    "self_attn.k_conv1d",
    "self_attn.v_conv1d",
    "self_attn.conv1d",
    "self_attn.b_proj",
    "self_attn.f_a_proj",
    "self_attn.forget_gate.f_a_proj",
    "self_attn.f_b_proj",
    "self_attn.forget_gate.f_b_proj",
    "self_attn.A_log",
    "self_attn.forget_gate.A_log",
    "self_attn.dt_bias",
    "self_attn.forget_gate.dt_bias",
    "self_attn.forget_gate",
    "self_attn.g_a_proj",
    "self_attn.g_b_proj",
    "self_attn.o_norm",
    // sparse attention
    "self_attn.q_a_proj",
    "self_attn.q_a_layernorm",
    "self_attn.kv_a_proj_with_mqa",
    "self_attn.kv_a_layernorm",
    "self_attn.indexer.wq_b",
    "self_attn.indexer.wk",
    "self_attn.indexer.k_norm",
    "self_attn.indexer.weights_proj",
    "self_attn.indexer.ape",
    "self_attn.indexer.index_kpool_compress_ape",
    "self_attn.indexer.gate",
    "self_attn.indexer.index_kpool_compress_gate",
    "self_attn.indexer",
    "self_attn.q_b_proj",
    "self_attn.kv_b_proj",
    // both
    "self_attn.o_proj",
    "self_attn",
    "ffn_hc.fn",
    "hc_ffn_fn",
    "ffn_hc.base",
    "hc_ffn_base",
    "ffn_hc.scale",
    "hc_ffn_scale",
    "ffn_hc.post",
    "ffn_hc.comb",
    "ffn_hc.collapsed",
    "ffn_hc",
    "post_attention_layernorm",
    "mlp.gate.weight",
    "mlp.gate.e_score_correction_bias",
    "mlp.gate.experts",
    "mlp.gate.weights",
    "mlp.gate",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "mlp.experts.gate_up_proj",
    "mlp.experts.down_proj",
    "mlp.experts",
    "mlp.shared_experts.gate_proj",
    "mlp.shared_experts.up_proj",
    "mlp.shared_experts.down_proj",
    "mlp.shared_experts",
    "mlp",
});
constexpr auto kUnknownModule = static_cast<int64_t>(kLayerModules.size());
constexpr int64_t kLayerOutput = kUnknownModule + 1;

Words words_of(std::string_view name) {
  Words words;
  while (true) {
    const size_t end = name.find_first_of("./:");
    words.push_back(name.substr(0, end));
    if (end == std::string_view::npos) return words;
    name.remove_prefix(end + 1);
  }
}

std::optional<int64_t> whole_number(std::string_view word) {
  int64_t value = 0;
  const char* end = word.data() + word.size();
  const auto [stop, error] = std::from_chars(word.data(), end, value);
  if (word.empty() || error != std::errc() || stop != end || value < 0) return std::nullopt;
  return value;
}

std::string joined(const Words& words, size_t first) {
  std::string text;
  for (size_t i = first; i < words.size(); ++i) {
    if (i > first) text += '.';
    text += words[i];
  }
  return text;
}

int64_t module_of(const std::string& rest) {
  if (rest.empty()) return kLayerOutput;
  int64_t found = kUnknownModule;
  size_t longest = 0;
  for (size_t i = 0; i < kLayerModules.size(); ++i) {
    const std::string_view row = kLayerModules[i];
    const bool fits =
        rest.starts_with(row) && (rest.size() == row.size() || rest[row.size()] == '.');
    if (fits && row.size() > longest) {
      longest = row.size();
      found = static_cast<int64_t>(i);
    }
  }
  return found;
}

bool has(const Words& words, std::string_view word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

/// Place of a tensor outside the layers by the last word that says something.
void place_outside(const Words& words, ModelPlace& place) {
  struct Known {
    std::string_view word;
    Part part;
    int64_t layer, module;
  };
  static constexpr auto kKnown = std::to_array<Known>({
      {"ids", Part::kInput, 0, 0},
      {"input_ids", Part::kInput, 0, 0},
      {"cu_seqlens", Part::kInput, 0, 1},
      {"embed_tokens", Part::kForward, kEmbedding, 0},
      {"norm", Part::kForward, kAfterLayers, 0},
      {"lm_head", Part::kForward, kAfterLayers, 1},
      {"logits", Part::kForward, kAfterLayers, 2},
      {"logprobs", Part::kResult, 0, 0},
      {"loss", Part::kResult, 0, 1},
  });
  const std::string_view last =
      words.size() > 1 && words.back() == "weight" ? words[words.size() - 2] : words.back();
  for (const Known& known : kKnown) {
    if (known.word != last) continue;
    place.part = known.part;
    place.layer = known.layer;
    place.module = known.module;
  }
}

/// Natural order: runs of digits count as numbers.
std::strong_ordering natural(std::string_view a, std::string_view b) {
  const auto digit = [](char c) { return c >= '0' && c <= '9'; };
  size_t i = 0, j = 0;
  while (i < a.size() && j < b.size()) {
    if (digit(a[i]) && digit(b[j])) {
      const auto run = [&](std::string_view text, size_t& at) {
        while (at < text.size() && text[at] == '0') ++at;
        const size_t first = at;
        while (at < text.size() && digit(text[at])) ++at;
        return text.substr(first, at - first);
      };
      const std::string_view left = run(a, i), right = run(b, j);
      if (left.size() != right.size()) return left.size() <=> right.size();
      if (const auto order = left <=> right; order != 0) return order;
      continue;
    }
    if (a[i] != b[j]) return a[i] <=> b[j];
    ++i, ++j;
  }
  if (const auto order = (a.size() - i) <=> (b.size() - j); order != 0) return order;
  return a <=> b;
}

}  // namespace

std::strong_ordering ModelPlace::operator<=>(const ModelPlace& other) const {
  if (const auto order = part <=> other.part; order != 0) return order;
  if (const auto order = layer <=> other.layer; order != 0) return order;
  if (const auto order = module <=> other.module; order != 0) return order;
  return natural(name, other.name);
}

ModelPlace model_place(std::string_view name) {
  ModelPlace place;
  place.name = name;
  const Words words = words_of(name);
  if (has(words, "visual")) return place;
  size_t layers = 0;
  while (layers + 1 < words.size() &&
         !(words[layers] == "layers" && whole_number(words[layers + 1]))) {
    ++layers;
  }
  if (layers + 1 < words.size()) {
    place.part = Part::kForward;
    place.layer = *whole_number(words[layers + 1]);
    place.module = module_of(joined(words, layers + 2));
  } else {
    place_outside(words, place);
  }
  if (place.part == Part::kForward && (has(words, "grads") || has(words, "grad"))) {
    place.part = Part::kGradient;
    place.layer = -place.layer;
    place.module = -place.module;
  }
  return place;
}

std::vector<std::string> in_model_order(const std::vector<std::string>& names) {
  std::vector<ModelPlace> places;
  places.reserve(names.size());
  for (const std::string& name : names) places.push_back(model_place(name));
  std::sort(places.begin(), places.end());
  std::vector<std::string> sorted;
  sorted.reserve(names.size());
  for (ModelPlace& place : places) sorted.push_back(std::move(place.name));
  return sorted;
}

}  // namespace lockstep::golden
