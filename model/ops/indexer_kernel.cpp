#include "model/ops/indexer_kernel.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <type_traits>

#include "model/ops/chain_gemm.hpp"
#include "model/ops/vector_exp.hpp"

namespace lockstep::model::indexer {
namespace {

float rounded(float x) { return round_bf16(x); }
double rounded(double x) { return x; }

/// Sum with eight interleaved partial sums, so that the order is fixed and vectorisable.
template <typename T, typename F>
T lane_sum(int64_t n, F value) {
  T lanes[8] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int64_t l = 0; l < 8; ++l) lanes[l] += value(i + l);
  }
  for (int64_t l = 0; i < n; ++i, ++l) lanes[l] += value(i);
  return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) +
         ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

/// Equal numbers (also +0 and -0) have equal keys, NaN is last.
template <typename T>
SortKey<T> sort_key(T score) {
  using K = SortKey<T>;
  constexpr K kMax = std::numeric_limits<K>::max();
  const K bits = std::bit_cast<K>(score + T(0));
  const K key = bits < 0 ? static_cast<K>(bits ^ kMax) : bits;
  return score == score ? key : static_cast<K>(kMax - 1);
}

template <typename K>
int64_t count_at_least(const K* keys, int64_t m, K bound) {
  K count = 0;
  for (int64_t i = 0; i < m; ++i) count += keys[i] >= bound ? K(1) : K(0);
  return static_cast<int64_t>(count);
}

}  // namespace

template <typename T>
void layer_norm(const T* x,
                const T* weight,
                const T* bias,
                int64_t rows,
                int64_t d,
                T eps,
                bool round,
                T* out) {
  for (int64_t r = 0; r < rows; ++r, x += d, out += d) {
    const T mean = lane_sum<T>(d, [&](int64_t i) { return x[i]; }) / static_cast<T>(d);
    const T variance = lane_sum<T>(d,
                                   [&](int64_t i) {
                                     const T centred = x[i] - mean;
                                     return centred * centred;
                                   }) /
                       static_cast<T>(d);
    const T scale = T(1) / std::sqrt(variance + eps);
    for (int64_t i = 0; i < d; ++i) {
      const T y = (x[i] - mean) * scale * weight[i] + bias[i];
      out[i] = round ? rounded(y) : y;
    }
  }
}

template <typename T>
void pool(const T* k,
          const T* gate,
          const T* ape,
          int64_t kpool,
          int64_t d,
          PoolForm form,
          T* scratch,
          T* out) {
  T* top = scratch;
  T* den = scratch + d;
  for (int64_t c = 0; c < d; ++c) top[c] = gate[c] + ape[c];
  for (int64_t j = 1; j < kpool; ++j) {
    for (int64_t c = 0; c < d; ++c) top[c] = std::max(top[c], gate[j * d + c] + ape[j * d + c]);
  }
  std::fill(out, out + d, T(0));
  std::fill(den, den + d, T(0));
  for (int64_t j = 0; j < kpool; ++j) {
    for (int64_t c = 0; c < d; ++c) {
      const T e = exp_of(gate[j * d + c] + ape[j * d + c] - top[c]);
      den[c] += e;
      if (form != PoolForm::kBf16Weights) out[c] += e * k[j * d + c];
    }
  }
  if (form == PoolForm::kBf16Weights) {
    for (int64_t j = 0; j < kpool; ++j) {
      for (int64_t c = 0; c < d; ++c) {
        const T weight = rounded(exp_of(gate[j * d + c] + ape[j * d + c] - top[c]) / den[c]);
        out[c] += rounded(weight * k[j * d + c]);
      }
    }
    for (int64_t c = 0; c < d; ++c) out[c] = rounded(out[c]);
  } else {
    for (int64_t c = 0; c < d; ++c) {
      const T mean = out[c] / den[c];
      out[c] = form == PoolForm::kOneRounding ? rounded(mean) : mean;
    }
  }
}

template <typename T>
std::vector<T> pack_pools(const T* pooled, int64_t num_pools, int64_t d) {
  const int64_t panels = (num_pools + kPanel - 1) / kPanel;
  std::vector<T> out(static_cast<size_t>(panels * d * kPanel), T(0));
  for (int64_t p = 0; p < panels; ++p) {
    gather_transposed<T>(pooled + p * kPanel * d,
                         d,
                         nullptr,
                         std::min(kPanel, num_pools - p * kPanel),
                         d,
                         out.data() + p * kPanel * d,
                         kPanel);
  }
  return out;
}

