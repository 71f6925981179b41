#include "model/ops/indexer.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <numeric>
#include <type_traits>

#include "model/base/device.hpp"
#include "model/base/op_timer.hpp"
#include "model/ops/dynamic_tasks.hpp"
#include "model/ops/fp8.hpp"
#include "model/ops/indexer_kernel.hpp"

namespace lockstep::model {
namespace {

constexpr int64_t kRowGrain = 256;

/// A contiguous copy or view in acc, without history.
Tensor in_acc(const Tensor& x, const Numerics& num) {
  return x.detach().to(num.acc()).contiguous();
}

/// How the threads' time divides between scoring and selecting, while operators are timed.
class Turns {
 public:
  /// Calls work() and counts its time for one of the two.
  template <typename Work>
  void scoring(Work work) {
    measured(scoring_ns_, work);
  }
  template <typename Work>
  void selecting(Work work) {
    measured(selecting_ns_, work);
  }
  [[nodiscard]] double selecting_part() const {
    const auto scoring = static_cast<double>(scoring_ns_),
               rest = static_cast<double>(selecting_ns_);
    return rest > 0 ? rest / (scoring + rest) : 0.0;
  }

 private:
  template <typename Work>
  void measured(std::atomic<int64_t>& sum, Work& work) const {
    if (!on_) return work();
    const auto start = std::chrono::steady_clock::now();
    work();
    sum += std::chrono::nanoseconds(std::chrono::steady_clock::now() - start).count();
  }

