#include "parallel/plan/footprint.hpp"

#include <fmt/format.h>

#include <array>
#include <map>
#include <string_view>

#include "model/checkpoint/parameters.hpp"
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

/// Tensors of the optimizer's state that a trained parameter has.
int64_t num_states(OptimizerKind optimizer, const ParamSpec& spec) {
  return static_cast<int64_t>(Optimizer::state_names(optimizer, spec).size());
}

void add(const model::Parameter& p,
         const model::ModelConfig& config,
         OptimizerKind optimizer,
         ModelSize& size) {
  const int64_t count = p.numel(), bytes = count * size_of(p.disk_dtype);
  size.parameters += count;
  if (p.name == "embed_tokens.weight" && !config.tie_word_embeddings) {
    size.embedding += count;
  } else {
    size.active += p.expert ? count / config.n_routed_experts * config.num_experts_per_tok : count;
  }
  size.weight_bytes += bytes;
  size.training_bytes += bytes;
  if (p.frozen || p.buffer) return;
  ParamSpec spec;
  spec.name = p.name;
  spec.shape = p.shape;
  size.training_bytes += 4 * count * (1 + num_states(optimizer, spec));
}

}  // namespace

std::vector<Footprint> footprint(const StepPlan& plan, int64_t rank) {
  validate(plan);
  std::map<std::string_view, Footprint> all;
  for (const ParamSpec& spec :
       parameter_specs(plan.config, plan.num, plan.topology, coordinates(plan.topology, rank))) {
    const CircleRanks shards =
        circle_ranks(plan.topology, spec.expert ? Circle::kExpertShard : Circle::kShard, rank);
    const int64_t elements =
        even_share(spec.shape[0], shards.size, shards.own) * product(spec.shape, 1);
    const std::string_view category = category_of(spec.name, plan.config);
    Footprint& sum = all[category];
    sum.category = category;
    sum.elements += elements;
    const int64_t computed = elements * size_of(spec.compute_dtype),
                  wide = elements * size_of(plan.num.acc()),
                  state = wide * num_states(plan.optimizer, spec);
    if (!spec.trainable) {
      sum.parameters += computed;
    } else if (plan.offload == Offload::kFull) {
      sum.parameters += computed;
      sum.host += computed + wide + state;
    } else {
      sum.parameters += wide;
      sum.gradients += wide;
      (plan.offload == Offload::kNone ? sum.optimizer : sum.host) += state;
    }
  }
  std::vector<Footprint> list;
  for (const std::string_view category : kCategories) {
    if (const auto found = all.find(category); found != all.end()) list.push_back(found->second);
  }
  return list;
}

ModelSize model_size(const model::ModelConfig& config, OptimizerKind optimizer) {
  ModelSize size;
  for (const model::Parameter& p : model::expected_parameters(config)) {
    if (config.tie_word_embeddings && p.name == "lm_head.weight") continue;
    add(p, config, optimizer, size);
  }
  return size;
}

ModelSize mtp_layer_size(const model::ModelConfig& config, OptimizerKind optimizer) {
  model::ModelConfig one = config;
  one.num_hidden_layers = 1;
  one.mixers = {model::MixerKind::kDsa};
  one.mlps = {config.mlps.back()};
  one.indexer_shared = {false};
  ModelSize size;
  for (const model::Parameter& p : model::expected_parameters(one)) {
    if (p.layer == 0 && p.name.find("_hc.") == std::string::npos) add(p, one, optimizer, size);
  }
  model::Parameter extra;
  extra.disk_dtype = at::kBFloat16;
  extra.name = "layers.0.eh_proj.weight";
  extra.shape = {one.hidden_size, 2 * one.hidden_size};
  add(extra, one, optimizer, size);
  for (const char* norm : {"enorm", "hnorm", "shared_head.norm"}) {
    extra.name = fmt::format("layers.0.{}.weight", norm);
    extra.shape = {one.hidden_size};
    add(extra, one, optimizer, size);
  }
  return size;
}

}  // namespace lockstep::parallel
