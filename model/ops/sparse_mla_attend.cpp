#include "model/ops/sparse_mla_attend.hpp"

#include <algorithm>
#include <limits>

#include "model/ops/chain_gemm.hpp"
#include "model/ops/fp8_kernel.hpp"
#include "model/ops/vector_exp.hpp"

namespace lockstep::model::mla {
namespace {

constexpr int64_t kTileKeys = 96;
constexpr int64_t kLanes = 16;

float to_bf16(float x) { return round_bf16(x); }
double to_bf16(double x) { return x; }

int64_t padded(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

template <typename T>
T* sized(std::vector<T>& buffer, int64_t count) {
  if (static_cast<int64_t>(buffer.size()) < count) buffer.resize(static_cast<size_t>(count));
  return buffer.data();
}

/// dots[row, j] = x[row] . table[keys[j]], one chain over the dimension each.
template <typename T>
void dots_with(const Group<T>& g,
               const RowTable<T>& table,
               const T* x,
               int64_t x_stride,
               T* dots,
               int64_t ld,
               T* tile) {
  for (int64_t j = 0; j < g.longest(); j += kTileKeys) {
    const int64_t n = std::min(kTileKeys, g.longest() - j);
    gather_transposed<T>(table.data, table.stride, g.keys + j, n, table.dim, tile, kTileKeys);
    chain_gemm<T>(g.rows(), n, table.dim, {x, x_stride}, {tile, kTileKeys}, dots + j, ld, false);
  }
}

/// In place: dots -> exp(score - max), and returns their sum; zero from `count` to the padded end.
/// Sixteen interleaved partial sums, so that a row's sum depends on its own list alone.
template <typename T>
T exponentials(T* s, int64_t count, int64_t ld, T scale, bool round_scores) {
  constexpr T kNone = -std::numeric_limits<T>::infinity();
  std::fill(s + count, s + ld, kNone);
  const int64_t n = padded(count);
  T top[kLanes], sum[kLanes] = {};
  std::fill(top, top + kLanes, kNone);
  for (int64_t j = 0; j < n; j += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) {
      const T x = round_scores ? to_bf16(to_bf16(s[j + l]) * scale) : s[j + l] * scale;
      s[j + l] = x;
      top[l] = x > top[l] ? x : top[l];
    }
  }
  const T most = *std::max_element(top, top + kLanes);
  for (int64_t j = 0; j < n; j += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) {
      const T e = exp_of(s[j + l] - most);
      s[j + l] = e;
      sum[l] += e;
    }
  }
  std::fill(s + n, s + ld, T(0));
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t l = 0; l < half; ++l) sum[l] += sum[l + half];
  }
  return sum[0];
}

/// exponentials() for every row of the group.
template <typename T>
void softmax_rows(const Group<T>& g, T* e, int64_t ld, T* sums) {
  for (int64_t r = 0; r < g.rows(); ++r) {
    const int64_t count = g.counts[r / g.heads];
    if (count == 0) {
      std::fill_n(e + r * ld, ld, T(0));
      sums[r] = 0;
    } else {
      sums[r] = exponentials(e + r * ld, count, ld, g.scale, g.rounding.scores);
    }
  }
}

/// What multiplies the values; may be written over the exponentials.
template <typename T>
void probabilities_of(const T* e, int64_t ld, T sum, Probabilities form, T* p) {
  switch (form) {
    case Probabilities::kPlain:
      if (p != e) std::copy_n(e, ld, p);
      break;
    case Probabilities::kUnnormalised:
      for (int64_t j = 0; j < ld; ++j) p[j] = to_bf16(e[j]);
      break;
    case Probabilities::kNormalised:
      for (int64_t j = 0; j < ld; ++j) p[j] = to_bf16(e[j] / sum);
      break;
  }
}

