#include "model/layers/kda_layer.hpp"

#include <array>

#include "model/base/op_timer.hpp"
#include "model/layers/split.hpp"
#include "model/ops/conv.hpp"
#include "model/ops/kda.hpp"
#include "model/ops/kda_maps.hpp"
#include "model/ops/linear.hpp"
#include "model/ops/norm.hpp"

namespace lockstep::model {

Tensor kda_mixer(const LayerContext& ctx, int64_t layer, const Tensor& x_TD) {
  const ModelConfig& cfg = ctx.config;
  const Numerics& num = ctx.num;
  const LayerNames name(ctx, layer);
  TensorSplit& tensor = ctx.seams.tensor;
  // Heads of this rank.
  const Weight a_log = name.param("self_attn.A_log");
  const int64_t heads = a_log.value.size(0), dim = cfg.linear_head_dim, width = heads * dim;
  const int64_t tokens = x_TD.size(0);
  const std::vector<int64_t>& cu = ctx.packing.local_cu_seqlens();

  const auto project = [&](const Tensor& value, std::string_view weight) {
    return timed("kda projections", [&] { return linear(value, name.param(weight), num); });
  };

  const Tensor x_in = tensor.enter(x_TD, name("self_attn"));

  // The three convolutions share one halo exchange.
  std::array<Tensor, 3> qkv = {project(x_in, "self_attn.q_proj.weight"),
                               project(x_in, "self_attn.k_proj.weight"),
                               project(x_in, "self_attn.v_proj.weight")};
  Tensor halo;
  if (!ctx.seams.sequence.is_local()) {
    halo = ctx.seams.sequence.conv_halo(at::cat({qkv[0], qkv[1], qkv[2]}, 1),
                                        cfg.linear_conv_kernel_dim,
                                        ctx.packing,
                                        name("conv halo"));
  }
  const Weight conv = name.param("self_attn.conv1d.weight");  // rows q, k, v
  for (size_t i = 0; i < qkv.size(); ++i) {
    const auto first = static_cast<int64_t>(i) * width;
    const Tensor part_halo = halo.defined() ? halo.narrow(2, first, width).contiguous() : Tensor();
    const Weight weight = conv.rows(first, width);
    const OpScope time("convolution");
    qkv[i] = ctx.reference ? conv_silu_reference(qkv[i], weight.value, cu, part_halo, num)
                           : conv_silu(qkv[i], weight, cu, part_halo, num);
  }

  const auto low_rank = [&](std::string_view gate) {
    return tensor.enter(project(x_TD, fmt::format("self_attn.{}_a_proj.weight", gate)),
                        name("self_attn gate"));
  };
  const Tensor forget = project(low_rank("f"), "self_attn.f_b_proj.weight");
  KdaInput in;
  in.q = qkv[0].view({tokens, heads, dim});
  in.k = qkv[1].view({tokens, heads, dim});
  in.v = qkv[2].view({tokens, heads, dim});
  in.f = forget.view({tokens, heads, dim});
  in.beta_logit = project(x_in, "self_attn.b_proj.weight");
  const Weight dt_bias = name.param("self_attn.dt_bias");
  in.a_log = a_log.value;
  in.a_log_sum = a_log.sum;
  in.dt_bias = dt_bias.value;
  in.dt_bias_sum = dt_bias.sum;
  in.cu = cu;
  in.lower_bound = cfg.linear_lower_bound;
  const Recurrence recurrence{.sizes = {heads, dim, dim},
                              .dtype = num.acc(),
                              .anchor = in.q,
                              .run = [&](const Tensor& state) -> Recurrence::Result {
                                KdaInput entered = in;
                                entered.initial_state = state;
                                const KdaOutput out = timed("kda", [&] {
                                  return ctx.reference ? kda_recurrent_reference(entered, num)
                                                       : kda_chunk(entered, num);
                                });
                                return {out.o, out.final_state};
                              },
                              .last_segment_map = [&] { return kda_last_segment_map(in, num); },
                              .entry_gradient =
                                  [in, num](const Tensor& state, const Tensor& dout) {
                                    KdaInput entered = in;
                                    entered.initial_state = state;
                                    return kda_entry_gradient(entered, dout, num);
                                  }};
  const Tensor o_THV = ctx.seams.sequence.recur(recurrence, ctx.packing, name("kda state"));

  const Tensor gate =
      project(low_rank("g"), "self_attn.g_b_proj.weight").view({tokens, heads, dim});
  // One weight for all heads: each rank's gradient is that of its heads.
  Weight norm = name.param("self_attn.o_norm.weight");
  norm.value = tensor.enter(norm.value, name("self_attn.o_norm"));
  const Tensor y = timed("kda gated norm", [&] {
    return ctx.reference ? gated_rms_norm_reference(o_THV, gate, norm.value, cfg.rms_norm_eps, num)
                         : gated_rms_norm(o_THV, gate, norm, cfg.rms_norm_eps, num);
  });
  const OpScope time("kda projections");
  return project_out(
      ctx, y.reshape({tokens, width}), name.param("self_attn.o_proj.weight"), name("self_attn"));
}

}  // namespace lockstep::model