namespace {

/// Brings the block's queries and weights into the form that the dot products take.
template <typename T>
void prepare_queries(const Scorer<T>& s, int64_t row, int64_t n, Scratch<T>& scratch) {
  const int64_t width = s.heads * s.d, count = n * width;
  scratch.q.resize(static_cast<size_t>(count));
  scratch.weight.resize(static_cast<size_t>(n * s.heads));
  if (s.q.bf16 != nullptr) {
    const uint16_t* bits = s.q.bf16 + row * width;
    for (int64_t i = 0; i < count; ++i) {
      scratch.q[static_cast<size_t>(i)] =
          static_cast<T>(std::bit_cast<float>(static_cast<uint32_t>(bits[i]) << 16));
    }
  } else {
    std::copy_n(s.q.values + row * width, count, scratch.q.data());
  }
  std::copy_n(s.head_weight + row * s.heads, n * s.heads, scratch.weight.data());
  if constexpr (std::is_same_v<T, float>) {
    if (s.form == DotForm::kFp8) {
      float scales[256];
      if (s.hadamard) hadamard_rows(scratch.q.data(), n * s.heads, s.d);
      for (int64_t r = 0; r < n * s.heads; r += 256) {
        const int64_t part = std::min<int64_t>(256, n * s.heads - r);
        float* q = scratch.q.data() + r * s.d;
        quantise_rows_to_values(q, part, s.d, s.scale_mode, q, scales);
        for (int64_t i = 0; i < part; ++i) {
          float& w = scratch.weight[static_cast<size_t>(r + i)];
          w = (w * scales[i]) * s.weight_scale;
        }
      }
    }
  }
}

/// scores[0..n) = sum over heads of w relu(scaled dot); dots [heads, kPanel].
template <typename T>
void reduce_heads(const Scorer<T>& s, const T* dots, const T* weight, int64_t n, T* scores) {
  constexpr int64_t kBlock = 32;
  for (int64_t j = 0; j < n; j += kBlock) {
    // Columns past n hold products with the panel's padding or an earlier block's numbers; they are
    // computed and not stored.
    T sum[kBlock] = {};
    for (int64_t h = 0; h < s.heads; ++h) {
      const T* dot = dots + h * kPanel + j;
      const T w = weight[h];
      if (s.form == DotForm::kRounded) {
        for (int64_t i = 0; i < kBlock; ++i) {
          const T x = rounded(dot[i]) * s.dot_scale;
          sum[i] = std::fma(w, x > T(0) ? x : T(0), sum[i]);
        }
      } else {
        for (int64_t i = 0; i < kBlock; ++i) {
          const T x = dot[i] * s.dot_scale;
          sum[i] = std::fma(w, x > T(0) ? x : T(0), sum[i]);
        }
      }
    }
    std::copy_n(sum, std::min(kBlock, n - j), scores + j);
  }
}

}  // namespace

template <typename T>
void score_block(const Scorer<T>& s,
                 int64_t row,
                 int64_t n,
                 const int64_t* visible,
                 const T* panels,
                 const T* pool_scale,
                 Scratch<T>& scratch) {
  prepare_queries(s, row, n, scratch);
  scratch.dots.resize(static_cast<size_t>(s.heads * kPanel));
  T scores[kPanel];
  const int64_t most = *std::max_element(visible, visible + n);
  for (int64_t first = 0; first < most; first += kPanel) {
    const T* panel = panels + first * s.d;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t columns = std::min(kPanel, visible[i] - first);
      if (columns <= 0) continue;
      chain_gemm<T>(s.heads,
                    columns,
                    s.d,
                    {scratch.q.data() + i * s.heads * s.d, s.d},
                    {panel, kPanel},
                    scratch.dots.data(),
                    kPanel,
                    false);
      reduce_heads(s, scratch.dots.data(), scratch.weight.data() + i * s.heads, columns, scores);
      if (pool_scale != nullptr) {
        for (int64_t j = 0; j < columns; ++j) scores[j] *= pool_scale[first + j];
      }
      scratch.tops[i].offer(scores, first, columns);
    }
  }
}

