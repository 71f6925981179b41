#include "harness/inference/weights.hpp"

#include <fmt/ranges.h>

#include "model/base/same_bytes.hpp"
#include "model/layers/parameter_policy.hpp"
#include "model/ops/fp8_linear.hpp"
#include "parallel/plan/placement.hpp"

namespace lockstep::harness {
namespace {

using model::Switch;

}  // namespace

EngineWeights::EngineWeights(std::shared_ptr<const model::WeightSource> source,
                             const model::Numerics& num,
                             const parallel::Mesh& mesh)
    : num_(num),
      mesh_(mesh),
      source_(std::make_shared<FiniteSource>(std::move(source), &non_finite_)) {
  const model::ModelConfig& config = source_->config();
  for (model::Parameter& parameter : model::expected_parameters(config))
    parameters_.emplace(parameter.name, parameter);
  const auto plain = [&](const std::string& name, const std::string& from) {
    add({.name = name,
         .sources = {from},
         .derivation = from,
         .derive = [](const std::vector<Tensor>& in) { return in[0]; }});
  };
  plain("embed_tokens", "embed_tokens.weight");
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) add_layer(layer);
  plain("norm", "norm.weight");
  plain("lm_head", config.tie_word_embeddings ? "embed_tokens.weight" : "lm_head.weight");
}

void EngineWeights::add_layer(int64_t layer) {
  const model::ModelConfig& config = source_->config();
  const auto l = static_cast<size_t>(layer);
  const std::string prefix = fmt::format("layers.{}.", layer);
  const auto plain = [&](const std::string& name, const std::string& from) {
    add({.name = prefix + name,
         .sources = {prefix + from},
         .derivation = from,
         .derive = [](const std::vector<Tensor>& in) { return in[0]; }});
  };
  const auto merged = [&](const std::string& name, const std::vector<std::string>& from) {
    EngineTensor tensor{.name = prefix + name,
                        .derivation = fmt::format("rows of {}", fmt::join(from, ", ")),
                        .derive = [](const std::vector<Tensor>& in) { return at::cat(in); }};
    for (const std::string& source : from) tensor.sources.push_back(prefix + source);
    add(std::move(tensor));
  };
  const auto derived = [&](const std::string& name,
                           const std::string& from,
                           const std::string& how,
                           std::function<Tensor(const Tensor&)> derive) {
    add({.name = prefix + name,
         .sources = {prefix + from},
         .derivation = how,
         .derived = true,
         .derive = [derive = std::move(derive)](const std::vector<Tensor>& in) {
           return derive(in[0]);
         }});
  };

  for (const char* hc : {"attn_hc", "ffn_hc"}) {
    for (const char* part : {".fn", ".base", ".scale"})
      plain(std::string(hc) + part, std::string(hc) + part);
  }
  plain("input_layernorm", "input_layernorm.weight");
  plain("post_attention_layernorm", "post_attention_layernorm.weight");

  if (config.mixers[l] == model::MixerKind::kKda) {
    merged("self_attn.in_proj_qkvbfg_a",
           {"self_attn.q_proj.weight",
            "self_attn.k_proj.weight",
            "self_attn.v_proj.weight",
            "self_attn.b_proj.weight",
            "self_attn.f_a_proj.weight",
            "self_attn.g_a_proj.weight"});
    derived("self_attn.conv1d",
            "self_attn.conv1d.weight",
            "rows of the q, k and v convolutions",
            [](const Tensor& conv) { return conv; });
    for (const char* name : {"f_b_proj", "g_b_proj", "o_proj", "o_norm"})
      plain(fmt::format("self_attn.{}", name), fmt::format("self_attn.{}.weight", name));
    plain("self_attn.A_log", "self_attn.A_log");
    plain("self_attn.dt_bias", "self_attn.dt_bias");
  } else {
    merged("self_attn.fused_qkv_a",
           {"self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"});
    for (const char* name : {"q_a_layernorm", "kv_a_layernorm", "q_b_proj", "o_proj"})
      plain(fmt::format("self_attn.{}", name), fmt::format("self_attn.{}.weight", name));
    const int64_t d_n = config.qk_nope_head_dim, d_v = config.v_head_dim;
    const auto by_head = [d_n, d_v](const Tensor& kv_b) {
      return kv_b.view({-1, d_n + d_v, kv_b.size(1)});
    };
    if (num_.is<Switch::kMlaForm>("expanded")) {
      plain("self_attn.kv_b_proj", "self_attn.kv_b_proj.weight");
    } else {
      derived("self_attn.w_k",
              "self_attn.kv_b_proj.weight",
              "key rows of kv_b_proj by head",
              [by_head, d_n](const Tensor& kv_b) { return by_head(kv_b).narrow(1, 0, d_n); });
      derived("self_attn.w_v",
              "self_attn.kv_b_proj.weight",
              "value rows of kv_b_proj by head, transposed",
              [by_head, d_n, d_v](const Tensor& kv_b) {
                return by_head(kv_b).narrow(1, d_n, d_v).transpose(1, 2);
              });
    }
    if (!config.indexer_shared[l]) {
      merged("self_attn.indexer.wk_weights_proj",
             {"self_attn.indexer.wk.weight", "self_attn.indexer.weights_proj.weight"});
      if (num_.is<Switch::kIndexerHeadWeights>("fp32")) {
        derived("self_attn.indexer.head_weights",
                "self_attn.indexer.weights_proj.weight",
                "last rows of wk_weights_proj, widened",
                [acc = num_.acc()](const Tensor& rows) { return rows.to(acc); });
      }
      for (const char* name : {"wq_b", "gate"}) {
        plain(fmt::format("self_attn.indexer.{}", name),
              fmt::format("self_attn.indexer.{}.weight", name));
      }
      plain("self_attn.indexer.k_norm.weight", "self_attn.indexer.k_norm.weight");
      plain("self_attn.indexer.k_norm.bias", "self_attn.indexer.k_norm.bias");
      plain("self_attn.indexer.ape", "self_attn.indexer.ape");
    }
  }

  // Weights of experts and MLPs: as they are, or (D57) as FP8 codes and block scales.
  const auto product = [&](const std::string& name, const std::vector<std::string>& from) {
    if (!num_.rounds<Switch::kExpertGemm>("fp8")) {
      from.size() == 1 ? plain(name, from[0]) : merged(name, from);
      return;
    }
    for (const bool codes : {true, false}) {
      EngineTensor tensor{
          .name = prefix + name + (codes ? ".bytes" : ".scale"),
          .derivation = fmt::format(
              "FP8 {} of blocks of {}", codes ? "codes" : "scales", fmt::join(from, ", ")),
          .derived = true,
          .derive = [codes](const std::vector<Tensor>& in) {
            const model::Fp8Blocks blocks =
                model::quantise_blocks(in.size() == 1 ? in[0] : at::cat(in));
            return codes ? blocks.bytes : blocks.scale;
          }};
      for (const std::string& source : from) tensor.sources.push_back(prefix + source);
      add(std::move(tensor));
    }
  };
  const auto gate_up = [&](const std::string& mlp) {
    product(mlp + ".gate_up_proj", {mlp + ".gate_proj.weight", mlp + ".up_proj.weight"});
    product(mlp + ".down_proj", {mlp + ".down_proj.weight"});
  };
  if (config.mlps[l] == model::MlpKind::kMoe) {
    plain("mlp.gate", "mlp.gate.weight");
    plain("mlp.gate.e_score_correction_bias", "mlp.gate.e_score_correction_bias");
    product("mlp.experts.w13", {"mlp.experts.gate_up_proj"});
    product("mlp.experts.w2", {"mlp.experts.down_proj"});
    if (config.n_shared_experts > 0) gate_up("mlp.shared_experts");
  } else {
    gate_up("mlp");
  }
}

