#include "harness/inference/weights.hpp"

#include <fmt/ranges.h>

#include <algorithm>

#include "model/layers/parameter_policy.hpp"
#include "model/ops/fp8_linear.hpp"

namespace lockstep::harness {
namespace {

using model::Switch;

constexpr int64_t kHeadBlock = 128;  // rows of the head that are widened at a time

/// Flat bytes of a contiguous CPU tensor.
void add_bytes(ByteDigest& digest, const Tensor& tensor) {
  digest.add(tensor.const_data_ptr(), tensor.nbytes());
}

int64_t product(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return count;
}

}  // namespace

parallel::Placement engine_placement(const model::ModelConfig& config,
                                     const model::Numerics& num,
                                     const model::Topology& topology,
                                     const parallel::Coordinates& place,
                                     const model::Parameter& parameter) {
  parallel::Placement placed = parallel::place_parameter(config, num, topology, place, parameter);
  if (topology.tp > 1 &&
      (parameter.name == "embed_tokens.weight" || parameter.name == "lm_head.weight")) {
    const Vocabulary vocabulary = Vocabulary::of(config, num, topology.tp, place.tp);
    placed.slice = {0, {{vocabulary.begin(), vocabulary.end()}}};
  }
  return placed;
}

EngineWeights::EngineWeights(const std::shared_ptr<const model::WeightSource>& source,
                             const model::Numerics& num,
                             const parallel::Mesh& mesh)
    : config_(source->config()),
      num_(num),
      mesh_(mesh),
      vocabulary_(Vocabulary::of(config_, num, mesh.topology().tp, mesh.place().tp)) {
  for (const model::Parameter& parameter : model::expected_parameters(config_)) {
    Incoming in;
    in.shape = engine_placement(config_, num_, mesh_.topology(), mesh_.place(), parameter).shape();
    in.dtype = model::parameter_dtype(parameter.name, num_);
    in.elements = product(in.shape);
    incoming_.emplace(parameter.name, std::move(in));
  }
  const auto plain = [&](const std::string& name, const std::string& from) {
    add({.name = name, .sources = {from}, .derivation = from});
  };
  plain("embed_tokens", "embed_tokens.weight");
  for (int64_t layer = 0; layer < config_.num_hidden_layers; ++layer) add_layer(layer);
  plain("norm", "norm.weight");
  const std::string head = config_.tie_word_embeddings ? "embed_tokens.weight" : "lm_head.weight";
  if (incoming_.at(head).dtype != num_.acc() && num_.is<Switch::kHeadOutput>("fp32")) {
    add({.name = "lm_head",
         .sources = {head},
         .derivation = fmt::format("{}, widened", head),
         .derived = true,
         .derive = [acc = num_.acc()](const std::vector<Tensor>& in) { return in[0].to(acc); },
         .block = kHeadBlock,
         .value = at::empty(incoming_.at(head).shape, at::TensorOptions(num_.acc()))});
  } else {
    plain("lm_head", head);
  }
  std::erase_if(incoming_, [](const auto& entry) { return entry.second.consumers.empty(); });
  begin_update(version_);
  load(source);
  commit_update();
  unchecked_ = false;  // nothing was there before
}

void EngineWeights::add_layer(int64_t layer) {
  const model::ModelConfig& config = config_;
  const auto l = static_cast<size_t>(layer);
  const std::string prefix = fmt::format("layers.{}.", layer);
  const auto plain = [&](const std::string& name, const std::string& from) {
    add({.name = prefix + name, .sources = {prefix + from}, .derivation = from});
  };
  const auto merged = [&](const std::string& name, const std::vector<std::string>& from) {
    EngineTensor tensor{.name = prefix + name,
                        .derivation = fmt::format("rows of {}", fmt::join(from, ", "))};
    for (const std::string& source : from) tensor.sources.push_back(prefix + source);
    add(std::move(tensor));
  };
  const auto derived = [&](const std::string& name,
                           const std::string& from,
                           const std::string& how,
                           int64_t block,
                           std::function<Tensor(const Tensor&)> derive) {
    add({.name = prefix + name,
         .sources = {prefix + from},
         .derivation = how,
         .derived = true,
         .derive = [derive =
                        std::move(derive)](const std::vector<Tensor>& in) { return derive(in[0]); },
         .block = block});
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
    add({.name = prefix + "self_attn.conv1d",
         .sources = {prefix + "self_attn.conv1d.weight"},
         .derivation = "rows of the q, k and v convolutions",
         .derived = true});
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
              d_n + d_v,
              [by_head, d_n](const Tensor& kv_b) { return by_head(kv_b).narrow(1, 0, d_n); });
      derived("self_attn.w_v",
              "self_attn.kv_b_proj.weight",
              "value rows of kv_b_proj by head, transposed",
              d_n + d_v,
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
                0,
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
      // One expert, or the rows of a block.
      if (from.size() == 1)
        tensor.block = name.find(".experts.") != std::string::npos ? 1 : model::kFp8Block;
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
  for (size_t s = 0; s < tensor.sources.size(); ++s) {
    const auto found = incoming_.find(tensor.sources[s]);
    LOCKSTEP_CHECK(found != incoming_.end(),
                   kInternal,
                   "{}: the model has no {}",
                   tensor.name,
                   tensor.sources[s]);
    found->second.consumers.emplace_back(tensors_.size(), s);
  }
  if (!tensor.derive) {
    std::vector<int64_t> shape = incoming_.at(tensor.sources[0]).shape;
    shape[0] = 0;
    for (const std::string& source : tensor.sources) shape[0] += incoming_.at(source).shape[0];
    tensor.value = at::empty(shape, at::TensorOptions(incoming_.at(tensor.sources[0]).dtype));
  }
  index_.emplace(tensor.name, tensors_.size());
  tensors_.push_back(std::move(tensor));
  progress_.emplace_back();
}

std::vector<int64_t> EngineWeights::source_elements(const EngineTensor& tensor) const {
  std::vector<int64_t> elements;
  for (const std::string& source : tensor.sources)
    elements.push_back(incoming_.at(source).elements);
  return elements;
}

void EngineWeights::load(const std::shared_ptr<const model::WeightSource>& source) {
  const FiniteSource finite(source, &non_finite_);
  for (const model::Parameter& parameter : model::expected_parameters(config_)) {
    const auto found = incoming_.find(parameter.name);
    if (found == incoming_.end()) continue;
    const parallel::Placement placed =
        engine_placement(config_, num_, mesh_.topology(), mesh_.place(), parameter);
    const Tensor whole = finite.load(parameter.name);
    check_shape(whole, parameter.shape, parameter.name);
    place(parameter.name, 0, placed.of(whole).to(found->second.dtype).reshape({-1}));
    finite.release(parameter.name);
  }
}

const Tensor& EngineWeights::at(std::string_view name) const {
  const auto found = index_.find(name);
  LOCKSTEP_CHECK(found != index_.end(), kInternal, "inference: no weight {}", name);
  return tensors_[found->second].value;
}

bool EngineWeights::shipped_stale(const std::string& name) const {
  return (num_.is<Switch::kMergedConv>("stale") && name.ends_with(".conv1d")) ||
         (num_.is<Switch::kDerivedWeights>("stale") && name.ends_with(".head_weights"));
}

void EngineWeights::update(const std::shared_ptr<const model::WeightSource>& source,
                           const std::set<std::string>& keep) {
  begin_update(version_ + 1, keep);
  load(source);
  commit_update();
}

void EngineWeights::begin_update(int64_t version, const std::set<std::string>& keep) {
  torn_ = true;
  next_version_ = version;
  non_finite_ = {};
  staged_ = peak_staged_ = 0;
  for (auto& [name, in] : incoming_) in.arrived = 0;
  const bool first = version == version_;
  for (size_t t = 0; t < tensors_.size(); ++t) {
    const EngineTensor& tensor = tensors_[t];
    Progress fresh;
    fresh.digests.resize(tensor.derive ? 1 : tensor.sources.size());
    fresh.staged.resize(tensor.sources.size());
    fresh.filled.assign(tensor.sources.size(), 0);
    fresh.kept = !first && (keep.contains(tensor.name) || shipped_stale(tensor.name));
    progress_[t] = std::move(fresh);
  }
}

void EngineWeights::put(const std::string& parameter, int64_t first, const Tensor& flat) {
  non_finite_.look(parameter, flat);
  place(parameter, first, flat);
}

void EngineWeights::place(const std::string& parameter, int64_t first, const Tensor& flat) {
  const at::NoGradGuard no_grad;
  const auto found = incoming_.find(parameter);
  LOCKSTEP_CHECK(found != incoming_.end(), kInternal, "weights: the engine takes no {}", parameter);
  Incoming& in = found->second;
  LOCKSTEP_CHECK(torn_ && first == in.arrived && first + flat.numel() <= in.elements,
                 kInternal,
                 "weights: elements {} to {} of {} came after {} of {}",
                 first,
                 first + flat.numel(),
                 parameter,
                 in.arrived,
                 in.elements);
  in.arrived += flat.numel();
  if (flat.numel() == 0) return;
  const Tensor values = flat.to(in.dtype).contiguous();
  for (const auto& [t, s] : in.consumers) {
    EngineTensor& tensor = tensors_[t];
    if (tensor.derive) {
      stage(t, s, values);
      continue;
    }
    Progress& progress = progress_[t];
    add_bytes(progress.digests[s], values);
    if (progress.kept) continue;
    const std::vector<int64_t> elements = source_elements(tensor);
    int64_t at = first;
    for (size_t before = 0; before < s; ++before) at += elements[before];
    tensor.value.view({-1}).narrow(0, at, values.numel()).copy_(values);
  }
}

/// Puts values of a source where the next block is collected, and derives blocks that are complete.
void EngineWeights::stage(size_t t, size_t s, const Tensor& values) {
  const EngineTensor& tensor = tensors_[t];
  Progress& progress = progress_[t];
  const Incoming& in = incoming_.at(tensor.sources[s]);
  const int64_t rows = in.shape[0], row = in.elements / rows;
  for (int64_t done = 0; done < values.numel();) {
    const int64_t want =
        tensor.block == 0 ? in.elements : std::min(tensor.block, rows - progress.rows_in) * row;
    Tensor& staged = progress.staged[s];
    if (!staged.defined()) {
      staged = at::empty({want}, values.options());
      staged_ += static_cast<int64_t>(staged.nbytes());
      peak_staged_ = std::max(peak_staged_, staged_);
    }
    const int64_t count = std::min(want - progress.filled[s], values.numel() - done);
    staged.narrow(0, progress.filled[s], count).copy_(values.narrow(0, done, count));
    progress.filled[s] += count;
    done += count;
    if (progress.filled[s] < want) continue;
    if (tensor.block > 0 || progress.filled == source_elements(tensor)) derive(t);
  }
}

/// The next rows of the value, from what is staged.
void EngineWeights::derive(size_t t) {
  EngineTensor& tensor = tensors_[t];
  Progress& progress = progress_[t];
  std::vector<Tensor> sources;
  int64_t rows = 0;  // of the first source, here and in all
  for (size_t s = 0; s < tensor.sources.size(); ++s) {
    std::vector<int64_t> shape = incoming_.at(tensor.sources[s]).shape;
    const int64_t all = shape[0];
    shape[0] = progress.filled[s] / (incoming_.at(tensor.sources[s]).elements / all);
    if (s == 0) rows = shape[0];
    sources.push_back(progress.staged[s].view(shape));
  }
  const Tensor value = tensor.derive(sources).contiguous();
  if (!tensor.value.defined()) {
    std::vector<int64_t> shape = value.sizes().vec();
    const int64_t all = incoming_.at(tensor.sources[0]).shape[0];
    shape[0] = (shape[0] * all + rows - 1) / rows;
    tensor.value = at::empty(shape, value.options());
  }
  add_bytes(progress.digests[0], value);
  if (!progress.kept) tensor.value.narrow(0, progress.rows_out, value.size(0)).copy_(value);
  progress.rows_in += rows;
  progress.rows_out += value.size(0);
  for (size_t s = 0; s < tensor.sources.size(); ++s) {
    staged_ -= static_cast<int64_t>(progress.staged[s].nbytes());
    progress.staged[s] = Tensor();
    if (tensor.block > 0) progress.filled[s] = 0;
  }
}

void EngineWeights::commit_update() {
  for (const auto& [name, in] : incoming_) {
    LOCKSTEP_CHECK(in.arrived == in.elements,
                   kInternal,
                   "weights: {} of {} elements of {} came",
                   in.arrived,
                   in.elements,
                   name);
  }
  version_ = next_version_;
  for (size_t t = 0; t < tensors_.size(); ++t)
    if (!progress_[t].kept) tensors_[t].version = version_;
  torn_ = false;
  unchecked_ = true;
}

std::vector<std::string> EngineWeights::stale() const {
  std::vector<std::string> names;
  for (size_t t = 0; t < tensors_.size(); ++t) {
    const EngineTensor& tensor = tensors_[t];
    // Rows of direct sources follow each other and are digested apart.
    const std::vector<int64_t> elements =
        tensor.derive ? std::vector<int64_t>{tensor.value.numel()} : source_elements(tensor);
    const Tensor flat = tensor.value.view({-1});
    bool same = true;
    int64_t at = 0;
    for (size_t part = 0; part < elements.size(); at += elements[part++]) {
      ByteDigest digest;
      add_bytes(digest, flat.narrow(0, at, elements[part]));
      same = same && digest.value() == progress_[t].digests[part].value();
    }
    if (!same) names.push_back(tensor.name);
  }
  return names;
}

std::string EngineWeights::fault() const {
  if (torn_)
    return fmt::format("an update to version {} was not finished; sync again from the start",
                       next_version_);
  std::vector<std::string> lines;
  for (const std::string& name : stale()) {
    if (shipped_stale(name)) continue;
    const EngineTensor& tensor = tensors_[index_.at(name)];
    lines.push_back(
        fmt::format("{} ({}) is not what version {} makes of it; it was last made of "
                    "version {}",
                    name,
                    tensor.derivation,
                    version_,
                    tensor.version));
  }
  return fmt::format("{}", fmt::join(lines, "; "));
}

void EngineWeights::check() {
  if (!torn_ && !unchecked_) return;
  const std::string own = fault();
  // Every rank of the engine is torn when one is, and some may be gone.
  LOCKSTEP_CHECK(!torn_, kInternal, "weights of rank {}: {}", mesh_.all().rank(), own);
  const std::vector<int64_t> all =
      mesh_.all().all_gather(own.empty() ? 0 : 1, "weights after an update");
  for (size_t r = 0; r < all.size(); ++r) {
    LOCKSTEP_CHECK(own.empty(), kInternal, "weights of rank {}: {}", mesh_.all().rank(), own);
    LOCKSTEP_CHECK(all[r] == 0, kInternal, "weights of rank {} are stale; see its message", r);
  }
  unchecked_ = false;
}

}  // namespace lockstep::harness
