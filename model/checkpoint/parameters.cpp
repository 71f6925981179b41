#include "model/checkpoint/parameters.hpp"

namespace lockstep::model {
namespace {

using Shape = std::vector<int64_t>;

int64_t product(const Shape& shape) {
  int64_t count = 1;
  for (int64_t size : shape) count *= size;
  return count;
}

/// Builds the list. Names are relative to the layer whose prefix is set.
class Builder {
 public:
  explicit Builder(const ModelConfig& c) : c_(c) {}

  void start_layer(int64_t layer) {
    layer_ = layer;
    prefix_ = layer < 0 ? "" : fmt::format("layers.{}.", layer);
  }

  /// A parameter of one tensor in all namings, under its internal name.
  Parameter& add(const std::string& name, Shape shape, at::ScalarType dtype = at::kBFloat16) {
    return add(name, std::move(shape), dtype, name, name);
  }
  /// A parameter of one tensor with other names on disk.
  Parameter& add(const std::string& name,
                 Shape shape,
                 at::ScalarType dtype,
                 const std::string& released,
                 const std::string& transformers) {
    Parameter& p = list_.emplace_back();
    p.name = prefix_ + name;
    p.shape = std::move(shape);
    p.disk_dtype = dtype;
    p.layer = layer_;
    p.parts = {{{{prefix_ + released, p.shape}},
                {{prefix_ + transformers, p.shape}},
                {{p.name, p.shape}}}};
    return p;
  }
  Parameter& add_frozen(const std::string& name, Shape shape) {
    Parameter& p = add(name, std::move(shape));
    p.frozen = true;
    return p;
  }

  void hyper_connection(const std::string& site) {
    const int64_t n = c_.hc_mult, rows = n * (2 + n);
    const std::array<std::pair<std::string, Shape>, 3> tensors = {
        {{"fn", {rows, n * c_.hidden_size}}, {"base", {rows}}, {"scale", {3}}}};
    for (const auto& [name, shape] : tensors) {
      const std::string module = fmt::format("{}_hc.{}", site, name);
      Parameter& p = add(module, shape, at::kFloat, fmt::format("hc_{}_{}", site, name), module);
      p.island = p.engine_fp32 = true;
      p.hf_fp32 = name != "fn";
    }
  }

  void kda() {
    const int64_t hidden = c_.hidden_size, width = c_.kda_width(), dim = c_.linear_head_dim,
                  taps = c_.linear_conv_kernel_dim, heads = c_.linear_num_heads;
    for (const char* name : {"q_proj", "k_proj", "v_proj"}) {
      add(fmt::format("self_attn.{}.weight", name), {width, hidden});
    }
    Parameter& conv = add("self_attn.conv1d.weight", {3 * width, taps}, at::kFloat);
    conv.conv = conv.hf_fp32 = conv.engine_fp32 = true;
    conv.parts[0].clear();
    for (const char* name : {"q", "k", "v"}) {
      conv.parts[0].push_back({fmt::format("{}self_attn.{}_conv1d.weight", prefix_, name),
                               {width, 1, taps},
                               {width, taps}});
    }
    conv.parts[1].front().shape = {3 * width, 1, taps};
    // One name in two namings must accept both shapes.
    conv.parts[1].front().also_shape = conv.shape;
    conv.parts[2].front().also_shape = {3 * width, 1, taps};

    add("self_attn.b_proj.weight", {heads, hidden});
    add_gate("f_a_proj.weight", {dim, hidden}, at::kBFloat16);
    add_gate("f_b_proj.weight", {width, dim}, at::kBFloat16);
    for (const auto& [name, size] :
         {std::pair<const char*, int64_t>{"A_log", heads}, {"dt_bias", width}}) {
      Parameter& p = add_gate(name, {size}, at::kFloat);
      p.island = p.hf_fp32 = p.engine_fp32 = true;
      if (size == heads && p.name.ends_with("A_log")) {
        for (auto& parts : p.parts) parts.front().also_shape = {1, 1, heads, 1};
      }
    }
    add("self_attn.g_a_proj.weight", {dim, hidden});
    add("self_attn.g_b_proj.weight", {width, dim});
    add("self_attn.o_norm.weight", {dim});
    add("self_attn.o_proj.weight", {hidden, width});
  }

  void sparse_mla(bool shared_indexer) {
    const int64_t hidden = c_.hidden_size, heads = c_.num_attention_heads, q_rank = c_.q_lora_rank,
                  kv_rank = c_.kv_lora_rank, nope = c_.qk_nope_head_dim, v = c_.v_head_dim;
    add("self_attn.q_a_proj.weight", {q_rank, hidden});
    add("self_attn.q_a_layernorm.weight", {q_rank});
    add("self_attn.q_b_proj.weight", {heads * nope, q_rank});
    add("self_attn.kv_a_proj_with_mqa.weight", {kv_rank, hidden});
    add("self_attn.kv_a_layernorm.weight", {kv_rank});
    add("self_attn.kv_b_proj.weight", {heads * (nope + v), kv_rank});
    add("self_attn.o_proj.weight", {hidden, heads * v});
    if (shared_indexer) return;
    const int64_t dim = c_.index_head_dim, i_heads = c_.index_n_heads;
    add_frozen("self_attn.indexer.wq_b.weight", {i_heads * dim, q_rank});
    add_frozen("self_attn.indexer.wk.weight", {dim, hidden});
    add_frozen("self_attn.indexer.k_norm.weight", {dim}).engine_fp32 = true;
    add_frozen("self_attn.indexer.k_norm.bias", {dim}).engine_fp32 = true;
    add_frozen("self_attn.indexer.weights_proj.weight", {i_heads, hidden});
    Parameter& ape = add("self_attn.indexer.ape",
                         {c_.index_kpool, dim},
                         at::kBFloat16,
                         "self_attn.indexer.index_kpool_compress_ape",
                         "self_attn.indexer.index_kpool_compress_ape");
    ape.frozen = ape.engine_fp32 = true;
    add("self_attn.indexer.gate.weight",
        {dim, hidden},
        at::kBFloat16,
        "self_attn.indexer.index_kpool_compress_gate",
        "self_attn.indexer.index_kpool_compress_gate")
        .frozen = true;
  }