template <typename T>
void finish_row(const Rounding& rounding, T sum, T* out, int64_t dim) {
  if (rounding.probabilities != Probabilities::kNormalised) {
    for (int64_t c = 0; c < dim; ++c) out[c] /= sum;
  }
  if (rounding.act) round_rows(out, 1, dim, dim);
}

template <typename T>
void clear_rows(T* x, int64_t rows, int64_t dim, int64_t stride) {
  for (int64_t r = 0; r < rows; ++r) std::fill_n(x + r * stride, dim, T(0));
}

/// out[row] = sum_j p[row, j] values[j] in list order.
template <typename T>
void weigh(const Group<T>& g,
           const RowTable<T>& table,
           const T* p,
           int64_t ld,
           T* out,
           int64_t out_stride) {
  chain_gemm<T>(g.rows(),
                table.dim,
                g.longest(),
                {p, ld},
                {table.data, table.stride, g.keys},
                out,
                out_stride,
                false);
}

template <typename T>
T lane_dot(const T* a, const T* b, int64_t n) {
  T lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) lanes[l] = std::fma(a[i + l], b[i + l], lanes[l]);
  }
  for (int64_t l = 0; i < n; ++i, ++l) lanes[l] = std::fma(a[i], b[i], lanes[l]);
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}

}  // namespace

void round_rows(float* x, int64_t rows, int64_t width, int64_t stride) {
  for (int64_t r = 0; r < rows; ++r) {
    float* row = x + r * stride;
    for (int64_t c = 0; c < width; ++c) row[c] = round_bf16(row[c]);
  }
}

void round_rows(double*, int64_t, int64_t, int64_t) {}

template <typename T>
void attend(const Group<T>& g,
            const T* q,
            int64_t q_stride,
            T* out,
            int64_t out_stride,
            AttendScratch<T>& scratch) {
  const int64_t ld = padded(g.longest()), rows = g.rows(), dim = g.value_rows.dim;
  if (g.longest() == 0) return clear_rows(out, rows, dim, out_stride);
  T* sums = sized(scratch.sums, rows);
  T* e = sized(scratch.exponentials, rows * ld);
  dots_with(g, g.key_rows, q, q_stride, e, ld, sized(scratch.tile, kTileKeys * g.key_rows.dim));
  softmax_rows(g, e, ld, sums);
  for (int64_t r = 0; r < rows; ++r) {
    if (sums[r] > 0) {
      probabilities_of(e + r * ld, ld, sums[r], g.rounding.probabilities, e + r * ld);
    }
  }
  weigh(g, g.value_rows, e, ld, out, out_stride);
  for (int64_t r = 0; r < rows; ++r) {
    if (sums[r] > 0) finish_row(g.rounding, sums[r], out + r * out_stride, dim);
  }
}

