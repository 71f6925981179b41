#include "model/ops/norm_core.hpp"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "model/base/parallel.hpp"

namespace lockstep::model {
namespace {

using simd::load;
using simd::splat;
using simd::store;
using simd::Vec;

int64_t padded(int64_t dim, int64_t pad) { return (dim + pad - 1) / pad * pad; }

/// Runs body(block, first row, last row) over the fixed row blocks.
template <typename F>
void over_blocks(int64_t rows, int64_t dim, F&& body) {
  // Below this many elements a second thread costs more than it saves.
  const int64_t grain = std::max<int64_t>(1, 32768 / (kNormRows * std::max<int64_t>(dim, 1)));
  parallel_for(0, norm_blocks(rows), grain, [&](int64_t begin, int64_t end) {
    const simd::FlushDenormals flush;
    for (int64_t b = begin; b < end; ++b) {
      body(b, b * kNormRows, std::min(rows, (b + 1) * kNormRows));
    }
  });
}

template <typename S, typename R>
R inverse_rms(const NormCall<S, R>& call, const R* x, int64_t width) {
  return 1 / std::sqrt(simd::dot(x, x, width) / static_cast<R>(call.dim) + call.eps);
}

}  // namespace

template <typename S, typename R>
void norm_forward(const NormCall<S, R>& call, S* y) {
  constexpr int64_t kStep = simd::kLanes<R>;
  const int64_t dim = call.dim, width = padded(dim, simd::kPad<R>);
  std::vector<R> weight(static_cast<size_t>(width), R(0));
  std::copy(call.w, call.w + dim, weight.begin());
  over_blocks(call.rows, dim, [&](int64_t, int64_t first, int64_t last) {
    std::vector<R> scratch(static_cast<size_t>(2 * width));
    R* x = scratch.data();
    R* gate = x + width;
    for (int64_t row = first; row < last; ++row) {
      simd::load_row(call.x + row * dim, dim, x, width);
      const Vec<R> r = splat(inverse_rms(call, x, width));
      if (call.gate) simd::load_row(call.gate + row * dim, dim, gate, width);
      for (int64_t i = 0; i < width; i += kStep) {
        Vec<R> xhat = load(x + i) * r;
        if (call.round_xhat) xhat = simd::round_bf16(xhat);
        Vec<R> v = load(weight.data() + i) * xhat;
        if (call.gate) v = v * simd::sigmoid(load(gate + i));
        store(x + i, v);
      }
      simd::store_row(x, dim, y + row * dim);
    }
  });
}

// With h = w xhat (times sigma(gate) = s): dxhat = dy s w, dx = r (dxhat - xhat mean(dxhat xhat)),
// dw = sum_rows dy s xhat, dgate = dy w xhat s (1 - s). In dw and dgate xhat is the rounded one.
template <typename S, typename R>
void norm_backward(
    const NormCall<S, R>& call, const S* dy, S* dx, S* dgate, R* dw_partial, ExactRow* exact) {
  constexpr int64_t kStep = simd::kLanes<R>;
  const int64_t dim = call.dim, width = padded(dim, simd::kPad<R>);
  std::vector<R> weight(static_cast<size_t>(width), R(0));
  std::copy(call.w, call.w + dim, weight.begin());
  over_blocks(call.rows, dim, [&](int64_t block, int64_t first, int64_t last) {
    std::vector<R> scratch(static_cast<size_t>(4 * width), R(0));
    R* x = scratch.data();
    R* d = x + width;
    R* gate = d + width;
    R* dw = gate + width;
    ExactRow::Part part(exact != nullptr ? dim : 0);
    for (int64_t row = first; row < last; ++row) {
      simd::load_row(call.x + row * dim, dim, x, width);
      simd::load_row(dy + row * dim, dim, d, width);
      const R r = inverse_rms(call, x, width);
      if (call.gate) simd::load_row(call.gate + row * dim, dim, gate, width);
      for (int64_t i = 0; i < width; i += kStep) {
        const Vec<R> xhat = load(x + i) * splat(r), wi = load(weight.data() + i);
        const Vec<R> used = call.round_xhat ? simd::round_bf16(xhat) : xhat;
        Vec<R> di = load(d + i);
        if (call.gate) {
          const Vec<R> g = load(gate + i), s = simd::sigmoid(g);
          store(gate + i, di * wi * used * s * simd::sigmoid(-g));
          di = di * s;
        }
        store(dw + i, load(dw + i) + di * used);
        store(d + i, di * wi);
        store(x + i, xhat);
      }
      if (call.gate) simd::store_row(gate, dim, dgate + row * dim);
      const R mean = simd::dot(d, x, width) / static_cast<R>(dim);
      for (int64_t i = 0; i < width; i += kStep) {
        store(x + i, splat(r) * (load(d + i) - load(x + i) * splat(mean)));
      }
      simd::store_row(x, dim, dx + row * dim);
      if constexpr (std::is_same_v<R, float>) {
        if (exact == nullptr) continue;
        part.add(dw);
        std::fill(dw, dw + width, R(0));
      }
    }
    if (exact != nullptr) {
      exact->merge(part);
    } else {
      std::copy(dw, dw + dim, dw_partial + block * dim);
    }
  });
}

template <typename R>
void merge_partials(int64_t blocks, int64_t dim, const R* partial, R* out) {
  std::vector<double> total(static_cast<size_t>(dim), 0.0);
  for (int64_t b = 0; b < blocks; ++b) {
    for (int64_t i = 0; i < dim; ++i) {
      total[static_cast<size_t>(i)] += static_cast<double>(partial[b * dim + i]);
    }
  }
  for (int64_t i = 0; i < dim; ++i) out[i] = static_cast<R>(total[static_cast<size_t>(i)]);
}

#define LOCKSTEP_NORM(S, R)                              \
  template void norm_forward(const NormCall<S, R>&, S*); \
  template void norm_backward(const NormCall<S, R>&, const S*, S*, S*, R*, ExactRow*);
LOCKSTEP_NORM(double, double)
LOCKSTEP_NORM(float, float)
LOCKSTEP_NORM(simd::Bf16, float)
#undef LOCKSTEP_NORM
template void merge_partials(int64_t, int64_t, const float*, float*);
template void merge_partials(int64_t, int64_t, const double*, double*);

}  // namespace lockstep::model
