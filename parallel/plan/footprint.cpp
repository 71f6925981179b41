#include "parallel/plan/footprint.hpp"

#include <array>
#include <map>
#include <string_view>

#include "parallel/plan/placement.hpp"

namespace lockstep::parallel {
namespace {

constexpr std::array<std::string_view, 9> kCategories = {"embedding and head",
                                                         "kda",
                                                         "sparse attention",
                                                         "indexer",
                                                         "experts",
                                                         "router",
                                                         "mlp",
                                                         "hyper-connections",
                                                         "norms"};

std::string_view category_of(const std::string& name, const model::ModelConfig& config) {
  const auto has = [&](std::string_view part) { return name.find(part) != std::string::npos; };
  if (has("embed_tokens") || has("lm_head")) return "embedding and head";
  if (has("_hc.")) return "hyper-connections";
  if (has("indexer.")) return "indexer";
  if (has("self_attn.")) {
    const size_t layer = std::stoul(name.substr(std::string_view("layers.").size()));
    return config.mixers[layer] == model::MixerKind::kKda ? "kda" : "sparse attention";
  }
  if (has("mlp.experts.")) return "experts";
  if (has("mlp.gate.")) return "router";
  return has("mlp.") ? "mlp" : "norms";
}

int64_t product(const std::vector<int64_t>& shape, size_t from) {
  int64_t count = 1;
  for (size_t d = from; d < shape.size(); ++d) count *= shape[d];
  return count;
}

int64_t size_of(at::ScalarType dtype) { return static_cast<int64_t>(c10::elementSize(dtype)); }

}  // namespace

std::vector<Footprint> footprint(const model::ModelConfig& config,
                                 const model::Numerics& num,
                                 const model::Topology& topology,
                                 int64_t rank) {
  std::map<std::string_view, Footprint> all;
  for (const ParamSpec& spec :
       parameter_specs(config, num, topology, coordinates(topology, rank))) {
    const CircleRanks shards =
        circle_ranks(topology, spec.expert ? Circle::kExpertShard : Circle::kShard, rank);
    const int64_t elements =
        even_share(spec.shape[0], shards.size, shards.own) * product(spec.shape, 1);
    const std::string_view category = category_of(spec.name, config);
    Footprint& sum = all[category];
    sum.category = category;
    sum.elements += elements;
    const int64_t wide = elements * size_of(num.acc());
    sum.parameters += spec.trainable ? wide : elements * size_of(spec.compute_dtype);
    if (!spec.trainable) continue;
    sum.gradients += wide;
    sum.optimizer += 2 * wide;
  }
  std::vector<Footprint> list;
  for (const std::string_view category : kCategories) {
    if (const auto found = all.find(category); found != all.end()) list.push_back(found->second);
  }
  return list;
}

}  // namespace lockstep::parallel