template <typename T>
void attend_backward(const Group<T>& g,
                     const T* q,
                     int64_t q_stride,
                     const T* d_out,
                     int64_t d_out_stride,
                     Delta delta_form,
                     T* out,
                     int64_t out_stride,
                     T* d_q,
                     int64_t d_q_stride,
                     T* const* coefficients,
                     AttendScratch<T>& scratch) {
  const int64_t ld = padded(g.longest()), rows = g.rows();
  const int64_t key_dim = g.key_rows.dim, value_dim = g.value_rows.dim;
  if (g.longest() == 0) {
    if (delta_form == Delta::kOutput) clear_rows(out, rows, value_dim, out_stride);
    return clear_rows(d_q, rows, key_dim, d_q_stride);
  }
  T* e = sized(scratch.exponentials, rows * ld);
  T* ds = sized(scratch.gradients, rows * ld);
  T* tile = sized(scratch.tile, kTileKeys * std::max(key_dim, value_dim));
  if (g.key_rows.data == g.value_rows.data) {
    // Keys and values are the same rows: gather each tile once.
    for (int64_t j = 0; j < g.longest(); j += kTileKeys) {
      const int64_t n = std::min(kTileKeys, g.longest() - j);
      gather_transposed<T>(
          g.key_rows.data, g.key_rows.stride, g.keys + j, n, key_dim, tile, kTileKeys);
      chain_gemm<T>(rows, n, key_dim, {q, q_stride}, {tile, kTileKeys}, e + j, ld, false);
      chain_gemm<T>(rows, n, key_dim, {d_out, d_out_stride}, {tile, kTileKeys}, ds + j, ld, false);
    }
  } else {
    dots_with(g, g.key_rows, q, q_stride, e, ld, tile);
    dots_with(g, g.value_rows, d_out, d_out_stride, ds, ld, tile);
  }
  T* sums = sized(scratch.sums, rows);
  softmax_rows(g, e, ld, sums);
  if (delta_form == Delta::kOutput) {
    T* p = e;
    if (g.rounding.probabilities != Probabilities::kPlain) {
      p = sized(scratch.probabilities, rows * ld);
      for (int64_t r = 0; r < rows; ++r) {
        if (sums[r] > 0) {
          probabilities_of(e + r * ld, ld, sums[r], g.rounding.probabilities, p + r * ld);
        } else {
          std::fill_n(p + r * ld, ld, T(0));
        }
      }
    }
    weigh(g, g.value_rows, p, ld, out, out_stride);
    for (int64_t r = 0; r < rows; ++r) {
      if (sums[r] > 0) finish_row(g.rounding, sums[r], out + r * out_stride, value_dim);
    }
  }
  const bool act = g.rounding.act;
  const bool round_p = act && g.rounding.probabilities != Probabilities::kPlain;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t count = g.counts[r / g.heads];
    T *p = e + r * ld, *d = ds + r * ld;
    std::fill(d + count, d + ld, T(0));
    if (count == 0) continue;
    const T sum = sums[r];
    for (int64_t j = 0; j < ld; ++j) p[j] /= sum;
    T delta;
    if (delta_form == Delta::kOutput) {
      delta = lane_dot(d_out + r * d_out_stride, out + r * out_stride, value_dim);
    } else {
      if (act) round_rows(d, 1, ld, ld);
      delta = lane_dot(p, d, ld);
    }
    if (g.rounding.scores && act) {
      for (int64_t j = 0; j < ld; ++j) d[j] = to_bf16(to_bf16(p[j] * (d[j] - delta)) * g.scale);
    } else {
      for (int64_t j = 0; j < ld; ++j) d[j] = g.scale * (p[j] * (d[j] - delta));
      if (act) round_rows(d, 1, ld, ld);
    }
    if (round_p) round_rows(p, 1, ld, ld);
  }
  weigh(g, g.key_rows, ds, ld, d_q, d_q_stride);
  if (act) round_rows(d_q, rows, key_dim, d_q_stride);
  for (int64_t i = 0; i < g.num_queries; ++i) {
    const int64_t first = i * g.heads * ld;
    gather_transposed<T>(
        ds + first, ld, nullptr, g.heads, g.counts[i], coefficients[i], 2 * g.heads);
    gather_transposed<T>(
        e + first, ld, nullptr, g.heads, g.counts[i], coefficients[i] + g.heads, 2 * g.heads);
  }
}

#define LOCKSTEP_INSTANTIATE(T)                                                                \
  template void attend<T>(const Group<T>&, const T*, int64_t, T*, int64_t, AttendScratch<T>&); \
  template void attend_backward<T>(const Group<T>&,                                            \
                                   const T*,                                                   \
                                   int64_t,                                                    \
                                   const T*,                                                   \
                                   int64_t,                                                    \
                                   Delta,                                                      \
                                   T*,                                                         \
                                   int64_t,                                                    \
                                   T*,                                                         \
                                   int64_t,                                                    \
                                   T* const*,                                                  \
                                   AttendScratch<T>&);
LOCKSTEP_INSTANTIATE(float)
LOCKSTEP_INSTANTIATE(double)
#undef LOCKSTEP_INSTANTIATE

}  // namespace lockstep::model::mla
