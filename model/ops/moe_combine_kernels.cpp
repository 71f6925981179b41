#include <algorithm>
#include <vector>

#include "model/base/parallel.hpp"
#include "model/ops/moe_kernels.hpp"

namespace lockstep::model {
namespace {
constexpr int64_t kGrain = 64;  // tokens
}

void places_of_tokens(int64_t tokens, int64_t slots, const int64_t* slot_of, int64_t* place) {
  // Rows are visited in ascending order, so that each token's list comes out sorted.
  std::vector<int64_t> filled(static_cast<size_t>(tokens), 0);
  for (int64_t row = 0; row < tokens * slots; ++row) {
    const int64_t token = slot_of[row] / slots;
    place[token * slots + filled[static_cast<size_t>(token)]++] = row;
  }
}

template <typename W>
void combine_forward(const CombineForm& form,
                     const typename W::Act* rows,
                     const int64_t* place,
                     const int64_t* slot_of,
                     const typename W::Acc* weights,
                     typename W::Act* out) {
  using A = typename W::Acc;
  const int64_t D = form.width;
  parallel_for(0, form.tokens, kGrain, [&](int64_t begin, int64_t end) {
    std::vector<A> sum(static_cast<size_t>(D));
    for (int64_t t = begin; t < end; ++t) {
      std::fill(sum.begin(), sum.end(), A(0));
      for (int64_t j = 0; j < form.slots; ++j) {
        const int64_t row = place[t * form.slots + j];
        const typename W::Act* from = rows + row * D;
        const A w = weights[slot_of[row]];
        A* s = sum.data();
        if (form.weigh_rounded && form.sum_rounded) {
          for (int64_t d = 0; d < D; ++d) s[d] = W::round(s[d] + W::round(load(from + d) * w));
        } else if (form.weigh_rounded) {
          for (int64_t d = 0; d < D; ++d) s[d] += W::round(load(from + d) * w);
        } else if (form.sum_rounded) {
          for (int64_t d = 0; d < D; ++d) s[d] = W::round(s[d] + load(from + d) * w);
        } else {
          for (int64_t d = 0; d < D; ++d) s[d] += load(from + d) * w;
        }
      }
      for (int64_t d = 0; d < D; ++d) store(out + t * D + d, sum[static_cast<size_t>(d)]);
    }
  });
}

template <typename W>
void combine_backward(const CombineForm& form,
                      const typename W::Act* rows,
                      const int64_t* slot_of,
                      const typename W::Acc* weights,
                      const typename W::Act* dout,
                      typename W::Act* drows,
                      typename W::Acc* dweights) {
  using A = typename W::Acc;
  const int64_t D = form.width;
  parallel_for(0, form.tokens * form.slots, kGrain, [&](int64_t begin, int64_t end) {
    std::vector<A> row_scratch(static_cast<size_t>(D)), grad_scratch(static_cast<size_t>(D));
    for (int64_t row = begin; row < end; ++row) {
      const int64_t slot = slot_of[row];
      const A* g = widen(dout + slot / form.slots * D, grad_scratch.data(), D);
      const A* v = widen(rows + row * D, row_scratch.data(), D);
      const A w = weights[slot];
      dweights[slot] = dot(g, v, D);
      for (int64_t d = 0; d < D; ++d) store(drows + row * D + d, w * g[d]);
    }
  });
}

template <typename W>
void sum_places(int64_t tokens,
                int64_t slots,
                int64_t width,
                const typename W::Act* rows,
                const int64_t* place,
                typename W::Act* out) {
  using A = typename W::Acc;
  parallel_for(0, tokens, kGrain, [&](int64_t begin, int64_t end) {
    std::vector<A> sum(static_cast<size_t>(width));
    for (int64_t t = begin; t < end; ++t) {
      std::fill(sum.begin(), sum.end(), A(0));
      for (int64_t j = 0; j < slots; ++j) {
        const typename W::Act* from = rows + place[t * slots + j] * width;
        for (int64_t d = 0; d < width; ++d) sum[static_cast<size_t>(d)] += load(from + d);
      }
      for (int64_t d = 0; d < width; ++d) store(out + t * width + d, sum[static_cast<size_t>(d)]);
    }
  });
}

#define LOCKSTEP_COMBINE(W, Act, A)                                                    \
  template void combine_forward<W>(                                                    \
      const CombineForm&, const Act*, const int64_t*, const int64_t*, const A*, Act*); \
  template void combine_backward<W>(                                                   \
      const CombineForm&, const Act*, const int64_t*, const A*, const Act*, Act*, A*); \
  template void sum_places<W>(int64_t, int64_t, int64_t, const Act*, const int64_t*, Act*)
LOCKSTEP_COMBINE(WidthF64, double, double);
LOCKSTEP_COMBINE(WidthF32, float, float);
LOCKSTEP_COMBINE(WidthBf16, Bf16, float);
#undef LOCKSTEP_COMBINE

}  // namespace lockstep::model
