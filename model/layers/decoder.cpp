#include "model/layers/decoder.hpp"

#include "model/base/op_timer.hpp"
#include "model/layers/dsa_layer.hpp"
#include "model/layers/kda_layer.hpp"
#include "model/layers/mlp_layer.hpp"
#include "model/layers/unit.hpp"
#include "model/ops/hyper_connection.hpp"
#include "model/ops/linear.hpp"
#include "model/ops/norm.hpp"

namespace lockstep::model {
namespace {

HcPre boundary(const LayerContext& ctx,
               const LayerNames& name,
               const Tensor& x,
               std::string_view hc,
               std::string_view norm) {
  const HcParams params{ctx.config.rms_norm_eps, ctx.config.hc_eps, ctx.config.hc_sinkhorn_iters};
  const std::string prefix(hc);
  const Weight fn = name.param(prefix + ".fn"), base = name.param(prefix + ".base"),
               scale = name.param(prefix + ".scale");
  const Weight weight = name.param(norm);
  const OpScope time("hyper-connection in");
  return ctx.reference
             ? hc_pre_reference(x, fn.value, base.value, scale.value, weight.value, params, ctx.num)
             : hc_pre(x, fn, base, scale, weight, params, ctx.num);
}

Tensor mix(const LayerContext& ctx, const Tensor& y, const Tensor& x, const HcPre& pre) {
  const OpScope time("hyper-connection out");
  return ctx.reference ? hc_post_reference(y, x, pre.post, pre.comb, ctx.num)
                       : hc_post(y, x, pre.post, pre.comb, ctx.num);
}

}  // namespace

Seams Seams::local() {
  // Stateless, so one of each serves everybody.
  static LocalSequence sequence;
  static LocalExperts experts;
  static WholeTensors tensor;
  return {sequence, experts, tensor};
}

Tensor block(const LayerContext& ctx, int64_t layer, const Tensor& x_TnD, Tensor& selection) {
  const LayerNames name(ctx, layer);
  const HcPre attn = boundary(ctx, name, x_TnD, "attn_hc", "input_layernorm.weight");
  name.record("input_layernorm", attn.x_normed);
  const Tensor mixed = ctx.config.mixers[static_cast<size_t>(layer)] == MixerKind::kKda
                           ? kda_mixer(ctx, layer, attn.x_normed)
                           : dsa_mixer(ctx, layer, attn.x_normed, selection);
  name.record("self_attn", mixed);
  const Tensor middle = mix(ctx, mixed, x_TnD, attn);

  const HcPre ffn = boundary(ctx, name, middle, "ffn_hc", "post_attention_layernorm.weight");
  name.record("post_attention_layernorm", ffn.x_normed);
  const Tensor y = mlp(ctx, layer, ffn.x_normed);
  name.record("mlp", y);
  Tensor out = mix(ctx, y, middle, ffn);
  ctx.record(fmt::format("layers.{}", layer), out);
  return out;
}

Tensor run_layers(const LayerContext& ctx,
                  int64_t first,
                  int64_t last,
                  Tensor x,
                  Tensor& selection,
                  const DecoderOptions& options) {
  for (int64_t layer = first; layer < last; ++layer) {
    // The unit may run again in backward: it starts from the selection it was given.
    const auto chosen = std::make_shared<Tensor>();
    x = run_unit(ctx,
                 layer,
                 x,
                 options.recompute,
                 [layer, chosen, before = selection](const LayerContext& inner, const Tensor& in) {
                   *chosen = before;
                   return block(inner, layer, in, *chosen);
                 });
    selection = *chosen;
    if (options.progress) options.progress(layer + 1, ctx.config.num_hidden_layers);
  }
  return x;
}

Tensor embed_streams(const LayerContext& ctx, const Tensor& ids) {
  const OpScope time("embedding");
  const Tensor embedded = embedding(
      ids, ctx.weight("embed_tokens.weight"), ctx.config.pad_token_id.value_or(-1), ctx.num);
  return hc_copy(embedded, ctx.config.hc_mult, ctx.num);
}

Tensor finish(const LayerContext& ctx, const Tensor& x_TnD) {
  const OpScope time("final norm");
  const Tensor mean = hc_mean(x_TnD, ctx.num);
  const Weight weight = ctx.weight("norm.weight");
  Tensor h = ctx.reference
                 ? rms_norm_reference(mean, weight.value, ctx.config.rms_norm_eps, ctx.num)
                 : rms_norm(mean, weight, ctx.config.rms_norm_eps, ctx.num);
  ctx.record("norm", h);
  return h;
}

Tensor decoder_layers(const LayerContext& ctx, const Tensor& ids, const DecoderOptions& options) {
  check_shape(ids, {ctx.packing.local_tokens()}, "decoder: ids");
  const Tensor x =
      run_unit(ctx, kStemUnit, Tensor(), false, [ids](const LayerContext& inner, const Tensor&) {
        return embed_streams(inner, ids);
      });
  Tensor selection;
  return run_layers(ctx, 0, ctx.config.num_hidden_layers, x, selection, options);
}

}  // namespace lockstep::model
