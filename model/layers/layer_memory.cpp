#include "model/layers/layer_memory.hpp"

#include <algorithm>

#include "model/layers/parameter_policy.hpp"
#include "model/ops/conv_core.hpp"
#include "model/ops/kda_core.hpp"
#include "model/ops/kda_mode.hpp"
#include "model/ops/norm_core.hpp"

namespace lockstep::model {
namespace {

/// How many pieces of at most `size` rows the segments between `cu` are cut into, as conv_blocks()
/// and kda_chunks() list them.
int64_t pieces(const std::vector<int64_t>& cu, int64_t size) {
  int64_t count = 0;
  for (size_t s = 0; s + 1 < cu.size(); ++s) count += (cu[s + 1] - cu[s] + size - 1) / size;
  return count;
}

using Id = MemoryTape::Id;
using Op = MemoryTape::Op;

constexpr int64_t kIndex = 8;                              // an int64
constexpr int64_t kExpertSliceBytes = int64_t{512} << 20;  // of raised weights, moe_experts.cpp
constexpr int64_t kHeadChunk = 1024;                       // HeadOptions::token_chunk

int64_t size_of(at::ScalarType dtype) { return static_cast<int64_t>(c10::elementSize(dtype)); }

/// The operators of one unit.
class Unit {
 public:
  Unit(const ModelConfig& config, const Numerics& num, const PassSizes& sizes)
      : c_(config),
        num_(num),
        s_(sizes),
        tokens_(sizes.tokens),
        act_(size_of(num.act())),
        acc_(size_of(num.acc())) {}

  UnitMemory layer(int64_t layer, int64_t rows, int64_t own_rows) {
    const auto at = static_cast<size_t>(layer);
    const bool last = layer + 1 == c_.num_hidden_layers;
    const Id in = tape_.given(streams());
    const Boundary attn = boundary(in);
    const Id mixed = c_.mixers[at] == MixerKind::kKda
                         ? kda(attn.normed)
                         : sparse_attention(attn.normed, c_.indexer_shared[at]);
    const Id middle = mix(mixed, in, attn, 0);
    const Boundary ffn = boundary(middle);
    const Id y = c_.mlps[at] == MlpKind::kMoe
                     ? mixture(ffn.normed, rows, own_rows)
                     : mlp(ffn.normed, s_.dense_inner, c_.intermediate_size);
    // The head's gradient is one row for all streams, which is written out first.
    mix(y, middle, ffn, last ? streams() : 0);
    return tape_.use();
  }

  UnitMemory stem() {
    const int64_t embedding = c_.vocab_size * c_.hidden_size;
    const Id embedded =
        tape_.add({.outputs = {hidden()},
                   .backward_work = raised(tokens_ * c_.hidden_size) + raised(embedding),
                   .gradients = gradient(embedding, act_)})[0];
    tape_.add({.inputs = {embedded}, .outputs = {streams()}});
    return tape_.use();
  }

  UnitMemory head() {
    const Id in = tape_.given(hidden());  // one row for all streams
    const Id mean = tape_.add({.inputs = {in},
                               .outputs = {hidden()},
                               .backward_work = raised(tokens_ * c_.hidden_size)})[0];
    const Id normed = norm(mean, c_.hidden_size);
    const int64_t weight = c_.vocab_size * c_.hidden_size;
    const int64_t chunk = std::min(tokens_, kHeadChunk);
    tape_.add_saving({normed},
                     tokens_ * acc_,
                     {.kept = tokens_ * acc_,
                      .forward_work = raised(tokens_ * c_.hidden_size) + raised(weight),
                      // h, dh, W, dW in acc; logits of a chunk.
                      .backward_work = 2 * raised(tokens_ * c_.hidden_size) +
                                       (num_.invariant() ? 1 : 2) * raised(weight) +
                                       chunk * c_.vocab_size * acc_,
                      .gradients = gradient(weight, act_)});
    return tape_.use();
  }

 private:
  struct Boundary {
    Id normed, post, comb;
  };

  [[nodiscard]] int64_t hidden() const { return tokens_ * c_.hidden_size * act_; }
  [[nodiscard]] int64_t streams() const { return hidden() * c_.hc_mult; }
  /// Elements in act that are copied to acc; nothing where both are one dtype.
  [[nodiscard]] int64_t raised(int64_t elements) const {
    return act_ == acc_ ? 0 : elements * acc_;
  }
  /// Of a parameter of `width` bytes an element; exact sums are two float64.
  [[nodiscard]] int64_t gradient(int64_t elements, int64_t width) const {
    return elements * (num_.invariant() ? 16 : width);
  }
  [[nodiscard]] int64_t width_of(std::string_view name) const {
    return size_of(parameter_dtype(name, num_));
  }

  Boundary boundary(Id in) {
    const int64_t n = c_.hc_mult, logits = n * (2 + n), fn = logits * n * c_.hidden_size;
    const int64_t width = width_of("attn_hc.fn");
    const std::vector<Id> out =
        tape_.add({.inputs = {in},
                   .outputs = {hidden(), tokens_ * n * acc_, tokens_ * n * n * acc_},
                   .saved = {in},
                   // Coefficients and statistic of each token; fn as used.
                   .kept = tokens_ * (logits + 1) * acc_ + (width < acc_ ? fn * acc_ : 0),
                   .backward_work = width < acc_ ? fn * acc_ : 0,
                   .gradients = gradient(fn, width)});
    return {out[0], out[1], out[2]};
  }

