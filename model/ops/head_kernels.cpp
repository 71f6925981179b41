// Tiles of tokens times panels of the vocabulary. A panel's maximum and sums are merged in panel
// order; the panels depend on the vocabulary only, so that no row changes with the batch.
#include "model/ops/head_kernels.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "model/base/parallel.hpp"
#include "model/base/scalar.hpp"

namespace lockstep::model {
namespace {

constexpr int64_t kTileRows = 128;      // tokens
constexpr int64_t kGradientRows = 256;  // vocabulary entries of dweight per task

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <typename A>
A sum_of(const A* v, int64_t n) {
  using V = Vec<A>;
  typename V::Type s{};
  int64_t i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) s += V::load(v + i);
  A total = V::sum(s);
  for (; i < n; ++i) total += v[i];
  return total;
}

template <typename A>
A max_of(const A* v, int64_t n) {
  using V = Vec<A>;
  A best = -std::numeric_limits<A>::infinity();
  int64_t i = 0;
  if (n >= V::kLanes) {
    typename V::Type m = V::load(v);
    for (i = V::kLanes; i + V::kLanes <= n; i += V::kLanes) {
      const typename V::Type x = V::load(v + i);
      m = x > m ? x : m;
    }
    A lanes[V::kLanes];
    V::store(lanes, m);
    for (const A x : lanes) best = std::max(best, x);
  }
  for (; i < n; ++i) best = std::max(best, v[i]);
  return best;
}

/// Loops over (tile of tokens, panel) with the panel's scaled logits in a buffer.
template <typename A, typename F>
void for_each_panel(const HeadForm& form, const A* h, const A* weight, F&& body) {
  const bool fixed = form.tiles == RowTiles::kFixed;
  const int64_t tile = fixed ? kFixedTileRows : kTileRows, panel = std::min(kHeadPanel, form.vocab);
  const int64_t panels = ceil_div(form.vocab, panel);
  parallel_for(0, ceil_div(form.tokens, tile) * panels, 1, [&](int64_t begin, int64_t end) {
    std::vector<A> logits(static_cast<size_t>(tile * panel));
    std::vector<A> padding(fixed ? static_cast<size_t>(kFixedTileRows * (form.width + panel)) : 0);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t t0 = task / panels * tile, v0 = task % panels * panel;
      const int64_t rows = std::min(tile, form.tokens - t0),
                    columns = std::min(panel, form.vocab - v0);
      const auto compute = [&] {
        rows_product(Op::kTranspose,
                     rows,
                     columns,
                     form.width,
                     h + t0 * form.width,
                     form.width,
                     weight + v0 * form.width,
                     form.width,
                     logits.data(),
                     columns,
                     form.tiles,
                     padding.data());
        const int64_t count = rows * columns;
        A* z = logits.data();
        if constexpr (std::is_same_v<A, float>) {
          if (form.round_logits) {
            for (int64_t i = 0; i < count; ++i) z[i] = round_bf16(z[i]);
          }
        }
        if (form.form == TemperatureForm::kMultiply && form.temperature != 1) {
          const A factor = static_cast<A>(1 / form.temperature);
          for (int64_t i = 0; i < count; ++i) z[i] *= factor;
        } else if (form.form == TemperatureForm::kDivide && form.temperature != 1) {
          const A divisor = static_cast<A>(form.temperature);
          for (int64_t i = 0; i < count; ++i) z[i] /= divisor;
        }
        return z;
      };
      body(t0, rows, v0, columns, compute);
    }
  });
}

}  // namespace

template <typename A>
void head_panels(const HeadForm& form,
                 const A* h,
                 const A* weight,
                 const int64_t* labels,
                 bool entropy,
                 PanelSums<A>* sums,
                 A* label_logits) {
  const int64_t panels = head_panel_count(form.vocab);
  for_each_panel<A>(
      form, h, weight, [&](int64_t t0, int64_t rows, int64_t v0, int64_t columns, auto compute) {
        const A* logits = compute();
        std::vector<A> exponentials(static_cast<size_t>(columns));
        A* e = exponentials.data();
        for (int64_t r = 0; r < rows; ++r) {
          const A* z = logits + r * columns;
          const int64_t t = t0 + r;
          const A largest = max_of(z, columns);
          for (int64_t v = 0; v < columns; ++v) e[v] = exp_fast(z[v] - largest);
          sums[t * panels + v0 / kHeadPanel] = {
              largest, sum_of(e, columns), entropy ? dot(e, z, columns) : A(0)};
          // At most one panel holds the label.
          if (labels[t] >= v0 && labels[t] < v0 + columns) label_logits[t] = z[labels[t] - v0];
        }
      });
}