  bool on_ = op_timing();
  std::atomic<int64_t> scoring_ns_{0}, selecting_ns_{0};
};

/// Queries of consecutive local rows of one document.
struct QueryBlock {
  int64_t document, row, position, count;
};

std::vector<QueryBlock> query_blocks(const Packing& packing) {
  std::vector<QueryBlock> blocks;
  for (const Segment& s : packing.segments()) {
    for (int64_t i = 0; i < s.length(); i += indexer::kQueryBlock) {
      blocks.push_back({s.document,
                        s.begin + i,
                        s.position + i,
                        std::min(indexer::kQueryBlock, s.length() - i)});
    }
  }
  return blocks;
}

/// Writes one row: pools as kpool consecutive tokens from `origin`, then the tail, then -1.
void write_row(const IndexerParams& params,
               int64_t origin,
               int64_t position,
               const int32_t* pools,
               int64_t num_pools,
               int32_t* out) {
  int32_t* const end = out + params.width();
  for (int64_t p = 0; p < num_pools; ++p) {
    const auto first = static_cast<int32_t>(origin + pools[p] * params.kpool);
    for (int32_t j = 0; j < static_cast<int32_t>(params.kpool); ++j) *out++ = first + j;
  }
  if (params.select_tail) {
    for (int64_t j = (position + 1) / params.kpool * params.kpool; j <= position; ++j) {
      *out++ = static_cast<int32_t>(origin + j);
    }
  }
  std::fill(out, end, -1);
}

template <typename T>
void select_rows(const indexer::Scorer<T>& scorer,
                 const T* pooled,
                 const T* pool_scale,
                 const Packing& packing,
                 const IndexerParams& params,
                 bool own_pool_first,
                 int32_t* out) {
  const std::vector<int64_t>& cu = packing.cu_seqlens();
  const std::vector<int64_t> first_pool = indexer::pool_offsets(cu, params.kpool);
  const int64_t budget = params.topk / params.kpool, width = params.width();
  // Only documents of which some local query sees more pools than it may select are scored.
  std::vector<std::vector<T>> panels(cu.size());
  std::vector<int64_t> scored;
  for (const Segment& s : packing.segments()) {
    const int64_t pools = (s.position + s.length()) / params.kpool;
    if (budget == 0 || pools <= budget) continue;
    scored.push_back(s.document);
  }
  dynamic_tasks(static_cast<int64_t>(scored.size()), [&](int64_t) {
    return [&](int64_t task) {
      const auto d = static_cast<size_t>(scored[static_cast<size_t>(task)]);
      panels[d] = indexer::pack_pools(pooled + first_pool[d] * params.head_dim,
                                      first_pool[d + 1] - first_pool[d],
                                      params.head_dim);
    };
  });
  const std::vector<QueryBlock> blocks = query_blocks(packing);
  OpScope time("indexer scoring");
  Turns turns;
  dynamic_tasks(static_cast<int64_t>(blocks.size()), [&](int64_t) {
    // Scratch of one thread, filled on the first block that needs it.
    return [&,
            scratch = indexer::Scratch<T>(),
            pools = std::vector<int32_t>(static_cast<size_t>(budget))](int64_t task) mutable {
      const QueryBlock& block = blocks[static_cast<size_t>(task)];
      const auto d = static_cast<size_t>(block.document);
      int64_t visible[indexer::kQueryBlock];
      bool any = false;
      for (int64_t i = 0; i < block.count; ++i) {
        const int64_t seen = block.position + i + 1, full = seen / params.kpool;
        const bool completes = seen % params.kpool == 0;
        visible[i] = full > budget && budget > 0 ? full : 0;
        if (visible[i] == 0) continue;
        scratch.tops[i].begin(budget, own_pool_first && completes ? full - 1 : -1);
        any = true;
      }
      if (any) {
        turns.scoring([&] {
          indexer::score_block(scorer,
                               block.row,
                               block.count,
                               visible,
                               panels[d].data(),
                               pool_scale == nullptr ? nullptr : pool_scale + first_pool[d],
                               scratch);
        });
      }
      turns.selecting([&] {
        for (int64_t i = 0; i < block.count; ++i) {
          const int64_t position = block.position + i;
          const int64_t taken = std::min((position + 1) / params.kpool, budget);
          if (visible[i] > 0) {
            scratch.tops[i].finish(pools.data());
          } else {
            std::iota(pools.begin(), pools.begin() + taken, 0);
          }
          write_row(params, cu[d], position, pools.data(), taken, out + (block.row + i) * width);
        }
      });
    };
  });
  time.give("indexer selection", turns.selecting_part());
}

/// Runs f with a null pointer of the accumulation type.
template <typename F>
void with_acc(const Numerics& num, F f) {
  if (num.acc() == at::kDouble)
    f(static_cast<double*>(nullptr));
  else
    f(static_cast<float*>(nullptr));
}

}  // namespace

Tensor indexer_layer_norm(const Tensor& x,
                          const Tensor& weight,
                          const Tensor& bias,
                          const Numerics& num) {
  indexer::check_layer_norm(x, weight, bias, num);
  if (takes_device_form(x)) return indexer_layer_norm_reference(x, weight, bias, num);
  const bool round_parameters = num.rounds<Switch::kIndexerLayerNorm>("bf16");
  const auto parameter = [&](const Tensor& p) {
    return in_acc(round_parameters ? p.to(at::kBFloat16) : p, num);
  };
  const Tensor in = in_acc(x, num), w = parameter(weight), b = parameter(bias);
  Tensor out = at::empty_like(in);
  const int64_t d = x.size(1);
  with_acc(num, [&]<typename T>(T*) {
    const T *src = in.const_data_ptr<T>(), *wp = w.const_data_ptr<T>(), *bp = b.const_data_ptr<T>();
    T* dst = out.data_ptr<T>();
    parallel_for(0, x.size(0), kRowGrain, [&](int64_t begin, int64_t end) {
      indexer::layer_norm<T>(
          src + begin * d, wp, bp, end - begin, d, T(1e-6), num.is_bf16(), dst + begin * d);
    });
  });
  return out.to(num.act());
}

Tensor pool_keys(const Tensor& k,
                 const Tensor& gate,
                 const Tensor& ape,
                 const std::vector<int64_t>& cu,
                 int64_t kpool,
                 const Numerics& num) {
  indexer::check_pool(k, gate, ape, cu, kpool, num);
  if (takes_device_form(k)) return pool_keys_reference(k, gate, ape, cu, kpool, num);
  const auto form = !num.is_bf16() ? indexer::PoolForm::kPlain
                    : num.is<Switch::kPoolSoftmax>("bf16-weights")
                        ? indexer::PoolForm::kBf16Weights
                        : indexer::PoolForm::kOneRounding;
  const std::vector<int64_t> offsets = indexer::pool_offsets(cu, kpool);
  const int64_t d = k.size(1);
  std::vector<int64_t> first_row;
  first_row.reserve(static_cast<size_t>(offsets.back()));
  for (size_t doc = 0; doc + 1 < cu.size(); ++doc) {
    for (int64_t p = 0; p < offsets[doc + 1] - offsets[doc]; ++p) {
      first_row.push_back(cu[doc] + p * kpool);
    }
  }
  const Tensor keys = in_acc(k, num), gates = in_acc(gate, num), bias = in_acc(ape, num);
  Tensor out = at::empty({offsets.back(), d}, keys.options());
  with_acc(num, [&]<typename T>(T*) {
    const T *kp = keys.const_data_ptr<T>(), *gp = gates.const_data_ptr<T>(),
            *ap = bias.const_data_ptr<T>();
    T* dst = out.data_ptr<T>();
    parallel_for(0, offsets.back(), kRowGrain / kpool + 1, [&](int64_t begin, int64_t end) {
      std::vector<T> scratch(static_cast<size_t>(2 * d));
      for (int64_t p = begin; p < end; ++p) {
        const int64_t row = first_row[static_cast<size_t>(p)];
        indexer::pool<T>(
            kp + row * d, gp + row * d, ap, kpool, d, form, scratch.data(), dst + p * d);
      }
    });
  });
  return out.to(num.act());
}

namespace {

/// keys [P, d] in acc; key_scale: of fp8 keys, else undefined.
Tensor select(const Tensor& q,
              const Tensor& head_weight,
              const Tensor& keys,
              const Tensor& key_scale,
              const Packing& packing,
              const IndexerParams& params,
              const Numerics& num) {
  const auto heads = static_cast<double>(params.num_heads),
             dim = static_cast<double>(params.head_dim);
  const bool fp8 = key_scale.defined();
  const Tensor queries = q.detach().contiguous();
  Tensor weight = in_acc(head_weight, num);
  if (!fp8) weight = weight * std::pow(heads, -0.5);
  Tensor selection = at::empty({packing.local_tokens(), params.width()}, at::kInt);
  with_acc(num, [&]<typename T>(T*) {
    indexer::Scorer<T> scorer{{}, weight.const_data_ptr<T>(), params.num_heads, params.head_dim};
    if (num.is_bf16())
      scorer.q.bf16 = static_cast<const uint16_t*>(queries.const_data_ptr());
    else
      scorer.q.values = queries.const_data_ptr<T>();
    if (fp8) {
      scorer.form = indexer::DotForm::kFp8;
      scorer.weight_scale = static_cast<T>(std::pow(dim, -0.5) * std::pow(heads, -0.5));
      scorer.hadamard = num.is<Switch::kHadamard>("on");
      scorer.scale_mode = fp8_scale_mode(num);
    } else {
      scorer.dot_scale = static_cast<T>(std::pow(dim, -0.5));
      if (num.rounds<Switch::kIndexerScoring>("bf16")) scorer.form = indexer::DotForm::kRounded;
    }
    select_rows<T>(scorer,
                   keys.const_data_ptr<T>(),
                   fp8 ? key_scale.const_data_ptr<T>() : nullptr,
                   packing,
                   params,
                   num.is<Switch::kOwnPool>("always"),
                   selection.data_ptr<int32_t>());
  });
  return selection;
}

}  // namespace

Tensor select_keys(const Tensor& q,
                   const Tensor& head_weight,
                   const Tensor& pooled,
                   const Packing& packing,
                   const IndexerParams& params,
                   const Numerics& num) {
  indexer::check_select(q, head_weight, pooled, packing, params, num);
  if (takes_device_form(q))
    return indexer::select_keys_on_device(q, head_weight, pooled, packing, params, num);
  if (num.rounds<Switch::kIndexerScoring>("fp8"))
    return select_keys(q, head_weight, quantise_pools(pooled, num), packing, params, num);
  return select(q, head_weight, in_acc(pooled, num), {}, packing, params, num);
}

Fp8Rows quantise_pools(const Tensor& pooled, const Numerics& num) {
  const Tensor keys = in_acc(pooled, num);
  return quantise_rows(num.is<Switch::kHadamard>("on") ? hadamard(keys) : keys,
                       fp8_scale_mode(num));
}

Tensor select_keys(const Tensor& q,
                   const Tensor& head_weight,
                   const Fp8Rows& pooled,
                   const Packing& packing,
                   const IndexerParams& params,
                   const Numerics& num) {
  LOCKSTEP_CHECK(num.rounds<Switch::kIndexerScoring>("fp8"),
                 kConfig,
                 "select_keys: pools are fp8, but policy {} does not score in fp8 (D30)",
                 num.name());
  check_dtype(pooled.bytes, at::kByte, "select_keys: pooled bytes");
  const Tensor keys = pooled.bytes.view(at::kFloat8_e4m3fn).to(at::kFloat);
  indexer::check_select(q, head_weight, keys.to(num.act()), packing, params, num);
  check_shape(pooled.scale, {keys.size(0)}, "select_keys: pooled scale [P]");
  return select(q, head_weight, keys, pooled.scale.contiguous(), packing, params, num);
}

}  // namespace lockstep::model
