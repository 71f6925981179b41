#include "model/ops/kda.hpp"

#include "harness/inference/mixers.hpp"
#include "model/ops/conv.hpp"
#include "model/ops/kda_decode.hpp"
#include "model/ops/linear.hpp"
#include "model/ops/norm.hpp"

namespace lockstep::harness {
namespace {

using model::KdaInput;
using model::KdaOutput;
using model::Switch;

/// Layer's dimensions and parameters; rows z [T, 4 w + H] hold q, k, v (after the convolution), f
/// and the beta logits.
struct Rows {
  int64_t heads, dim;
  Tensor a_log, dt_bias;
  std::optional<double> lower_bound;

  [[nodiscard]] KdaInput input(const Tensor& z, std::vector<int64_t> cu) const {
    const int64_t width = heads * dim;
    const auto part = [&](int64_t i) {
      return z.narrow(1, i * width, width).unflatten(1, {heads, dim});
    };
    return {.q = part(0),
            .k = part(1),
            .v = part(2),
            .f = part(3),
            .beta_logit = z.narrow(1, 4 * width, heads),
            .a_log = a_log,
            .dt_bias = dt_bias,
            .initial_state = {},
            .cu = std::move(cu),
            .lower_bound = lower_bound};
  }
};

/// Runs of rows, one after another.
struct Pieces {
  std::vector<Tensor> rows;
  std::vector<int64_t> cu{0};
  void add(const Tensor& piece) {
    rows.push_back(piece);
    cu.push_back(cu.back() + piece.size(0));
  }
};

/// The last width - 1 raw rows of every item, oldest first, with those before it.
void keep_last_rows(const Batch& batch, const Tensor& x, const Tensor& halo, const Tensor& cache) {
  const int64_t keep = halo.size(1);
  if (keep == 0) return;
  for (size_t i = 0; i < batch.parts.size(); ++i) {
    const Batch::Part& part = batch.parts[i];
    const int64_t fresh = std::min(keep, part.count());
    Tensor slot = cache[batch.items[i].sequence->slot];
    slot.copy_(at::cat({halo[static_cast<int64_t>(i)].narrow(0, fresh, keep - fresh),
                        x.narrow(0, part.end - fresh, fresh)}));
  }
}

/// Prefill of items [first, last), each call a chunk grid of its own.
Tensor prefill(const StepContext& ctx,
               const KdaCache& cache,
               const Rows& rows,
               const Tensor& z,
               size_t first) {
  const Batch& batch = ctx.batch;
  const auto from = static_cast<int64_t>(first);
  const int64_t begin = batch.cu[first], count = batch.rows() - begin;
  std::vector<int64_t> cu;
  for (size_t i = first; i < batch.cu.size(); ++i) cu.push_back(batch.cu[i] - begin);
  const Tensor slots = batch.slots.narrow(0, from, batch.slots.size(0) - from);
  const Tensor continues = batch.continues.narrow(0, from, slots.size(0)).view({-1, 1, 1, 1});
  KdaInput in = rows.input(z.narrow(0, begin, count), std::move(cu));
  // New requests start from zeros, whatever the slot held.
  const Tensor state = cache.state.index_select(0, slots).to(ctx.num.acc());
  in.initial_state =
      at::where(continues, state, at::zeros_like(state)).transpose(-1, -2).contiguous();
  const KdaOutput out = model::kda_chunk(in, ctx.num);
  cache.state.index_copy_(
      0, slots, out.final_state.transpose(-1, -2).to(cache.state.scalar_type()));
  return out.o;
}

/// The same on the grid of the whole request: rows since the last whole chunk are computed again.
Tensor replay(const StepContext& ctx,
              const KdaCache& cache,
              const Rows& rows,
              const Tensor& z,
              size_t first) {
  const Batch& batch = ctx.batch;
  const int64_t chunk = cache.open.size(1);
  struct Item {
    int64_t before, whole, rest;  ///< open rows kept; rows in whole chunks; rows after them
    int64_t whole_at, rest_at;    ///< first row of either in its call
    int64_t whole_segment;
  };
  std::vector<Item> items;
  Pieces whole, rest;
  std::vector<Tensor> entry;  // [H, D, D] of each whole piece
  Tensor zeros = at::zeros({rows.heads, rows.dim, rows.dim}, cache.boundary.options());
  const auto boundary_of = [&](size_t i) {
    const Sequence& sequence = *batch.items[i].sequence;
    const int64_t position = batch.parts[i].position;
    if (position == 0) return zeros;
    const Tensor& from = position == sequence.chunk_origin ? cache.state : cache.boundary;
    return from[sequence.slot].to(ctx.num.acc()).transpose(-1, -2).contiguous();
  };
  for (size_t i = first; i < batch.parts.size(); ++i) {
    const Batch::Part& part = batch.parts[i];
    Sequence& sequence = *batch.items[i].sequence;
    Item item{};
    item.before = (part.position - sequence.chunk_origin) % chunk;
    const Tensor all = at::cat({cache.open[sequence.slot].narrow(0, 0, item.before),
                                z.narrow(0, part.begin, part.count())});
    item.rest = all.size(0) % chunk;
    item.whole = all.size(0) - item.rest;
    item.whole_at = whole.cu.back();
    item.rest_at = rest.cu.back();
    item.whole_segment = item.whole > 0 ? static_cast<int64_t>(entry.size()) : -1;
    if (item.whole > 0) {
      whole.add(all.narrow(0, 0, item.whole));
      entry.push_back(boundary_of(i));
    }
    rest.add(all.narrow(0, item.whole, item.rest));
    items.push_back(item);
  }
  KdaOutput done;
  if (!entry.empty()) {
    KdaInput in = rows.input(at::cat(whole.rows), whole.cu);
    in.initial_state = at::stack(entry);
    done = model::kda_chunk(in, ctx.num);
  }
  std::vector<Tensor> later;
  for (size_t i = 0; i < items.size(); ++i) {
    const int64_t segment = items[i].whole_segment;
    later.push_back(segment >= 0 ? done.final_state[segment] : boundary_of(first + i));
  }
  KdaInput in = rows.input(at::cat(rest.rows), rest.cu);
  in.initial_state = at::stack(later);
  const KdaOutput open = model::kda_chunk(in, ctx.num);

  std::vector<Tensor> o;
  for (size_t i = 0; i < items.size(); ++i) {
    const Item& item = items[i];
    const int64_t slot = batch.items[first + i].sequence->slot;
    const int64_t skip = std::min(item.before, item.whole);
    if (item.whole > skip) o.push_back(done.o.narrow(0, item.whole_at + skip, item.whole - skip));
    const int64_t skip_rest = item.before - skip;
    o.push_back(open.o.narrow(0, item.rest_at + skip_rest, item.rest - skip_rest));
    cache.boundary[slot].copy_(later[i].transpose(-1, -2));
    cache.state[slot].copy_(open.final_state[static_cast<int64_t>(i)].transpose(-1, -2));
    cache.open[slot].narrow(0, 0, item.rest).copy_(rest.rows[i]);
  }
  return at::cat(o);
}

}  // namespace

int64_t replayed_chunk(const model::Numerics& num) {
  if (!num.is<Switch::kChunkOrigin>("document")) return 0;
  return num.is<Switch::kKdaAlgorithm>("chunk64")   ? 64
         : num.is<Switch::kKdaAlgorithm>("chunk16") ? 16
                                                    : 0;
}

bool decodes_by_chunks(const model::Numerics& num) { return num.invariant(); }

Tensor engine_kda(const StepContext& ctx, int64_t layer, const Tensor& x_TD) {
  const model::ModelConfig& config = ctx.config;
  const model::Numerics& num = ctx.num;
  const Batch& batch = ctx.batch;
  const EngineLayer name(ctx, layer);
  const KdaCache& cache = ctx.caches.kda(layer);
  const Rows rows{name.weight("self_attn.A_log").size(0),
                  config.linear_head_dim,
                  name.weight("self_attn.A_log"),
                  name.weight("self_attn.dt_bias"),
                  config.linear_lower_bound};
  const int64_t heads = rows.heads, dim = rows.dim, width = heads * dim, tokens = x_TD.size(0);

  const Tensor merged = timed("kda projections", [&] {
    return model::linear(x_TD, name.weight("self_attn.in_proj_qkvbfg_a"), num);
  });
  const int64_t rank = (merged.size(1) - 3 * width - heads) / 2;
  const Tensor raw = merged.narrow(1, 0, 3 * width), beta = merged.narrow(1, 3 * width, heads),
               f_a = merged.narrow(1, 3 * width + heads, rank),
               g_a = merged.narrow(1, 3 * width + heads + rank, rank);
  const auto low_rank = [&](const Tensor& value, std::string_view weight) {
    const OpScope time("kda projections");
    return model::linear(value.contiguous(), name.weight(weight), num);
  };

  const Tensor conv = timed("convolution", [&] {
    const Tensor kept = cache.conv.index_select(0, batch.slots);
    const Tensor halo =
        at::where(batch.continues.view({-1, 1, 1}), kept, at::zeros_like(kept)).contiguous();
    Tensor out = model::conv_silu(raw, name.weight("self_attn.conv1d"), batch.cu, halo, num);
    keep_last_rows(batch, raw, halo, cache.conv);
    return out;
  });
  const Tensor z = at::cat({conv, low_rank(f_a, "self_attn.f_b_proj"), beta}, 1);

  const Tensor o_THV = timed("kda", [&] {
    std::vector<Tensor> parts;
    const bool chunks = decodes_by_chunks(num);
    const size_t first = chunks ? 0 : static_cast<size_t>(batch.num_decode);
    if (first > 0) {
      std::vector<int64_t> cu(batch.cu.begin(), batch.cu.begin() + batch.num_decode + 1);
      const KdaInput in = rows.input(z.narrow(0, 0, batch.num_decode), std::move(cu));
      const Tensor slots = batch.slots.narrow(0, 0, batch.num_decode);
      for (int64_t i = 0; i < batch.num_decode; ++i) {
        const Sequence& sequence = *batch.items[static_cast<size_t>(i)].sequence;
        if (batch.parts[static_cast<size_t>(i)].position == 0) cache.state[sequence.slot].zero_();
      }
      parts.push_back(model::kda_decode(in, slots, cache.state, num));
    }
    if (first < batch.parts.size()) {
      parts.push_back(cache.open.defined() ? replay(ctx, cache, rows, z, first)
                                           : prefill(ctx, cache, rows, z, first));
    }
    return parts.empty() ? at::zeros({0, heads, dim}, z.options()) : at::cat(parts);
  });

  const Tensor gate = low_rank(g_a, "self_attn.g_b_proj").view({tokens, heads, dim});
  const Tensor y = timed("kda gated norm", [&] {
    return model::gated_rms_norm(
        o_THV, gate, name.weight("self_attn.o_norm"), config.rms_norm_eps, num);
  });
  const OpScope time("kda projections");
  return engine_project_out(
      ctx, y.reshape({tokens, width}), name.weight("self_attn.o_proj"), name("self_attn"));
}

}  // namespace lockstep::harness
