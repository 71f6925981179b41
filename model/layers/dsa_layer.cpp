#include "model/layers/dsa_layer.hpp"

#include "model/base/op_timer.hpp"
#include "model/layers/split.hpp"
#include "model/ops/indexer.hpp"
#include "model/ops/linear.hpp"
#include "model/ops/norm.hpp"
#include "model/ops/sparse_mla.hpp"

namespace lockstep::model {
namespace {

/// Keys each local query attends to. Frozen: nothing here takes part in the gradient.
Tensor select(const LayerContext& ctx,
              const LayerNames& name,
              const Tensor& x_TD,
              const Tensor& cq_TR) {
  const at::NoGradGuard no_grad;
  const ModelConfig& cfg = ctx.config;
  const Numerics& num = ctx.num;
  const Tensor x = x_TD.detach(), cq = cq_TR.detach();
  const auto project = [&](const Tensor& value, std::string_view weight) {
    return timed("indexer projections", [&] { return linear(value, name.param(weight), num); });
  };

  const Tensor k_raw = project(x, "self_attn.indexer.wk.weight");
  const Tensor k_local = timed("indexer pooling", [&] {
    return indexer_layer_norm(k_raw,
                              name.param("self_attn.indexer.k_norm.weight").value,
                              name.param("self_attn.indexer.k_norm.bias").value,
                              num);
  });
  const Tensor gate_local = project(x, "self_attn.indexer.gate.weight");
  const Tensor k = ctx.seams.sequence.gather_rows(k_local, name("index keys"));
  const Tensor gate = ctx.seams.sequence.gather_rows(gate_local, name("index gates"));
  const Tensor ape = name.param("self_attn.indexer.ape").value;
  const std::vector<int64_t>& cu = ctx.packing.cu_seqlens();
  const Tensor pooled = timed("indexer pooling", [&] {
    return ctx.reference ? pool_keys_reference(k, gate, ape, cu, cfg.index_kpool, num)
                         : pool_keys(k, gate, ape, cu, cfg.index_kpool, num);
  });

  const Tensor q = project(cq, "self_attn.indexer.wq_b.weight")
                       .view({x.size(0), cfg.index_n_heads, cfg.index_head_dim});
  const Weight weights_proj = name.param("self_attn.indexer.weights_proj.weight");
  const Tensor head_weight = timed("indexer projections", [&] {
    return num.is<Switch::kIndexerHeadWeights>("fp32") ? linear_acc(x, weights_proj, num)
                                                       : linear(x, weights_proj, num);
  });
  const IndexerParams params{.num_heads = cfg.index_n_heads,
                             .head_dim = cfg.index_head_dim,
                             .kpool = cfg.index_kpool,
                             .topk = cfg.index_topk,
                             .select_tail = cfg.index_always_select_tail};
  const OpScope time("indexer selection");  // select_keys counts its scoring apart
  return ctx.reference ? select_keys_reference(q, head_weight, pooled, ctx.packing, params, num)
                       : select_keys(q, head_weight, pooled, ctx.packing, params, num);
}

/// Latents of the whole row. All later queries of a document add to a latent's gradient: exactly,
/// where the parameters' gradients are.
Weight gather_latents(const LayerContext& ctx,
                      const Tensor& local,
                      bool exact,
                      const std::string& what) {
  if (!exact) return ctx.seams.sequence.gather_rows(local, what);
  const ExactSum sum({ctx.packing.global_tokens(), local.size(1)}, what + " gradient");
  return {ctx.seams.sequence.gather_rows_exact(local, sum, what), sum, nullptr};
}

}  // namespace

Tensor dsa_mixer(const LayerContext& ctx, int64_t layer, const Tensor& x_TD, Tensor& selection) {
  const ModelConfig& cfg = ctx.config;
  const Numerics& num = ctx.num;
  const LayerNames name(ctx, layer);
  const int64_t tokens = x_TD.size(0);
  const auto project = [&](const Tensor& value, const Weight& weight) {
    return timed("attention projections", [&] { return linear(value, weight, num); });
  };
  const auto norm = [&](const Tensor& value, std::string_view weight) {
    const OpScope time("attention norms");
    return ctx.reference
               ? rms_norm_reference(value, name.param(weight).value, cfg.rms_norm_eps, num)
               : rms_norm(value, name.param(weight), cfg.rms_norm_eps, num);
  };

  const Tensor cq_TR = norm(project(x_TD, name.param("self_attn.q_a_proj.weight")),
                            "self_attn.q_a_layernorm.weight");
  name.record("self_attn.q_a_layernorm", cq_TR);
  const Tensor c_TR = norm(project(x_TD, name.param("self_attn.kv_a_proj_with_mqa.weight")),
                           "self_attn.kv_a_layernorm.weight");
  name.record("self_attn.kv_a_layernorm", c_TR);

  if (!cfg.indexer_shared[static_cast<size_t>(layer)]) {
    selection = select(ctx, name, x_TD, cq_TR);
  } else {
    LOCKSTEP_CHECK(selection.defined(),
                   kConfig,
                   "layer {}: its indexer is shared but no earlier layer has one",
                   layer);
  }
  name.record("self_attn.indexer", selection);

  // Heads of this rank.
  TensorSplit& tensor = ctx.seams.tensor;
  const Weight q_b = name.param("self_attn.q_b_proj.weight");
  const int64_t heads = q_b.value.size(0) / cfg.qk_nope_head_dim;
  const Tensor q = project(tensor.enter(cq_TR, name("queries")), q_b)
                       .view({tokens, heads, cfg.qk_nope_head_dim});
  const Weight kv_b = name.param("self_attn.kv_b_proj.weight");
  const Weight latent =
      gather_latents(ctx, tensor.enter(c_TR, name("latents")), kv_b.sum.defined(), name("latents"));
  const Tensor o = timed("sparse attention", [&] {
    return ctx.reference
               ? sparse_mla_reference(q, latent.value, kv_b.value, selection, cfg.v_head_dim, num)
               : sparse_mla(q, latent, kv_b, selection, cfg.v_head_dim, num);
  });
  const OpScope time("attention projections");
  return project_out(ctx,
                     o.reshape({tokens, heads * cfg.v_head_dim}),
                     name.param("self_attn.o_proj.weight"),
                     name("self_attn"));
}

}  // namespace lockstep::model
