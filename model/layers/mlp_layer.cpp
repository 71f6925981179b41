#include "model/layers/mlp_layer.hpp"

#include <algorithm>

#include "model/base/op_timer.hpp"
#include "model/layers/split.hpp"
#include "model/ops/moe.hpp"

namespace lockstep::model {
namespace {

/// Rows of this rank's experts, in expert order, through them.
Tensor experts(const LayerContext& ctx, const LayerNames& name, const Dispatched& in) {
  Weight gate_up = name.param("mlp.experts.gate_up_proj"),
         down = name.param("mlp.experts.down_proj");
  gate_up.blocks = down.blocks = in.blocks;
  const auto run = [&](const Tensor& rows, const std::vector<int64_t>& offsets) {
    const OpScope time("experts");
    return ctx.reference
               ? grouped_experts_reference(
                     rows, offsets, gate_up.value, down.value, ctx.config.swiglu_limit, ctx.num)
               : grouped_experts(rows, offsets, gate_up, down, ctx.config.swiglu_limit, ctx.num);
  };
  TensorSplit& tensor = ctx.seams.tensor;
  if (tensor.splits_sums()) return run(in.rows, in.offsets);
  // Whole experts instead of slices of each.
  const auto [first, last] = tensor.share(static_cast<int64_t>(in.offsets.size()) - 1);
  const int64_t begin = in.offsets[static_cast<size_t>(first)];
  std::vector<int64_t> offsets;
  for (int64_t e = first; e <= last; ++e)
    offsets.push_back(in.offsets[static_cast<size_t>(e)] - begin);
  return tensor.gather_rows(run(in.rows.narrow(0, begin, offsets.back()), offsets),
                            name("mlp.experts"));
}

/// Block of tokens of each row in expert order; undefined without blocks.
Tensor block_of_rows(const RowBlocks& blocks, const ExpertOrder& order) {
  if (blocks == nullptr) return {};
  const Tensor of_token = at::empty({blocks->back()}, at::kLong);
  auto* tag = static_cast<int64_t*>(of_token.mutable_data_ptr());
  for (size_t b = 0; b + 1 < blocks->size(); ++b)
    std::fill(tag + (*blocks)[b], tag + (*blocks)[b + 1], static_cast<int64_t>(b));
  return of_token.index_select(0, order.token);
}

Tensor mixture(const LayerContext& ctx, int64_t layer, const Tensor& x_TD) {
  const ModelConfig& cfg = ctx.config;
  const Numerics& num = ctx.num;
  const LayerNames name(ctx, layer);
  TensorSplit& tensor = ctx.seams.tensor;

  const RouterParams router{.top_k = cfg.num_experts_per_tok,
                            .n_group = cfg.n_group,
                            .topk_group = cfg.topk_group,
                            .normalise = cfg.norm_topk_prob,
                            .softmax_scoring = cfg.softmax_scoring,
                            .scaling = cfg.routed_scaling_factor};
  const Tensor replay =
      ctx.replay != nullptr ? (*ctx.replay)[static_cast<size_t>(layer)] : Tensor();
  const Weight gate = name.param("mlp.gate.weight");
  const Tensor bias = name.param("mlp.gate.e_score_correction_bias").value;
  const Routing routing = timed("router", [&] {
    return ctx.reference ? route_reference(x_TD, gate.value, bias, replay, router, num)
                         : route(x_TD, gate, bias, replay, router, num);
  });
  name.record("mlp.gate.experts", routing.experts);

  const Tensor x = tensor.enter(x_TD, name("mlp"));
  const Tensor weights =
      tensor.splits_sums() ? tensor.enter(routing.weights, name("mlp.gate")) : routing.weights;
  const ExpertOrder order =
      timed("expert rows", [&] { return order_by_expert(routing.experts, cfg.n_routed_experts); });
  const Tensor rows = timed("expert rows", [&] { return gather_rows(x, order, num); });
  const Dispatched there = ctx.seams.experts.dispatch(
      rows, order.offsets, block_of_rows(ctx.blocks, order), name("mlp dispatch"));
  const Tensor out =
      ctx.seams.experts.combine(experts(ctx, name, there), there, name("mlp combine"));
  Tensor y = timed("expert rows", [&] {
    return ctx.reference ? combine_experts_reference(out, order, weights, num)
                         : combine_experts(out, order, weights, num);
  });
  if (cfg.n_shared_experts > 0) {
    const OpScope time("shared expert");
    y = y + split_mlp(ctx, x, name("mlp.shared_experts."), name("mlp.shared_experts"));
  }
  return tensor.splits_sums() ? tensor.leave(y, name("mlp")) : y;
}

}  // namespace

Tensor mlp(const LayerContext& ctx, int64_t layer, const Tensor& x_TD) {
  if (ctx.config.mlps[static_cast<size_t>(layer)] == MlpKind::kMoe)
    return mixture(ctx, layer, x_TD);
  const LayerNames name(ctx, layer);
  TensorSplit& tensor = ctx.seams.tensor;
  const OpScope time("dense mlp");
  const Tensor y = split_mlp(ctx, tensor.enter(x_TD, name("mlp")), name("mlp."), name("mlp"));
  return tensor.splits_sums() ? tensor.leave(y, name("mlp")) : y;
}

}  // namespace lockstep::model
