#include "model/ops/kda_decode_kernel.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "model/ops/kda_token.hpp"

namespace lockstep::model {
namespace {

/// The switches of one row: q, k normalised, decays in g.
template <typename S, typename R>
struct Token {
  R *q, *k, *decay;
  R beta;

  Token(const KdaCall<S, R>& call, int64_t t, int64_t head, int64_t width, R* scratch)
      : q(scratch), k(scratch + width), decay(scratch + 2 * width) {
    const KdaMode& mode = call.mode;
    const int64_t dim = call.dim, at = head * dim;
    R* dt = scratch + 3 * width;
    simd::load_row(call.dt_bias + at, dim, dt, width);
    simd::load_row(call.q.data + t * call.q.stride + at, dim, q, width);
    simd::load_row(call.k.data + t * call.k.stride + at, dim, k, width);
    simd::load_row(call.f.data + t * call.f.stride + at, dim, decay, width);
    normalise_row(mode, width, q);
    normalise_row(mode, width, k);
    beta = beta_of(mode, simd::widen(call.beta_logit.data[t * call.beta_logit.stride + head]));
    log_decay_row(mode, call.rate[head], dt, width, decay);
    const R log2e = static_cast<R>(1.4426950408889634074);
    for (int64_t c = 0; c < width; c += simd::kLanes<R>) {
      const simd::Vec<R> g = simd::load(decay + c);
      simd::store(decay + c, power<R>(mode, mode.base2 ? g * simd::splat(log2e) : g));
    }
  }
};

}  // namespace

template <typename S, typename R, typename C>
void kda_decode_head(
    const KdaCall<S, R>& call, const KdaDecodeRun& run, int64_t head, C* state, S* o) {
  const int64_t dim = call.dim, width = (dim + simd::kPad<R> - 1) / simd::kPad<R> * simd::kPad<R>;
  const R scale = 1 / std::sqrt(static_cast<R>(dim));
  std::vector<R> scratch(static_cast<size_t>(5 * width));
  R* row = scratch.data() + 4 * width;
  for (int64_t t = run.begin; t < run.end; ++t) {
    const Token<S, R> x(call, t, head, width, scratch.data());
    const S* v = call.v.data + t * call.v.stride + head * dim;
    S* out = o + (t * call.heads + head) * dim;
    for (int64_t j = 0; j < dim; ++j) {
      simd::load_row(state + j * dim, dim, row, width);
      for (int64_t c = 0; c < width; c += simd::kLanes<R>)
        simd::store(row + c, simd::load(row + c) * simd::load(x.decay + c));
      const R delta = x.beta * (simd::widen(v[j]) - simd::dot(x.k, row, width));
      for (int64_t c = 0; c < width; c += simd::kLanes<R>) {
        simd::store(row + c,
                    simd::fma(simd::load(x.k + c), simd::splat(delta), simd::load(row + c)));
      }
      simd::narrow(out + j, scale * simd::dot(x.q, row, width));
      simd::store_row(row, dim, state + j * dim);
    }
  }
}

#define LOCKSTEP_DECODE(S, R, C)          \
  template void kda_decode_head<S, R, C>( \
      const KdaCall<S, R>&, const KdaDecodeRun&, int64_t, C*, S*);
LOCKSTEP_DECODE(double, double, double)
LOCKSTEP_DECODE(float, float, float)
LOCKSTEP_DECODE(float, float, simd::Bf16)
LOCKSTEP_DECODE(simd::Bf16, float, float)
LOCKSTEP_DECODE(simd::Bf16, float, simd::Bf16)
#undef LOCKSTEP_DECODE

}  // namespace lockstep::model