template <typename T>
void TopPools<T>::begin(int64_t k, int64_t forced) {
  k_ = k;
  forced_ = forced;
  count_ = 0;
  bound_ = std::numeric_limits<SortKey<T>>::min();  // no score's key
  const auto room = static_cast<size_t>(k + std::max(k, kPanel));
  keys_.resize(room);
  pools_.resize(room);
}

template <typename T>
void TopPools<T>::offer(const T* scores, int64_t first, int64_t n) {
  using K = SortKey<T>;
  constexpr int64_t kBlock = 32;
  K keys[kPanel];
  for (int64_t i = 0; i < n; ++i) keys[i] = sort_key(scores[i]);
  if (forced_ >= first && forced_ < first + n) {
    keys[forced_ - first] = std::numeric_limits<K>::max() - 1;
  }
  if (count_ + n > static_cast<int64_t>(keys_.size())) drop_all_but_k();
  for (int64_t b = 0; b < n; b += kBlock) {
    const int64_t end = std::min(n, b + kBlock);
    K any = 0;  // one vectorised look; most blocks of a long row have none
    for (int64_t i = b; i < end; ++i) any |= keys[i] > bound_ ? K(1) : K(0);
    if (any == 0) continue;
    for (int64_t i = b; i < end; ++i) {
      if (keys[i] <= bound_) continue;
      keys_[static_cast<size_t>(count_)] = keys[i];
      pools_[static_cast<size_t>(count_)] = static_cast<int32_t>(first + i);
      ++count_;
    }
  }
}

template <typename T>
void TopPools<T>::finish(int32_t* out) {
  drop_all_but_k();
  std::copy_n(pools_.data(), k_, out);
}

template <typename T>
void TopPools<T>::drop_all_but_k() {
  using K = SortKey<T>;
  if (count_ <= k_) return;
  K* keys = keys_.data();
  const auto [lowest, highest] = std::minmax_element(keys, keys + count_);
  K low = *lowest, high = *highest;
  // Bisection for a bound that at least k keys reach and, one higher, fewer than k: each step is
  // one vectorised count, and it usually ends early at a bound that exactly k keys reach.
  using U = std::make_unsigned_t<K>;
  int64_t above = 0;
  bool exact = false;  // keys >= low are the k
  ++high;
  while (!exact && static_cast<U>(high) - static_cast<U>(low) > 1) {
    const auto middle =
        static_cast<K>(static_cast<U>(low) + (static_cast<U>(high) - static_cast<U>(low)) / 2);
    const int64_t reached = count_at_least(keys, count_, middle);
    if (reached >= k_) {
      low = middle;
      exact = reached == k_;
    } else {
      high = middle;
      above = reached;
    }
  }
  // `above` keys exceed low; the rest of the k are the first keys equal to it.
  int64_t ties = k_ - above, kept = 0;
  K least = std::numeric_limits<K>::max();
  for (int64_t i = 0; kept < k_; ++i) {
    const K key = keys[i];
    const bool take = exact ? key >= low : key > low || (key == low && ties-- > 0);
    if (!take) continue;
    least = std::min(least, key);
    keys[kept] = key;
    pools_[static_cast<size_t>(kept++)] = pools_[static_cast<size_t>(i)];
  }
  count_ = k_;
  bound_ = least;
}

#define LOCKSTEP_INSTANTIATE(T)                                                             \
  template void layer_norm<T>(const T*, const T*, const T*, int64_t, int64_t, T, bool, T*); \
  template void pool<T>(const T*, const T*, const T*, int64_t, int64_t, PoolForm, T*, T*);  \
  template std::vector<T> pack_pools<T>(const T*, int64_t, int64_t);                        \
  template void score_block<T>(                                                             \
      const Scorer<T>&, int64_t, int64_t, const int64_t*, const T*, const T*, Scratch<T>&); \
  template class TopPools<T>;
LOCKSTEP_INSTANTIATE(float)
LOCKSTEP_INSTANTIATE(double)
#undef LOCKSTEP_INSTANTIATE

}  // namespace lockstep::model::indexer
