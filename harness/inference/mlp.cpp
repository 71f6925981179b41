#include "harness/inference/mixers.hpp"
#include "model/ops/linear.hpp"
#include "model/ops/moe.hpp"

namespace lockstep::harness {
namespace {

/// Clamped SwiGLU through a merged gate and up projection. Where sums are split, this rank's part
/// of the sum; else whole.
Tensor gated_mlp(const StepContext& ctx,
                 const EngineLayer& name,
                 const Tensor& x,
                 const std::string& mlp) {
  const Tensor both = model::linear(x, name.weight(mlp + ".gate_up_proj"), ctx.num);
  const int64_t inner = both.size(1) / 2;
  const Tensor h = model::clamped_swiglu(both.narrow(1, 0, inner).contiguous(),
                                         both.narrow(1, inner, inner).contiguous(),
                                         ctx.config.swiglu_limit,
                                         ctx.num);
  const Tensor& down = name.weight(mlp + ".down_proj");
  if (ctx.tensor.splits_sums()) return model::linear(h, down, ctx.num);
  return engine_project_out(ctx, h, down, name(mlp));
}

/// Rows in expert order through this rank's part of the experts.
Tensor experts(const StepContext& ctx,
               const EngineLayer& name,
               const Tensor& rows,
               const std::vector<int64_t>& offsets) {
  const Tensor &w13 = name.weight("mlp.experts.w13"), &w2 = name.weight("mlp.experts.w2");
  model::TensorSplit& tensor = ctx.tensor;
  if (tensor.splits_sums())
    return model::grouped_experts(rows, offsets, w13, w2, ctx.config.swiglu_limit, ctx.num);
  const auto [first, last] = tensor.share(static_cast<int64_t>(offsets.size()) - 1);
  const int64_t begin = offsets[static_cast<size_t>(first)];
  std::vector<int64_t> mine;
  for (int64_t e = first; e <= last; ++e) mine.push_back(offsets[static_cast<size_t>(e)] - begin);
  return tensor.gather_rows(
      model::grouped_experts(
          rows.narrow(0, begin, mine.back()), mine, w13, w2, ctx.config.swiglu_limit, ctx.num),
      name("mlp.experts"));
}

}  // namespace

Tensor engine_project_out(const StepContext& ctx,
                          const Tensor& y,
                          const Tensor& weight,
                          const std::string& what) {
  if (ctx.tensor.splits_sums()) return ctx.tensor.leave(model::linear(y, weight, ctx.num), what);
  const Tensor whole = ctx.tensor.gather_columns(y, false, what);
  return ctx.tensor.gather_columns(model::linear(whole, weight, ctx.num), true, what);
}

Tensor engine_mlp(const StepContext& ctx, int64_t layer, const Tensor& x_TD) {
  const model::ModelConfig& config = ctx.config;
  const model::Numerics& num = ctx.num;
  const EngineLayer name(ctx, layer);
  const bool split = ctx.tensor.splits_sums();
  if (config.mlps[static_cast<size_t>(layer)] != model::MlpKind::kMoe) {
    const OpScope time("dense mlp");
    const Tensor y = gated_mlp(ctx, name, x_TD, "mlp");
    return split ? ctx.tensor.leave(y, name("mlp")) : y;
  }
  const model::RouterParams router{.top_k = config.num_experts_per_tok,
                                   .n_group = config.n_group,
                                   .topk_group = config.topk_group,
                                   .normalise = config.norm_topk_prob,
                                   .softmax_scoring = config.softmax_scoring,
                                   .scaling = config.routed_scaling_factor};
  const model::Routing routing = timed("router", [&] {
    return model::route(x_TD,
                        name.weight("mlp.gate"),
                        name.weight("mlp.gate.e_score_correction_bias"),
                        Tensor(),
                        router,
                        num);
  });
  name.record("mlp.gate.experts", routing.experts);
  const model::ExpertOrder order = timed("expert rows", [&] {
    return model::order_by_expert(routing.experts, config.n_routed_experts);
  });
  const Tensor rows = timed("expert rows", [&] { return model::gather_rows(x_TD, order, num); });
  const Tensor out = timed("experts", [&] { return experts(ctx, name, rows, order.offsets); });
  Tensor y = timed("expert rows",
                   [&] { return model::combine_experts(out, order, routing.weights, num); });
  if (config.n_shared_experts > 0) {
    const OpScope time("shared expert");
    y = y + gated_mlp(ctx, name, x_TD, "mlp.shared_experts");
  }
  return split ? ctx.tensor.leave(y, name("mlp")) : y;
}

}  // namespace lockstep::harness
