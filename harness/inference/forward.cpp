#include "harness/inference/forward.hpp"

#include "model/ops/hyper_connection.hpp"
#include "model/ops/norm.hpp"

namespace lockstep::harness {
namespace {

/// Streams between sublayers: as stored, and before their rounding where the next boundary reads
/// them so (D07).
struct Streams {
  Tensor stored, unrounded;
};

model::HcPre boundary(const StepContext& ctx,
                      const EngineLayer& name,
                      const Streams& x,
                      const std::string& hc,
                      std::string_view norm) {
  const model::HcParams params{
      ctx.config.rms_norm_eps, ctx.config.hc_eps, ctx.config.hc_sinkhorn_iters};
  const OpScope time("hyper-connection in");
  return model::hc_pre(x.stored,
                       name.weight(hc + ".fn"),
                       name.weight(hc + ".base"),
                       name.weight(hc + ".scale"),
                       name.weight(norm),
                       params,
                       ctx.num,
                       x.unrounded);
}

Streams mix(const StepContext& ctx, const Tensor& y, const Streams& x, const model::HcPre& pre) {
  const OpScope time("hyper-connection out");
  Streams out{model::hc_post(y, x.stored, pre.post, pre.comb, ctx.num), Tensor()};
  if (model::hc_wants_unrounded(ctx.batch.rows(), ctx.num))
    out.unrounded = model::hc_post_unrounded(y, x.stored, pre.post, pre.comb, ctx.num);
  return out;
}

void advance(const Batch& batch, const model::Numerics& num) {
  for (size_t i = 0; i < batch.items.size(); ++i) {
    Sequence& sequence = *batch.items[i].sequence;
    sequence.length = batch.parts[i].length();
    // A recurrent step leaves no open chunk: the next prefill counts from where it starts.
    if (batch.items[i].decode && !decodes_by_chunks(num)) sequence.chunk_origin = sequence.length;
  }
}

}  // namespace

Tensor engine_forward(const StepContext& ctx) {
  const at::NoGradGuard no_grad;
  const model::ModelConfig& config = ctx.config;
  const Tensor embedded = timed("embedding", [&] {
    return embed_tokens(ctx.batch.ids,
                        ctx.weights.at("embed_tokens"),
                        ctx.weights.vocabulary(),
                        ctx.num,
                        ctx.tensor);
  });
  Streams x{embedded.unsqueeze(1)
                .expand({embedded.size(0), config.hc_mult, embedded.size(1)})
                .contiguous(),
            Tensor()};
  Tensor selection;
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    const EngineLayer name(ctx, layer);
    const model::HcPre attn = boundary(ctx, name, x, "attn_hc", "input_layernorm");
    name.record("input_layernorm", attn.x_normed);
    const Tensor mixed = config.mixers[static_cast<size_t>(layer)] == model::MixerKind::kKda
                             ? engine_kda(ctx, layer, attn.x_normed)
                             : engine_dsa(ctx, layer, attn.x_normed, selection);
    name.record("self_attn", mixed);
    x = mix(ctx, mixed, x, attn);
    const model::HcPre ffn = boundary(ctx, name, x, "ffn_hc", "post_attention_layernorm");
    name.record("post_attention_layernorm", ffn.x_normed);
    const Tensor y = engine_mlp(ctx, layer, ffn.x_normed);
    name.record("mlp", y);
    x = mix(ctx, y, x, ffn);
    const std::string whole = fmt::format("layers.{}", layer);
    if (ctx.trace != nullptr && ctx.trace->wants(whole)) ctx.trace->record(whole, x.stored);
  }
  const OpScope time("final norm");
  Tensor h = model::rms_norm(
      model::hc_mean(x.stored, ctx.num), ctx.weights.at("norm"), config.rms_norm_eps, ctx.num);
  if (ctx.trace != nullptr && ctx.trace->wants("norm")) ctx.trace->record("norm", h);
  advance(ctx.batch, ctx.num);
  return h;
}

}  // namespace lockstep::harness
