#include "harness/inference/mixers.hpp"
#include "model/ops/indexer.hpp"
#include "model/ops/latent_cache.hpp"
#include "model/ops/linear.hpp"
#include "model/ops/norm.hpp"
#include "model/ops/sparse_mla.hpp"

namespace lockstep::harness {
namespace {

using model::Switch;

/// Keys, gates of the new rows -> pools that are complete now go to the index cache, the last rows
/// to the ring.
void write_index(const StepContext& ctx,
                 const DsaCache& cache,
                 const EngineLayer& name,
                 const Tensor& k,
                 const Tensor& gate) {
  const Batch& batch = ctx.batch;
  const int64_t d = k.size(1);
  const Tensor rows = at::stack({k, gate}, 1);  // [T, 2, d]
  // Rows of open pools come from the ring.
  const Tensor old = batch.pool_source.lt(0);
  const Tensor source = at::empty({batch.pool_source.size(0), 2, d}, k.options());
  const auto fill = [&](const Tensor& where, const Tensor& from, const Tensor& index) {
    const Tensor at = where.nonzero().flatten();
    source.index_copy_(0, at, from.index_select(0, index.index_select(0, at)));
  };
  fill(old, cache.ring, -1 - batch.pool_source);
  fill(old.logical_not(), rows, batch.pool_source);
  Tensor pools = model::pool_keys(source.select(1, 0).contiguous(),
                                  source.select(1, 1).contiguous(),
                                  name.weight("self_attn.indexer.ape"),
                                  batch.pool_cu,
                                  ctx.config.index_kpool,
                                  ctx.num);
  if (ctx.num.is<Switch::kPrefillPool>("dropped")) {
    for (const int64_t pool : batch.straddling) pools[pool].zero_();
  }
  if (ctx.caches.fp8_index()) {
    model::write_fp8(cache.index,
                     ctx.caches.sizes().index_page,
                     batch.pool_slots,
                     model::quantise_pools(pools, ctx.num));
  } else {
    cache.index.index_copy_(0, batch.pool_slots, pools);
  }
  cache.ring.index_copy_(0, batch.ring_slots, rows.index_select(0, batch.ring_rows));
}

/// Keys of its request that each row attends to.
Tensor select(const StepContext& ctx,
              const DsaCache& cache,
              const EngineLayer& name,
              const Tensor& x_TD,
              const Tensor& cq_TR) {
  const model::ModelConfig& config = ctx.config;
  const model::Numerics& num = ctx.num;
  const Batch& batch = ctx.batch;
  const int64_t d = config.index_head_dim, heads = config.index_n_heads;
  const auto project = [&](const Tensor& value, std::string_view weight) {
    const OpScope time("indexer projections");
    return model::linear(value, name.weight(weight), num);
  };
  const Tensor merged = project(x_TD, "self_attn.indexer.wk_weights_proj");
  timed("indexer pooling", [&] {
    const Tensor k = model::indexer_layer_norm(merged.narrow(1, 0, d).contiguous(),
                                               name.weight("self_attn.indexer.k_norm.weight"),
                                               name.weight("self_attn.indexer.k_norm.bias"),
                                               num);
    write_index(ctx, cache, name, k, project(x_TD, "self_attn.indexer.gate"));
  });
  const Tensor q = project(cq_TR, "self_attn.indexer.wq_b").view({x_TD.size(0), heads, d});
  const Tensor head_weight = timed("indexer projections", [&] {
    return num.is<Switch::kIndexerHeadWeights>("fp32")
               ? model::linear_acc(x_TD, name.weight("self_attn.indexer.head_weights"), num)
               : merged.narrow(1, d, heads).contiguous();
  });
  const model::IndexerParams params{.num_heads = heads,
                                    .head_dim = d,
                                    .kpool = config.index_kpool,
                                    .topk = config.index_topk,
                                    .select_tail = config.index_always_select_tail};
  const OpScope time("indexer selection");
  std::vector<Tensor> chosen{at::zeros({0, params.width()}, at::kInt)};
  for (size_t i = 0; i < batch.parts.size(); ++i) {
    const Batch::Part& part = batch.parts[i];
    if (part.count() == 0) continue;
    const Packing request =
        Packing::of_lengths({part.length()}).shard(part.position, part.length());
    const Tensor slots =
        batch.items[i].sequence->index.slots(0, part.length() / config.index_kpool);
    const Tensor rows = q.narrow(0, part.begin, part.count()),
                 weight = head_weight.narrow(0, part.begin, part.count());
    chosen.push_back(
        ctx.caches.fp8_index()
            ? model::select_keys(
                  rows,
                  weight,
                  model::read_fp8(cache.index, ctx.caches.sizes().index_page, d, slots),
                  request,
                  params,
                  num)
            : model::select_keys(
                  rows, weight, cache.index.index_select(0, slots), request, params, num));
  }
  return at::cat(chosen);
}

/// The selection in slots of the latent cache.
Tensor in_slots(const Batch& batch, const Tensor& selection) {
  std::vector<Tensor> slots{selection.narrow(0, 0, 0)};
  for (size_t i = 0; i < batch.parts.size(); ++i) {
    const Batch::Part& part = batch.parts[i];
    slots.push_back(model::to_slots(selection.narrow(0, part.begin, part.count()),
                                    batch.items[i].sequence->latent));
  }
  return at::cat(slots);
}

/// What attention reads: rows [n, R] act, and for each row of the batch those it attends to, -1 for
/// none.
struct Latents {
  Tensor rows, selection;
};

/// The cache as it is; where it is FP8 (D45), the rows of the batch's requests, widened.
Latents latents(const StepContext& ctx, const DsaCache& cache, const Tensor& selection) {
  const Batch& batch = ctx.batch;
  if (!ctx.num.rounds<Switch::kLatentCache>("fp8"))
    return {cache.latent, in_slots(batch, selection)};
  std::vector<Tensor> slots, chosen{selection.narrow(0, 0, 0)};
  int64_t before = 0;
  for (size_t i = 0; i < batch.parts.size(); ++i) {
    const Batch::Part& part = batch.parts[i];
    slots.push_back(batch.items[i].sequence->latent.slots(0, part.length()));
    const Tensor own = selection.narrow(0, part.begin, part.count());
    chosen.push_back(at::where(own.lt(0), own, own + before));
    before += part.length();
  }
  return {model::read_fp8_latents(cache.latent, at::cat(slots), ctx.config.kv_lora_rank)
              .to(ctx.num.act()),
          at::cat(chosen)};
}

}  // namespace

Tensor engine_dsa(const StepContext& ctx, int64_t layer, const Tensor& x_TD, Tensor& selection) {
  const model::ModelConfig& config = ctx.config;
  const model::Numerics& num = ctx.num;
  const EngineLayer name(ctx, layer);
  const DsaCache& cache = ctx.caches.dsa(layer);
  const int64_t tokens = x_TD.size(0);
  const auto project = [&](const Tensor& value, std::string_view weight) {
    const OpScope time("attention projections");
    return model::linear(value, name.weight(weight), num);
  };
  const Tensor merged = project(x_TD, "self_attn.fused_qkv_a");
  const auto norm = [&](int64_t first, int64_t count, std::string_view weight) {
    const OpScope time("attention norms");
    return model::rms_norm(
        merged.narrow(1, first, count).contiguous(), name.weight(weight), config.rms_norm_eps, num);
  };
  const Tensor cq_TR = norm(0, config.q_lora_rank, "self_attn.q_a_layernorm");
  name.record("self_attn.q_a_layernorm", cq_TR);
  const Tensor c_TR = norm(config.q_lora_rank, config.kv_lora_rank, "self_attn.kv_a_layernorm");
  name.record("self_attn.kv_a_layernorm", c_TR);
  if (num.rounds<Switch::kLatentCache>("fp8")) {
    model::write_fp8_latents(cache.latent, ctx.batch.latent_slots, c_TR);
  } else {
    cache.latent.index_copy_(0, ctx.batch.latent_slots, c_TR);
  }

  if (!config.indexer_shared[static_cast<size_t>(layer)]) {
    selection = select(ctx, cache, name, x_TD, cq_TR);
  } else {
    LOCKSTEP_CHECK(selection.defined(),
                   kConfig,
                   "layer {}: its indexer is shared but no earlier layer has one",
                   layer);
  }
  name.record("self_attn.indexer", selection);

  const Tensor& q_b = name.weight("self_attn.q_b_proj");
  const int64_t heads = q_b.size(0) / config.qk_nope_head_dim;
  const Tensor q =
      project(cq_TR, "self_attn.q_b_proj").view({tokens, heads, config.qk_nope_head_dim});
  const Tensor o = timed("sparse attention", [&] {
    const Latents keys = latents(ctx, cache, selection);
    return num.is<Switch::kMlaForm>("expanded")
               ? model::sparse_mla(q,
                                   keys.rows,
                                   name.weight("self_attn.kv_b_proj"),
                                   keys.selection,
                                   config.v_head_dim,
                                   num)
               : model::sparse_mla_absorbed(q,
                                            keys.rows,
                                            name.weight("self_attn.w_k"),
                                            name.weight("self_attn.w_v"),
                                            keys.selection,
                                            num);
  });
  const OpScope time("attention projections");
  return engine_project_out(ctx,
                            o.reshape({tokens, heads * config.v_head_dim}),
                            name.weight("self_attn.o_proj"),
                            name("self_attn"));
}

}  // namespace lockstep::harness