  Id mix(Id y, Id x, const Boundary& from, int64_t backward_work) {
    return tape_.add_saving(
        {y, x, from.post, from.comb}, streams(), {.backward_work = backward_work});
  }

  Id linear(Id x, int64_t k, int64_t n, int64_t out_width) {
    return tape_.add_saving(
        {x},
        tokens_ * n * out_width,
        {.forward_work = raised(tokens_ * k) + raised(n * k),
         .backward_work = raised(tokens_ * n) + std::max(raised(n * k), raised(tokens_ * k)),
         .gradients = gradient(n * k, act_)});
  }
  Id linear(Id x, int64_t k, int64_t n) { return linear(x, k, n, act_); }

  Id norm(Id x, int64_t width) {
    return tape_.add_saving(
        {x},
        tokens_ * width * act_,
        {.backward_work = norm_blocks(tokens_) * width * acc_, .gradients = gradient(width, act_)});
  }

  /// Columns of all tp ranks, and the other way round: [T, k] of width / tp.
  Id gather_columns(Id x, int64_t width) {
    return tape_.add({.inputs = {x},
                      .outputs = {tokens_ * width * act_},
                      .forward_work = tokens_ * width * act_,
                      .backward_work = 2 * tokens_ * width * act_})[0];
  }

  /// own columns of [T, inner], times a matrix to [T, D].
  Id project_out(Id y, int64_t own, int64_t inner) {
    if (!s_.split || s_.splits_sums) return linear(y, own, c_.hidden_size);
    const int64_t part = c_.hidden_size * own / inner;
    return gather_columns(linear(gather_columns(y, inner), inner, part), c_.hidden_size);
  }

  Id kda(Id x) {
    const int64_t heads = s_.kda_heads, dim = c_.linear_head_dim, width = heads * dim;
    const int64_t taps = c_.linear_conv_kernel_dim, row = tokens_ * width * act_;
    std::vector<Id> raw, qkv;
    for (int i = 0; i < 3; ++i) raw.push_back(linear(x, c_.hidden_size, width));
    if (s_.cut_sequence)  // joined for the halo
      tape_.add({.inputs = {}, .outputs = {}, .forward_work = 3 * row});
    const int64_t partial = pieces(s_.cu, kConvRows) * width * taps * acc_;
    for (const Id in : raw) {
      qkv.push_back(tape_.add_saving(
          {in}, row, {.backward_work = partial, .gradients = gradient(width * taps, acc_)}));
    }
    const auto gate = [&] { return linear(linear(x, c_.hidden_size, dim), dim, width); };
    const Id forget = gate(), beta = linear(x, c_.hidden_size, heads);
    const int64_t chunk = kda_mode(num_, c_.linear_lower_bound, false).chunk;
    const int64_t chunks = pieces(s_.cu, std::max<int64_t>(chunk, 1));
    const int64_t state = heads * dim * dim * acc_;
    const int64_t segments = static_cast<int64_t>(s_.cu.size()) - 1;
    const Id o = tape_.add_saving({qkv[0], qkv[1], qkv[2], forget, beta},
                                  row,
                                  {.kept = kda_windows(chunks) * state,
                                   .kept_to_end = 2 * s_.maps * state,
                                   .forward_work = segments * state,
                                   .backward_work = chunks * heads * (dim + 1) * acc_});
    const Id out_gate = gate();
    const Id y = tape_.add_saving(
        {o, out_gate}, row, {.backward_work = norm_blocks(tokens_ * heads) * dim * acc_});
    return project_out(y, width, c_.kda_width());
  }

  Id sparse_attention(Id x, bool shared_indexer) {
    const int64_t heads = s_.mla_heads, rank = c_.kv_lora_rank, q_rank = c_.q_lora_rank;
    const int64_t q_width = heads * c_.qk_nope_head_dim, v_width = heads * c_.v_head_dim;
    const Id cq = norm(linear(x, c_.hidden_size, q_rank), q_rank);
    const Id c = norm(linear(x, c_.hidden_size, rank), rank);
    const int64_t selected = c_.index_topk + (c_.index_always_select_tail ? c_.index_kpool - 1 : 0);
    if (!shared_indexer) {
      const int64_t queries = tokens_ * c_.index_n_heads * c_.index_head_dim;
      tape_.add({.kept_after = tokens_ * selected * 4,
                 .forward_work = queries * act_ + s_.row_tokens * 2 * c_.index_head_dim * act_});
    }
    const Id q = linear(cq, q_rank, q_width);
    const int64_t latents = s_.row_tokens * rank;
    const Id latent =
        s_.cut_sequence ? tape_.add({.inputs = {c}, .outputs = {latents * act_}})[0] : c;
    const int64_t kv_b = (q_width + v_width) * rank;
    const int64_t operands = raised(tokens_ * q_width) + raised(latents) + raised(kv_b);
    const Id o = tape_.add_saving({q, latent},
                                  tokens_ * v_width * act_,
                                  {.forward_work = operands + raised(tokens_ * v_width),
                                   .backward_work = 2 * operands + raised(tokens_ * v_width),
                                   .gradients = gradient(kv_b, act_)});
    return project_out(o, v_width, c_.num_attention_heads * c_.v_head_dim);
  }

