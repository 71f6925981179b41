// hc_post, forward and backward: one pass over memory, a token's n * D values in the first cache.
#include <vector>

#include "model/base/parallel.hpp"
#include "model/ops/hyper_connection_kernels.hpp"

namespace lockstep::model {
namespace {

constexpr int64_t kGrain = 32;  // tokens

template <typename W>
void round_into(const typename W::Acc* from, int64_t count, bool round, typename W::Acc* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = round ? W::round(from[i]) : from[i];
}

/// to[d] = sum_i c[i * stride] * x[i][d], in order of i. kStreams 0: any number.
template <int kStreams, typename A>
void combine(const A* c, int64_t stride, const A* x, int64_t streams, int64_t width, A* to) {
  if constexpr (kStreams == 4) {
    const A c0 = c[0], c1 = c[stride], c2 = c[2 * stride], c3 = c[3 * stride];
    const A *x1 = x + width, *x2 = x1 + width, *x3 = x2 + width;
    for (int64_t d = 0; d < width; ++d)
      to[d] = ((c0 * x[d] + c1 * x1[d]) + c2 * x2[d]) + c3 * x3[d];
  } else {
    for (int64_t d = 0; d < width; ++d) to[d] = c[0] * x[d];
    for (int64_t i = 1; i < streams; ++i) {
      for (int64_t d = 0; d < width; ++d) to[d] += c[i * stride] * x[i * width + d];
    }
  }
}

template <typename W, typename Out, int kStreams>
void forward_tokens(const HcPostInputs<W>& in, Out* out, int64_t begin, int64_t end) {
  using A = typename W::Acc;
  const int64_t n = in.shape.streams, D = in.shape.width, K = in.shape.row();
  const auto size = [](int64_t v) { return static_cast<size_t>(v); };
  std::vector<A> x_scratch(size(K)), y_scratch(size(D)), post(size(n)), comb(size(n * n)),
      sum(size(D));
  for (int64_t t = begin; t < end; ++t) {
    const A* x = widen(in.x + t * K, x_scratch.data(), K);
    const A* y = widen(in.y + t * D, y_scratch.data(), D);
    round_into<W>(in.post + t * n, n, in.mix.round_coefficients, post.data());
    round_into<W>(in.comb + t * n * n, n * n, in.mix.round_coefficients, comb.data());
    A* s = sum.data();
    for (int64_t j = 0; j < n; ++j) {
      Out* to = out + t * K + j * D;
      const A p = post[size(j)];
      if (in.mix.three_roundings) {
        combine<kStreams>(comb.data() + j, n, x, n, D, s);
        for (int64_t d = 0; d < D; ++d) store(to + d, W::round(p * y[d]) + W::round(s[d]));
      } else if (!in.mix.post_first) {
        combine<kStreams>(comb.data() + j, n, x, n, D, s);
        for (int64_t d = 0; d < D; ++d) store(to + d, s[d] + p * y[d]);
      } else {
        for (int64_t d = 0; d < D; ++d) s[d] = p * y[d];
        for (int64_t i = 0; i < n; ++i) {
          const A c = comb[size(i * n + j)];
          for (int64_t d = 0; d < D; ++d) s[d] += c * x[i * D + d];
        }
        for (int64_t d = 0; d < D; ++d) store(to + d, s[d]);
      }
    }
  }
}

template <typename W, int kStreams>
void backward_tokens(const HcPostInputs<W>& in,
                     const typename W::Act* dout,
                     typename W::Act* dy,
                     typename W::Act* dx,
                     typename W::Acc* dpost,
                     typename W::Acc* dcomb,
                     int64_t begin,
                     int64_t end) {
  using A = typename W::Acc;
  const int64_t n = in.shape.streams, D = in.shape.width, K = in.shape.row();
  const auto size = [](int64_t v) { return static_cast<size_t>(v); };
  std::vector<A> x_scratch(size(K)), g_scratch(size(K)), y_scratch(size(D)), post(size(n)),
      comb(size(n * n)), sum(size(D));
  for (int64_t t = begin; t < end; ++t) {
    const A* x = widen(in.x + t * K, x_scratch.data(), K);
    const A* y = widen(in.y + t * D, y_scratch.data(), D);
    const A* g = widen(dout + t * K, g_scratch.data(), K);
    round_into<W>(in.post + t * n, n, in.mix.round_coefficients, post.data());
    round_into<W>(in.comb + t * n * n, n * n, in.mix.round_coefficients, comb.data());
    for (int64_t j = 0; j < n; ++j) {
      dpost[t * n + j] = dot(g + j * D, y, D);
      for (int64_t i = 0; i < n; ++i) dcomb[(t * n + i) * n + j] = dot(g + j * D, x + i * D, D);
    }
    A* s = sum.data();
    combine<kStreams>(post.data(), 1, g, n, D, s);
    for (int64_t d = 0; d < D; ++d) store(dy + t * D + d, s[d]);
    for (int64_t i = 0; i < n; ++i) {
      combine<kStreams>(comb.data() + i * n, 1, g, n, D, s);
      for (int64_t d = 0; d < D; ++d) store(dx + t * K + i * D + d, s[d]);
    }
  }
}

}  // namespace

template <typename W, typename Out>
void hc_post_forward(const HcPostInputs<W>& in, Out* out) {
  parallel_for(0, in.shape.tokens, kGrain, [&](int64_t b, int64_t e) {
    in.shape.streams == 4 ? forward_tokens<W, Out, 4>(in, out, b, e)
                          : forward_tokens<W, Out, 0>(in, out, b, e);
  });
}

template <typename W>
void hc_post_backward(const HcPostInputs<W>& in,
                      const typename W::Act* dout,
                      typename W::Act* dy,
                      typename W::Act* dx,
                      typename W::Acc* dpost,
                      typename W::Acc* dcomb) {
  parallel_for(0, in.shape.tokens, kGrain, [&](int64_t b, int64_t e) {
    in.shape.streams == 4 ? backward_tokens<W, 4>(in, dout, dy, dx, dpost, dcomb, b, e)
                          : backward_tokens<W, 0>(in, dout, dy, dx, dpost, dcomb, b, e);
  });
}

template void hc_post_forward(const HcPostInputs<WidthF64>&, double*);
template void hc_post_forward(const HcPostInputs<WidthF32>&, float*);
template void hc_post_forward(const HcPostInputs<WidthBf16>&, Bf16*);
template void hc_post_forward(const HcPostInputs<WidthBf16>&, float*);
template void hc_post_backward(
    const HcPostInputs<WidthF64>&, const double*, double*, double*, double*, double*);
template void hc_post_backward(
    const HcPostInputs<WidthF32>&, const float*, float*, float*, float*, float*);
template void hc_post_backward(
    const HcPostInputs<WidthBf16>&, const Bf16*, Bf16*, Bf16*, float*, float*);

}  // namespace lockstep::model
