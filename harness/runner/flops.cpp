#include "harness/runner/flops.hpp"

#include <algorithm>

namespace lockstep::harness {
namespace {

constexpr double kChunk = 64;  // tokens per chunk of the chunked recurrence

/// Multiply-adds of one KDA layer per token.
double kda_macs(const model::ModelConfig& c) {
  const auto D = static_cast<double>(c.hidden_size), W = static_cast<double>(c.kda_width()),
             H = static_cast<double>(c.linear_num_heads),
             K = static_cast<double>(c.linear_head_dim);
  const double projections = 3 * D * W + 2 * (D * K + K * W) + D * H + W * D +
                             3 * W * static_cast<double>(c.linear_conv_kernel_dim);
  // Two score matrices, the triangular solve, its product with keys and values, scores times
  // values, and three products with the state, per head.
  const double recurrence =
      H * (2 * kChunk * K + kChunk * kChunk / 3 + 2 * kChunk * K + kChunk * K + 3 * K * K);
  return projections + recurrence;
}

/// Of all tokens of a span.
double indexer_macs(const model::ModelConfig& c, const TokenSpan& span) {
  const auto D = static_cast<double>(c.hidden_size), Rq = static_cast<double>(c.q_lora_rank),
             Hi = static_cast<double>(c.index_n_heads), di = static_cast<double>(c.index_head_dim),
             p = static_cast<double>(c.index_kpool);
  const auto begin = static_cast<double>(span.begin), end = static_cast<double>(span.end),
             tokens = end - begin, positions = tokens * (begin + end - 1) / 2;
  return tokens * (Rq * Hi * di + 2 * D * di + D * Hi) + Hi * di * (positions / p);
}

double attention_macs(const model::ModelConfig& c, const TokenSpan& span) {
  const auto D = static_cast<double>(c.hidden_size), Rq = static_cast<double>(c.q_lora_rank),
             R = static_cast<double>(c.kv_lora_rank),
             H = static_cast<double>(c.num_attention_heads),
             dn = static_cast<double>(c.qk_nope_head_dim), dv = static_cast<double>(c.v_head_dim);
  // Position t has t + 1 keys, at most `most`.
  const int64_t most = c.index_topk + c.index_kpool - 1,
                full = std::clamp(most, span.begin, span.end);
  const auto begin = static_cast<double>(span.begin), end = static_cast<double>(span.end),
             middle = static_cast<double>(full);
  const double keys =
      (middle - begin) * (begin + middle + 1) / 2 + (end - middle) * static_cast<double>(most);
  return (end - begin) * (D * Rq + Rq * H * dn + D * R + H * R * (dn + dv) + H * dv * D) +
         2 * H * R * keys;
}

}  // namespace

Flops count_flops(const model::ModelConfig& c, const std::vector<int64_t>& documents) {
  std::vector<TokenSpan> spans;
  for (const int64_t length : documents) spans.push_back({0, length});
  return count_flops(c, spans);
}

Flops count_flops(const model::ModelConfig& c, const std::vector<TokenSpan>& spans) {
  const auto D = static_cast<double>(c.hidden_size), n = static_cast<double>(c.hc_mult);
  Flops flops;
  double tokens = 0;
  for (const TokenSpan& span : spans) tokens += static_cast<double>(span.end - span.begin);
  for (int64_t layer = 0; layer < c.num_hidden_layers; ++layer) {
    const auto at = static_cast<size_t>(layer);
    if (c.mixers[at] == model::MixerKind::kKda) {
      flops.mixers += 2 * tokens * kda_macs(c);
    } else {
      const bool own = c.indexer_shared.empty() || !c.indexer_shared[at];
      for (const TokenSpan& span : spans) {
        flops.mixers += 2 * attention_macs(c, span);
        if (own) flops.indexer += 2 * indexer_macs(c, span);
      }
    }
    const double expert = 3 * D * static_cast<double>(c.moe_intermediate_size);
    flops.mlps +=
        2 * tokens *
        (c.mlps[at] == model::MlpKind::kDense
             ? 3 * D * static_cast<double>(c.intermediate_size)
             : D * static_cast<double>(c.n_routed_experts) +
                   static_cast<double>(c.num_experts_per_tok + c.n_shared_experts) * expert);
    // Two modules a layer: coefficients from all streams, collapse, mix and add.
    flops.streams += 2 * tokens * 2 * ((n * n + 2 * n) * n * D + (n + n * n + n) * D);
  }
  flops.head = 2 * tokens * D * static_cast<double>(c.vocab_size);
  return flops;
}

}  // namespace lockstep::harness
