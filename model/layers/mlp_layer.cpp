#include "model/layers/mlp_layer.hpp"

#include "model/ops/moe.hpp"

namespace lockstep::model {
namespace {

Tensor mixture(const LayerContext& ctx, int64_t layer, const Tensor& x_TD) {
  const ModelConfig& cfg = ctx.config;
  const Numerics& num = ctx.num;
  const LayerNames name(ctx, layer);

  const RouterParams router{.top_k = cfg.num_experts_per_tok,
                            .n_group = cfg.n_group,
                            .topk_group = cfg.topk_group,
                            .normalise = cfg.norm_topk_prob,
                            .softmax_scoring = cfg.softmax_scoring,
                            .scaling = cfg.routed_scaling_factor};
  const Tensor replay =
      ctx.replay != nullptr ? (*ctx.replay)[static_cast<size_t>(layer)] : Tensor();
  const Tensor gate = name.param("mlp.gate.weight"),
               bias = name.param("mlp.gate.e_score_correction_bias");
  const Routing routing = ctx.reference ? route_reference(x_TD, gate, bias, replay, router, num)
                                        : route(x_TD, gate, bias, replay, router, num);
  name.record("mlp.gate.experts", routing.experts);

  const ExpertOrder order = order_by_expert(routing.experts, cfg.n_routed_experts);
  const Tensor rows = gather_rows(x_TD, order, num);
  const Tensor gate_up = name.param("mlp.experts.gate_up_proj"),
               down = name.param("mlp.experts.down_proj");
  const Tensor out =
      ctx.reference
          ? grouped_experts_reference(rows, order.offsets, gate_up, down, cfg.swiglu_limit, num)
          : grouped_experts(rows, order.offsets, gate_up, down, cfg.swiglu_limit, num);
  const Tensor routed = ctx.reference ? combine_experts_reference(out, order, routing.weights, num)
                                      : combine_experts(out, order, routing.weights, num);
  if (cfg.n_shared_experts == 0) return routed;
  return routed + swiglu_mlp(x_TD,
                             name.param("mlp.shared_experts.gate_proj.weight"),
                             name.param("mlp.shared_experts.up_proj.weight"),
                             name.param("mlp.shared_experts.down_proj.weight"),
                             cfg.swiglu_limit,
                             num);
}

}  // namespace

Tensor mlp(const LayerContext& ctx, int64_t layer, const Tensor& x_TD) {
  if (ctx.config.mlps[static_cast<size_t>(layer)] == MlpKind::kMoe)
    return mixture(ctx, layer, x_TD);
  const LayerNames name(ctx, layer);
  return swiglu_mlp(x_TD,
                    name.param("mlp.gate_proj.weight"),
                    name.param("mlp.up_proj.weight"),
                    name.param("mlp.down_proj.weight"),
                    ctx.config.swiglu_limit,
                    ctx.num);
}

}  // namespace lockstep::model