  /// Weights raised at a time; in backward as much again for gradients that are rounded.
  struct Raised {
    int64_t forward, backward;
  };
  [[nodiscard]] Raised raised_experts(int64_t experts, int64_t inner) const {
    const int64_t one = 3 * inner * c_.hidden_size * acc_;
    const int64_t step = std::max<int64_t>(1, kExpertSliceBytes / std::max<int64_t>(one, 1));
    const int64_t bytes = act_ == acc_ ? 0 : std::min(step, experts) * one;
    return {bytes, num_.invariant() ? bytes : 2 * bytes};
  }

  /// rows through gate, up and down of their experts.
  Id experts(Id x, int64_t rows, int64_t num_experts, int64_t inner) {
    const int64_t width = c_.hidden_size;
    const Raised weights = raised_experts(num_experts, inner);
    return tape_.add_saving(
        {x},
        rows * width * act_,
        {.kept = rows * 2 * inner * act_,
         .forward_work = rows * inner * acc_ + raised(rows * width) + weights.forward,
         .backward_work = rows * 3 * inner * acc_ + 2 * raised(rows * width) + weights.backward,
         .gradients = gradient(num_experts * 3 * inner * width, act_)});
  }

  /// inner: of this tp rank, of `whole`.
  Id mlp(Id x, int64_t inner, int64_t whole) {
    if (!s_.split || s_.splits_sums) return experts(x, tokens_, 1, inner);
    const Id gate = linear(x, c_.hidden_size, inner), up = linear(x, c_.hidden_size, inner);
    const int64_t h = tokens_ * inner;
    const Id y = tape_.add_saving(
        {gate, up},
        h * act_,
        {.forward_work = 3 * raised(h), .backward_work = 2 * raised(h) + h * acc_ + 2 * raised(h)});
    return project_out(y, inner, whole);
  }

  Id mixture(Id x, int64_t rows, int64_t own_rows) {
    const int64_t top_k = c_.num_experts_per_tok, num = c_.n_routed_experts, sent = tokens_ * top_k;
    const int64_t gate_width = width_of("mlp.gate.weight"), gate = num * c_.hidden_size;
    // The router's matrix as used, where that is a copy.
    const int64_t gate_copy = gate_width < acc_ ? gate * acc_ : 0;
    const Id logits =
        tape_.add_saving({x},
                         tokens_ * num * acc_,
                         {.kept = gate_copy,
                          .forward_work = raised(tokens_ * c_.hidden_size),
                          .backward_work = raised(tokens_ * c_.hidden_size) + gate_copy,
                          .gradients = gradient(gate, gate_width)});
    const Id weights = tape_.add_saving({logits}, sent * acc_, {.kept = sent * kIndex});
    const Id gathered = tape_.add({.inputs = {x},
                                   .outputs = {sent * c_.hidden_size * act_},
                                   .kept_to_end = sent * kIndex,
                                   .forward_work = sent * kIndex,
                                   .backward_work = sent * kIndex})[0];
    const auto travel = [&](Id in, int64_t count) {
      if (!s_.exchanges) return in;
      return tape_.add({.inputs = {in}, .outputs = {count * c_.hidden_size * act_}})[0];
    };
    if (s_.exchanges) tape_.add({.kept_to_end = 2 * rows * kIndex});
    Id out = experts(travel(gathered, rows), own_rows, s_.num_experts, s_.expert_inner);
    if (s_.split && !s_.splits_sums)
      out = tape_.add({.inputs = {out}, .outputs = {rows * c_.hidden_size * act_}})[0];
    const Id y =
        tape_.add_saving({travel(out, sent), weights}, hidden(), {.kept_to_end = sent * kIndex});
    if (c_.n_shared_experts == 0) return y;
    return tape_.add(
        {.inputs = {y, mlp(x, s_.shared_inner, c_.shared_width())}, .outputs = {hidden()}})[0];
  }

  const ModelConfig& c_;
  const Numerics& num_;
  const PassSizes& s_;
  int64_t tokens_, act_, acc_;
  MemoryTape tape_;
};

}  // namespace

UnitMemory layer_memory(const ModelConfig& config,
                        const Numerics& num,
                        const PassSizes& sizes,
                        int64_t layer,
                        int64_t rows,
                        int64_t own_rows) {
  return Unit(config, num, sizes).layer(layer, rows, own_rows);
}

UnitMemory stem_memory(const ModelConfig& config, const Numerics& num, const PassSizes& sizes) {
  return Unit(config, num, sizes).stem();
}

UnitMemory head_memory(const ModelConfig& config, const Numerics& num, const PassSizes& sizes) {
  return Unit(config, num, sizes).head();
}

}  // namespace lockstep::model