  void mlp(const std::string& module, int64_t width) {
    add(module + ".gate_proj.weight", {width, c_.hidden_size});
    add(module + ".up_proj.weight", {width, c_.hidden_size});
    add(module + ".down_proj.weight", {c_.hidden_size, width});
  }

  void moe() {
    const int64_t hidden = c_.hidden_size, num = c_.n_routed_experts,
                  width = c_.moe_intermediate_size;
    add("mlp.gate.weight", {num, hidden}).hf_fp32 = true;
    Parameter& bias = add("mlp.gate.e_score_correction_bias", {num}, at::kFloat);
    bias.buffer = bias.hf_fp32 = bias.engine_fp32 = true;

    Parameter& gate_up = add("mlp.experts.gate_up_proj", {num, 2 * width, hidden});
    gate_up.expert = true;
    gate_up.parts[0].clear();
    for (int64_t e = 0; e < num; ++e) {
      for (const char* name : {"gate_proj", "up_proj"}) {
        gate_up.parts[0].push_back(
            {fmt::format("{}mlp.experts.{}.{}.weight", prefix_, e, name), {width, hidden}});
      }
    }
    Parameter& down = add("mlp.experts.down_proj", {num, hidden, width});
    down.expert = true;
    down.parts[0].clear();
    for (int64_t e = 0; e < num; ++e) {
      down.parts[0].push_back(
          {fmt::format("{}mlp.experts.{}.down_proj.weight", prefix_, e), {hidden, width}});
    }
    if (c_.n_shared_experts > 0) mlp("mlp.shared_experts", c_.shared_width());
  }

  std::vector<Parameter> take() { return std::move(list_); }

 private:
  /// A parameter of the forget gate, which transformers puts into a module of its own.
  Parameter& add_gate(const std::string& name, Shape shape, at::ScalarType dtype) {
    const std::string flat = "self_attn." + name;
    return add(flat, std::move(shape), dtype, flat, "self_attn.forget_gate." + name);
  }

  const ModelConfig& c_;
  int64_t layer_ = -1;
  std::string prefix_;
  std::vector<Parameter> list_;
};

}  // namespace

std::string_view naming_name(Naming naming) {
  switch (naming) {
    case Naming::kReleased:
      return "released";
    case Naming::kTransformers:
      return "transformers";
    default:
      return "internal";
  }
}

int64_t DiskPart::numel() const { return product(shape); }
int64_t Parameter::numel() const { return product(shape); }

std::vector<Parameter> expected_parameters(const ModelConfig& c) {
  Builder build(c);
  build.start_layer(-1);
  build.add("embed_tokens.weight", {c.vocab_size, c.hidden_size});
  for (int64_t i = 0; i < c.num_hidden_layers; ++i) {
    const auto at = static_cast<size_t>(i);
    build.start_layer(i);
    build.hyper_connection("attn");
    build.add("input_layernorm.weight", {c.hidden_size});
    if (c.mixers[at] == MixerKind::kKda) {
      build.kda();
    } else {
      build.sparse_mla(c.indexer_shared[at]);
    }
    build.hyper_connection("ffn");
    build.add("post_attention_layernorm.weight", {c.hidden_size});
    if (c.mlps[at] == MlpKind::kDense) {
      build.mlp("mlp", c.intermediate_size);
    } else {
      build.moe();
    }
  }
  build.start_layer(-1);
  build.add("norm.weight", {c.hidden_size});
  build.add("lm_head.weight", {c.vocab_size, c.hidden_size});
  return build.take();
}

std::string disk_name(std::string_view part_name, Naming naming, bool composite) {
  const bool bare = naming == Naming::kInternal || part_name == "lm_head.weight";
  return fmt::format("{}{}", bare ? "" : composite ? "model.language_model." : "model.", part_name);
}

std::vector<Tensor> split_parts(const Parameter& parameter, Naming naming, const Tensor& value) {
  check_shape(value, parameter.shape, parameter.name);
  const Tensor flat = value.contiguous().view({-1});
  std::vector<Tensor> parts;
  int64_t first = 0;
  for (const DiskPart& part : parameter.parts_in(naming)) {
    parts.push_back(flat.narrow(0, first, part.numel()).view(part.shape));
    first += part.numel();
  }
  return parts;
}

}  // namespace lockstep::model
