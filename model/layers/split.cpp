#include "model/layers/split.hpp"

#include "model/ops/linear.hpp"
#include "model/ops/moe.hpp"

namespace lockstep::model {
namespace {

/// Whole rows, times this rank's rows of the weight, whole rows again: no sum is cut.
Tensor project_gathered(const LayerContext& ctx,
                        const Tensor& y,
                        const Weight& weight,
                        const std::string& what) {
  TensorSplit& tensor = ctx.seams.tensor;
  const Tensor whole = tensor.gather_columns(y, false, what);
  return tensor.gather_columns(linear(whole, weight, ctx.num), true, what);
}

}  // namespace

Tensor project_out(const LayerContext& ctx,
                   const Tensor& y,
                   const Weight& weight,
                   const std::string& what) {
  if (!ctx.seams.tensor.splits_sums()) return project_gathered(ctx, y, weight, what);
  return ctx.seams.tensor.leave(linear(y, weight, ctx.num), what);
}

Tensor split_mlp(const LayerContext& ctx,
                 const Tensor& x,
                 const std::string& prefix,
                 const std::string& what) {
  const Weight gate = ctx.weight(prefix + "gate_proj.weight"),
               up = ctx.weight(prefix + "up_proj.weight"),
               down = ctx.weight(prefix + "down_proj.weight");
  const auto limit = ctx.config.swiglu_limit;
  if (ctx.seams.tensor.splits_sums()) return swiglu_mlp(x, gate, up, down, limit, ctx.num);
  const Tensor h = clamped_swiglu(linear(x, gate, ctx.num), linear(x, up, ctx.num), limit, ctx.num);
  return project_gathered(ctx, h, down, what);
}

}  // namespace lockstep::model