template <typename A>
void head_merge(int64_t tokens,
                int64_t panels,
                const PanelSums<A>* sums,
                const int64_t* labels,
                A* logprobs,
                A* log_sum,
                A* entropy) {
  for (int64_t t = 0; t < tokens; ++t) {
    const PanelSums<A>* s = sums + t * panels;
    A largest = s[0].largest, sum = 0, weighted = 0;
    for (int64_t p = 1; p < panels; ++p) largest = std::max(largest, s[p].largest);
    for (int64_t p = 0; p < panels; ++p) {
      const A factor = std::exp(s[p].largest - largest);
      sum += s[p].sum * factor;
      weighted += s[p].weighted * factor;
    }
    log_sum[t] = largest + std::log(sum);
    logprobs[t] = labels[t] < 0 ? A(0) : logprobs[t] - log_sum[t];
    if (entropy != nullptr) entropy[t] = log_sum[t] - weighted / sum;
  }
}

template <typename A>
void head_forward(const HeadForm& form,
                  const A* h,
                  const A* weight,
                  const int64_t* labels,
                  A* logprobs,
                  A* log_sum,
                  A* entropy) {
  const int64_t panels = head_panel_count(form.vocab);
  std::vector<PanelSums<A>> sums(static_cast<size_t>(form.tokens * panels));
  head_panels(form, h, weight, labels, entropy != nullptr, sums.data(), logprobs);
  head_merge(form.tokens, panels, sums.data(), labels, logprobs, log_sum, entropy);
}

template <typename A>
void head_logit_gradient(const HeadForm& form,
                         const A* h,
                         const A* weight,
                         const int64_t* labels,
                         const A* log_sum,
                         const A* dlogprobs,
                         A* dlogits) {
  const A factor =
      form.form == TemperatureForm::kMultiply ? static_cast<A>(1 / form.temperature) : A(1);
  const A divisor = form.form == TemperatureForm::kDivide ? static_cast<A>(form.temperature) : A(1);
  for_each_panel<A>(
      form, h, weight, [&](int64_t t0, int64_t rows, int64_t v0, int64_t columns, auto compute) {
        const auto wanted = [&](int64_t t) { return labels[t] >= 0 && dlogprobs[t] != A(0); };
        bool any = false;
        for (int64_t r = 0; r < rows; ++r) any = any || wanted(t0 + r);
        const A* logits = any ? compute() : nullptr;
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t t = t0 + r;
          A* d = dlogits + t * form.vocab + v0;
          if (!wanted(t)) {
            std::fill_n(d, columns, A(0));
            continue;
          }
          const A *z = logits + r * columns, g = dlogprobs[t], shift = log_sum[t];
          for (int64_t v = 0; v < columns; ++v) d[v] = -g * exp_fast(z[v] - shift);
          if (labels[t] >= v0 && labels[t] < v0 + columns) d[labels[t] - v0] += g;
          if (form.form == TemperatureForm::kDivide) {
            for (int64_t v = 0; v < columns; ++v) d[v] /= divisor;
          } else {
            for (int64_t v = 0; v < columns; ++v) d[v] *= factor;
          }
          if constexpr (std::is_same_v<A, float>) {
            if (form.round_logits) {
              for (int64_t v = 0; v < columns; ++v) d[v] = round_bf16(d[v]);
            }
          }
        }
      });
}

template <typename A>
void head_weight_gradient(
    const HeadForm& form, const A* dlogits, const A* h, bool add, A* dweight) {
  const int64_t V = form.vocab, D = form.width;
  const int64_t rows = V >= 8 * kGradientRows ? kGradientRows : 64;
  parallel_for(0, ceil_div(V, rows), 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t v0 = task * rows;
      sum_over_rows(
          std::min(rows, V - v0), D, form.tokens, dlogits + v0, V, h, D, add, dweight + v0 * D, D);
    }
  });
}

#define LOCKSTEP_HEAD(A)                                                                       \
  template void head_panels(                                                                   \
      const HeadForm&, const A*, const A*, const int64_t*, bool, PanelSums<A>*, A*);           \
  template void head_merge(int64_t, int64_t, const PanelSums<A>*, const int64_t*, A*, A*, A*); \
  template void head_forward(const HeadForm&, const A*, const A*, const int64_t*, A*, A*, A*); \
  template void head_logit_gradient(                                                           \
      const HeadForm&, const A*, const A*, const int64_t*, const A*, const A*, A*);            \
  template void head_weight_gradient(const HeadForm&, const A*, const A*, bool, A*)
LOCKSTEP_HEAD(float);
LOCKSTEP_HEAD(double);
#undef LOCKSTEP_HEAD

}  // namespace lockstep::model
