#include "harness/inference/mixers.hpp"
#include "model/ops/fp8_linear.hpp"
#include "model/ops/linear.hpp"
#include "model/ops/moe.hpp"

namespace lockstep::harness {
namespace {

bool in_fp8(const StepContext& ctx) { return ctx.num.rounds<model::Switch::kExpertGemm>("fp8"); }

Tensor product(const StepContext& ctx,
               const EngineLayer& name,
               const Tensor& x,
               const std::string& weight) {
  if (!in_fp8(ctx)) return model::linear(x, name.weight(weight), ctx.num);
  return model::linear_fp8(
      x, {name.weight(weight + ".bytes"), name.weight(weight + ".scale")}, ctx.num);
}

Tensor activated(const StepContext& ctx, const Tensor& gate_up) {
  const int64_t inner = gate_up.size(1) / 2;
  return model::clamped_swiglu(gate_up.narrow(1, 0, inner).contiguous(),
                               gate_up.narrow(1, inner, inner).contiguous(),
                               ctx.config.swiglu_limit,
                               ctx.num);
}

/// Rows in expert order through experts kept in FP8.
Tensor experts_fp8(const StepContext& ctx,
                   const EngineLayer& name,
                   const Tensor& rows,
                   const std::vector<int64_t>& offsets) {
  const auto expert = [&](const std::string& weight, int64_t e) {
    return model::Fp8Blocks{name.weight(weight + ".bytes")[e], name.weight(weight + ".scale")[e]};
  };
  std::vector<Tensor> out{rows.narrow(0, 0, 0)};
  for (size_t e = 0; e + 1 < offsets.size(); ++e) {
    if (offsets[e] == offsets[e + 1]) continue;
    const auto id = static_cast<int64_t>(e);
    const Tensor mine = rows.narrow(0, offsets[e], offsets[e + 1] - offsets[e]);
    const Tensor h =
        activated(ctx, model::linear_fp8(mine, expert("mlp.experts.w13", id), ctx.num));
    out.push_back(model::linear_fp8(h, expert("mlp.experts.w2", id), ctx.num));
  }
  return at::cat(out);
}

/// Clamped SwiGLU through a merged gate and up projection. Where sums are split, this rank's part
/// of the sum; else whole.
Tensor gated_mlp(const StepContext& ctx,
                 const EngineLayer& name,
                 const Tensor& x,
                 const std::string& mlp) {
  const Tensor h = activated(ctx, product(ctx, name, x, mlp + ".gate_up_proj"));
  if (ctx.tensor.splits_sums()) return product(ctx, name, h, mlp + ".down_proj");
  return engine_project_out(ctx, h, name.weight(mlp + ".down_proj"), name(mlp));
}

/// Rows in expert order through this rank's part of the experts.
Tensor experts(const StepContext& ctx,
               const EngineLayer& name,
               const Tensor& rows,
               const std::vector<int64_t>& offsets) {
  if (in_fp8(ctx)) return experts_fp8(ctx, name, rows, offsets);
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
