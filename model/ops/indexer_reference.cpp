// Plain forms of the indexer, written as the formulas are.
#include <algorithm>
#include <cmath>
#include <limits>

#include "model/ops/fp8.hpp"
#include "model/ops/indexer.hpp"

namespace lockstep::model {
namespace {

/// Decoded e4m3 values (without their scale) and the scales of the rows of x.
struct Quantised {
  Tensor values, scale;
};

Quantised quantise(const Tensor& x, const Numerics& num) {
  const Tensor rotated = num.is<Switch::kHadamard>("on") ? hadamard_reference(x) : x;
  const Fp8Rows rows = quantise_rows_reference(rotated, fp8_scale_mode(num));
  return {rows.bytes.view(at::kFloat8_e4m3fn).to(at::kFloat), rows.scale};
}

}  // namespace

Tensor indexer::plain_scores(const Tensor& q_nhd,
                             const Tensor& weight_nh,
                             const Tensor& pooled_pd,
                             const Numerics& num) {
  const auto heads = static_cast<double>(q_nhd.size(1)), dim = static_cast<double>(q_nhd.size(2));
  if (num.rounds<Switch::kIndexerScoring>("fp8")) {
    const Quantised q = quantise(q_nhd, num), k = quantise(pooled_pd, num);
    const Tensor constant = at::scalar_tensor(
        static_cast<float>(std::pow(dim, -0.5) * std::pow(heads, -0.5)), at::kFloat);
    const Tensor weight = (weight_nh.to(at::kFloat) * q.scale) * constant;
    const Tensor dots_nhp = at::matmul(q.values, k.values.t());
    return at::matmul(weight.unsqueeze(1), dots_nhp.relu()).squeeze(1) * k.scale;
  }
  Tensor dots_nhp = at::matmul(q_nhd.to(num.acc()), pooled_pd.to(num.acc()).t());
  if (num.rounds<Switch::kIndexerScoring>("bf16")) {
    dots_nhp = dots_nhp.to(at::kBFloat16).to(num.acc());
  }
  const Tensor weight = weight_nh.to(num.acc()) * std::pow(heads, -0.5);
  return at::matmul(weight.unsqueeze(1), (dots_nhp * std::pow(dim, -0.5)).relu()).squeeze(1);
}

Tensor indexer_layer_norm_reference(const Tensor& x,
                                    const Tensor& weight,
                                    const Tensor& bias,
                                    const Numerics& num) {
  indexer::check_layer_norm(x, weight, bias, num);
  const bool round_parameters = num.rounds<Switch::kIndexerLayerNorm>("bf16");
  const auto parameter = [&](const Tensor& p) {
    return (round_parameters ? p.detach().to(at::kBFloat16) : p.detach()).to(num.acc());
  };
  const Tensor v = x.detach().to(num.acc());
  const Tensor centred = v - v.mean(-1, true);
  const Tensor variance = centred.square().mean(-1, true);
  return (centred / (variance + 1e-6).sqrt() * parameter(weight) + parameter(bias)).to(num.act());
}

Tensor pool_keys_reference(const Tensor& k,
                           const Tensor& gate,
                           const Tensor& ape,
                           const std::vector<int64_t>& cu,
                           int64_t kpool,
                           const Numerics& num) {
  indexer::check_pool(k, gate, ape, cu, kpool, num);
  std::vector<Tensor> parts{at::empty({0, k.size(1)}, k.options())};
  for (size_t d = 0; d + 1 < cu.size(); ++d) {
    const int64_t pools = (cu[d + 1] - cu[d]) / kpool;
    const auto group = [&](const Tensor& x) {
      return x.detach().slice(0, cu[d], cu[d] + pools * kpool).reshape({pools, kpool, k.size(1)});
    };
    const Tensor weight = at::softmax(group(gate).to(num.acc()) + ape.detach().to(num.acc()), 1);
    if (num.rounds<Switch::kPoolSoftmax>("bf16-weights")) {
      const Tensor products = weight.to(at::kBFloat16) * group(k);
      parts.push_back(products.to(num.acc()).sum(1).to(num.act()));
    } else {
      parts.push_back((weight * group(k).to(num.acc())).sum(1).to(num.act()));
    }
  }
  return at::cat(parts, 0);
}

Tensor select_keys_reference(const Tensor& q,
                             const Tensor& head_weight,
                             const Tensor& pooled,
                             const Packing& packing,
                             const IndexerParams& params,
                             const Numerics& num) {
  indexer::check_select(q, head_weight, pooled, packing, params, num);
  const std::vector<int64_t>& cu = packing.cu_seqlens();
  const std::vector<int64_t> first_pool = indexer::pool_offsets(cu, params.kpool);
  const int64_t budget = params.topk / params.kpool;
  Tensor selection = at::full({packing.local_tokens(), params.width()}, -1, at::kInt);
  auto* out = selection.data_ptr<int32_t>();
  for (const Segment& segment : packing.segments()) {
    const auto d = static_cast<size_t>(segment.document);
    const Tensor scores =
        indexer::plain_scores(q.detach().slice(0, segment.begin, segment.end),
                              head_weight.detach().slice(0, segment.begin, segment.end),
                              pooled.detach().slice(0, first_pool[d], first_pool[d + 1]),
                              num);
    for (int64_t i = 0; i < segment.length(); ++i) {
      const int64_t position = segment.position + i, full_pools = (position + 1) / params.kpool;
      Tensor row = scores[i].slice(0, 0, full_pools).clone();
      const bool completes = (position + 1) % params.kpool == 0;
      if (completes && num.is<Switch::kOwnPool>("always")) {
        row[full_pools - 1] = std::numeric_limits<double>::infinity();
      }
      // A stable descending sort leaves equal scores in index order.
      const Tensor order = std::get<1>(at::sort(row, /*stable=*/true, 0, /*descending=*/true));
      const Tensor best = std::get<0>(at::sort(order.slice(0, 0, std::min(budget, full_pools))));
      int32_t* next = out + (segment.begin + i) * params.width();
      for (int64_t p = 0; p < best.size(0); ++p) {
        for (int64_t j = 0; j < params.kpool; ++j) {
          *next++ = static_cast<int32_t>(cu[d] + best[p].item<int64_t>() * params.kpool + j);
        }
      }
      if (!params.select_tail) continue;
      for (int64_t j = full_pools * params.kpool; j <= position; ++j) {
        *next++ = static_cast<int32_t>(cu[d] + j);
      }
    }
  }
  return selection.to(q.device());
}

}  // namespace lockstep::model
