// Selection in whole-tensor functions: no loop over tokens, nothing waits for the device.
#include <algorithm>
#include <limits>

#include "model/ops/indexer.hpp"

namespace lockstep::model::indexer {
namespace {

/// Scores of a block of queries exist at a time, of every head.
constexpr int64_t kScoreElements = int64_t{1} << 28;

/// Rows of the selection for queries at `position` [n] of a document that starts at row `origin`.
Tensor rows_of(const Tensor& scores_nP,
               const Tensor& position_n,
               int64_t origin,
               const IndexerParams& params,
               bool own_pool_first) {
  const int64_t pools = scores_nP.size(1), kpool = params.kpool,
                budget = std::min(params.topk / kpool, pools);
  const Tensor seen_n1 = (position_n + 1).unsqueeze(1);
  const Tensor full_n1 = seen_n1.div(kpool, "floor");
  const Tensor pool_P = at::arange(pools, position_n.options());
  Tensor scores =
      scores_nP.masked_fill(pool_P >= full_n1, -std::numeric_limits<double>::infinity());
  if (own_pool_first) {
    const Tensor own = (pool_P == full_n1 - 1) & (seen_n1.remainder(kpool) == 0);
    scores = scores.masked_fill(own, std::numeric_limits<double>::infinity());
  }
  // A stable descending sort leaves equal scores in index order. Places past a row's pools sort
  // behind them.
  const Tensor taken_n1 = full_n1.clamp_max(budget);
  const Tensor best = std::get<1>(at::sort(scores, /*stable=*/true, 1, /*descending=*/true))
                          .slice(1, 0, budget)
                          .masked_fill(at::arange(budget, pool_P.options()) >= taken_n1, pools);
  const Tensor chosen = std::get<0>(at::sort(best, 1));

  const Tensor column = at::arange(params.width(), position_n.options());
  const Tensor after_n = column - taken_n1 * kpool;  // columns since the last pool
  Tensor token = full_n1 * kpool + after_n;          // of the tail
  const Tensor in_tail = (after_n >= 0) & (token < seen_n1);
  Tensor used = params.select_tail ? in_tail : at::zeros_like(in_tail);
  if (budget > 0) {
    const Tensor pool = chosen.index_select(1, column.div(kpool, "floor").clamp_max(budget - 1));
    token = at::where(after_n < 0, pool * kpool + column.remainder(kpool), token);
    used = used | (after_n < 0);
  }
  return at::where(used, token + origin, at::full({}, -1, token.options())).to(at::kInt);
}

}  // namespace

Tensor select_keys_on_device(const Tensor& q,
                             const Tensor& head_weight,
                             const Tensor& pooled,
                             const Packing& packing,
                             const IndexerParams& params,
                             const Numerics& num) {
  check_select(q, head_weight, pooled, packing, params, num);
  const at::NoGradGuard no_grad;
  const std::vector<int64_t>& cu = packing.cu_seqlens();
  const std::vector<int64_t> first_pool = pool_offsets(cu, params.kpool);
  const bool own_pool_first = num.is<Switch::kOwnPool>("always");
  std::vector<Tensor> rows{at::empty({0, params.width()}, q.options().dtype(at::kInt))};
  for (const Segment& segment : packing.segments()) {
    const auto d = static_cast<size_t>(segment.document);
    const Tensor pools = pooled.slice(0, first_pool[d], first_pool[d + 1]);
    const int64_t step = std::max<int64_t>(
        1, kScoreElements / (params.num_heads * std::max<int64_t>(1, pools.size(0))));
    for (int64_t begin = segment.begin; begin < segment.end; begin += step) {
      const int64_t end = std::min(begin + step, segment.end);
      const int64_t position = segment.position + begin - segment.begin;
      rows.push_back(rows_of(
          plain_scores(q.slice(0, begin, end), head_weight.slice(0, begin, end), pools, num),
          at::arange(position, position + end - begin, q.options().dtype(at::kLong)),
          cu[d],
          params,
          own_pool_first));
    }
  }
  return at::cat(rows);
}

}  // namespace lockstep::model::indexer