void EngineWeights::add(EngineTensor tensor) {
  const Tensor value = made(tensor);
  // Its own storage: an update writes into it.
  tensor.value = at::empty(value.sizes(), value.options()).copy_(value);
  tensor.version = version_;
  index_.emplace(tensor.name, tensors_.size());
  tensors_.push_back(std::move(tensor));
}

Tensor EngineWeights::made(const EngineTensor& tensor) const {
  std::vector<Tensor> sources;
  for (const std::string& name : tensor.sources) {
    const auto found = parameters_.find(name);
    LOCKSTEP_CHECK(
        found != parameters_.end(), kInternal, "{}: the model has no {}", tensor.name, name);
    const parallel::Placement placed = parallel::place_parameter(
        source_->config(), num_, mesh_.topology(), mesh_.place(), found->second);
    sources.push_back(
        placed.of(source_->load(name)).to(model::parameter_dtype(name, num_)).contiguous());
  }
  Tensor value = tensor.derive(sources).contiguous();
  for (const std::string& name : tensor.sources) source_->release(name);
  return value;
}

const Tensor& EngineWeights::at(std::string_view name) const {
  const auto found = index_.find(name);
  LOCKSTEP_CHECK(found != index_.end(), kInternal, "inference: no weight {}", name);
  return tensors_[found->second].value;
}

void EngineWeights::update(std::shared_ptr<const model::WeightSource> source,
                           const std::set<std::string>& keep) {
  non_finite_ = {};
  source_ = std::make_shared<FiniteSource>(std::move(source), &non_finite_);
  ++version_;
  const auto shipped_stale = [&](const std::string& name) {
    return (num_.is<Switch::kMergedConv>("stale") && name.ends_with(".conv1d")) ||
           (num_.is<Switch::kDerivedWeights>("stale") && name.ends_with(".head_weights"));
  };
  for (EngineTensor& tensor : tensors_) {
    if (keep.contains(tensor.name) || shipped_stale(tensor.name)) continue;
    const Tensor value = made(tensor);
    check_shape(value, tensor.value.sizes(), tensor.name);
    tensor.value.copy_(value);
    tensor.version = version_;
  }
}

std::vector<std::string> EngineWeights::stale() const {
  std::vector<std::string> names;
  for (const EngineTensor& tensor : tensors_)
    if (!same_bytes(tensor.value, made(tensor))) names.push_back(tensor.name);
  return names;
}

}  // namespace lockstep::harness
