// The part of the chunked form that needs no state: gates, l2norm, decays, scores, inverse, W and
// U.
#include <algorithm>
#include <cmath>

#include "model/ops/kda_core.hpp"
#include "model/ops/kda_tile.hpp"
#include "model/ops/kda_token.hpp"

namespace lockstep::model {
namespace {

using simd::load;
using simd::splat;
using simd::store;
using simd::Vec;

/// q, k, beta, beta v, the log decays (in from_start) and the single-token decays.
template <typename S, typename R>
void load_tokens(const KdaCall<S, R>& call, const KdaChunk& chunk, int64_t head, KdaData<R>& d) {
  const KdaMode& mode = call.mode;
  const int64_t dim = call.dim, width = d.width, at = head * dim;
  const R log2e = static_cast<R>(1.4426950408889634074);
  R* dt = d.bkt;  // free until the operands are formed
  simd::load_row(call.dt_bias + at, dim, dt, width);
  for (int64_t i = 0; i < d.rows; ++i) {
    R *q = d.q + i * width, *k = d.k + i * width, *v = d.bv + i * width;
    R *g = d.from_start + i * width, *e = d.decay + i * width;
    if (i >= chunk.length) {
      std::fill(q, q + width, R(0));
      std::fill(k, k + width, R(0));
      std::fill(v, v + width, R(0));
      std::fill(g, g + width, R(0));
      std::fill(e, e + width, R(1));
      d.beta[i] = 0;
      continue;
    }
    const int64_t t = chunk.row + i;
    simd::load_row(call.q.data + t * call.q.stride + at, dim, q, width);
    simd::load_row(call.k.data + t * call.k.stride + at, dim, k, width);
    simd::load_row(call.v.data + t * call.v.stride + at, dim, v, width);
    simd::load_row(call.f.data + t * call.f.stride + at, dim, g, width);
    normalise_row(mode, width, q);
    normalise_row(mode, width, k);
    const R beta =
        beta_of(mode, simd::widen(call.beta_logit.data[t * call.beta_logit.stride + head]));
    d.beta[i] = beta;
    log_decay_row(mode, call.rate[head], dt, width, g);
    for (int64_t c = 0; c < width; c += simd::kLanes<R>) {
      const Vec<R> scaled = mode.base2 ? load(g + c) * splat(log2e) : load(g + c);
      store(g + c, scaled);
      store(e + c, power<R>(mode, scaled));
      const Vec<R> bv = splat(beta) * load(v + c);
      store(v + c, mode.round_operands ? simd::round_bf16(bv) : bv);
    }
  }
}

/// Decays from each block's start, to its end, over blocks; q and k scaled by them. g lies in
/// from_start. Each decay is one exponential of a sum of g that starts at 0 where the decay is 1,
/// so that its relative error does not grow with the sum. With rounded exponentials (D25) the decay
/// to the end is bf16(exp(b_end)) * bf16(exp(-b)), and q, k scaled by a rounded factor are matrix
/// operands of their own (D24).
template <typename R>
void block_decays(const KdaMode& mode, KdaData<R>& d, R* k_inverse) {
  const int64_t width = d.width, blocks = d.rows / kBlock;
  const bool round = mode.round_exp, round_product = mode.round_exp && mode.round_operands;
  const auto product = [&](Vec<R> x) { return round_product ? simd::round_bf16(x) : x; };
  for (int64_t c = 0; c < width; c += simd::kLanes<R>) {
    Vec<R> sums[kMaxBlocks], totals[kMaxBlocks];
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t base = b * kBlock * width + c;
      Vec<R> sum{};
      for (int64_t i = kBlock - 1; i >= 0; --i) {
        const int64_t at = base + i * width;
        const Vec<R> e = power<R>(mode, sum);
        store(d.to_end + at, e);
        store(d.k_end + at, load(d.k + at) * e);
        sum = sum + load(d.from_start + at);
      }
      sum = Vec<R>{};
      Vec<R> e{};
      for (int64_t i = 0; i < kBlock; ++i) {
        const int64_t at = base + i * width;
        sum = sum + load(d.from_start + at);
        e = power<R>(mode, sum);
        if (round) {
          e = simd::round_bf16(e);
          store(k_inverse + at, product(load(d.k + at) * simd::round_bf16(power<R>(mode, -sum))));
        }
        store(d.from_start + at, e);
        store(d.q_start + at, product(load(d.q + at) * e));
        store(d.k_start + at, product(load(d.k + at) * e));
      }
      sums[b] = sum;
      totals[b] = e;
      store(d.total + b * width + c, e);
      for (int64_t i = 0; round && i < kBlock; ++i) {
        const int64_t at = base + i * width;
        store(d.k_end + at, product(load(k_inverse + at) * e));
      }
    }
    // Over whole blocks [first, last).
    const auto over = [&](int64_t first, int64_t last) {
      Vec<R> sum{}, e = splat(R(1));
      for (int64_t b = first; b < last; ++b) {
        sum = sum + sums[b];
        e = e * totals[b];
      }
      return round ? e : power<R>(mode, sum);
    };
    for (int64_t b = 0; b < blocks; ++b) {
      store(d.before + b * width + c, over(0, b));
      store(d.after + b * width + c, over(b + 1, blocks));
    }
    store(d.chunk_decay + c, over(0, blocks));
  }
}

/// Gm and M / s between blocks: rows of block I against all earlier keys decayed to I's start.
template <typename R>
void scores_between(KdaData<R>& d, R* keys_T) {
  const int64_t width = d.width, chunk = d.chunk, blocks = d.rows / kBlock;
  for (int64_t b = 1; b < blocks; ++b) {
    const int64_t old = (b - 1) * kBlock, now = b * kBlock;
    const R* total = d.total + (b - 1) * width;
    for (int64_t c = 0; c < width; ++c) {
      R* row = keys_T + c * chunk;
      const Vec<R> decay = splat(total[c]);
      for (int64_t j = 0; j < old; j += simd::kLanes<R>) store(row + j, load(row + j) * decay);
    }
    transpose_into(kBlock, width, d.k_end + old * width, width, keys_T + old, chunk);
    const ChainA<R> k = plain<R>(d.k_start + now * width, width);
    const ChainA<R> q = plain<R>(d.q_start + now * width, width);
    set_product(kBlock, now, width, k, keys_T, chunk, d.gm + now * chunk, chunk);
    set_product(kBlock, now, width, q, keys_T, chunk, d.m + now * chunk, chunk);
  }
}

/// Gm and M / s inside a block: key j walks down the rows and decays by one token's factor at a
/// time.
template <typename R>
void scores_within(const KdaChunk& chunk, KdaData<R>& d, R* walk) {
  const int64_t width = d.width;
  constexpr int64_t kStep = simd::kLanes<R>;
  for (int64_t j = 0; j < chunk.length; ++j) {
    const int64_t end = std::min((j / kBlock + 1) * kBlock, chunk.length);
    std::copy(d.k + j * width, d.k + (j + 1) * width, walk);
    d.m[j * d.chunk + j] = simd::dot(d.q + j * width, walk, width);
    for (int64_t i = j + 1; i < end; ++i) {
      const R *e = d.decay + i * width, *k = d.k + i * width, *q = d.q + i * width;
      Vec<R> g0{}, g1{}, m0{}, m1{};
      for (int64_t c = 0; c < width; c += 2 * kStep) {
        const Vec<R> w0 = load(walk + c) * load(e + c);
        const Vec<R> w1 = load(walk + c + kStep) * load(e + c + kStep);
        store(walk + c, w0);
        store(walk + c + kStep, w1);
        g0 = simd::fma(w0, load(k + c), g0);
        g1 = simd::fma(w1, load(k + c + kStep), g1);
        m0 = simd::fma(w0, load(q + c), m0);
        m1 = simd::fma(w1, load(q + c + kStep), m1);
      }
      d.gm[i * d.chunk + j] = simd::sum(g0 + g1);
      d.m[i * d.chunk + j] = simd::sum(m0 + m1);
    }
  }
}

/// The same with rounded exponentials: exp(b_i) exp(-b_j) anchored at the block's start.
template <typename R>
void scores_within_rounded(const KdaChunk& chunk, KdaData<R>& d, const R* k_inverse) {
  const int64_t width = d.width;
  for (int64_t j = 0; j < chunk.length; ++j) {
    const int64_t end = std::min((j / kBlock + 1) * kBlock, chunk.length);
    for (int64_t i = j; i < end; ++i) {
      d.m[i * d.chunk + j] = simd::dot(d.q_start + i * width, k_inverse + j * width, width);
      if (i > j) {
        d.gm[i * d.chunk + j] = simd::dot(d.k_start + i * width, k_inverse + j * width, width);
      }
    }
  }
}

template <typename R>
void scale_scores(const KdaMode& mode, R scale, KdaData<R>& d) {
  for (int64_t i = 0; i < d.rows; ++i) {
    R* row = d.m + i * d.chunk;
    for (int64_t j = 0; j < d.rows; j += simd::kLanes<R>) {
      const Vec<R> m = load(row + j) * splat(scale);
      store(row + j, mode.round_scores ? simd::round_bf16(m) : m);
    }
  }
}

inline float round_half(float x) { return static_cast<float>(static_cast<_Float16>(x)); }
inline double round_half(double x) { return x; }

/// With l = -L: (I + l)(I + l^2)(I + l^4)(I + l^8) of a kBlock x kBlock strictly lower l, every
/// product rounded to half precision (D23 fp16).
template <typename R>
void half_inverse_block(const R* l, int64_t ld, R* t, R* scratch) {
  constexpr int64_t kSide = kBlock;
  R *power = scratch, *factor = scratch + kSide * kSide, *next = scratch + 2 * kSide * kSide;
  const auto multiply = [&](const R* a, const R* b, R* out) {
    for (int64_t i = 0; i < kSide; ++i) {
      for (int64_t j = 0; j < kSide; ++j) {
        R s = 0;
        for (int64_t p = 0; p < kSide; ++p) s = std::fma(a[i * kSide + p], b[p * kSide + j], s);
        out[i * kSide + j] = round_half(s);
      }
    }
  };
  R* product = scratch + 3 * kSide * kSide;
  for (int64_t i = 0; i < kSide; ++i) {
    for (int64_t j = 0; j < kSide; ++j) {
      power[i * kSide + j] = l[i * ld + j];
      product[i * kSide + j] = round_half((i == j ? R(1) : R(0)) + l[i * ld + j]);
    }
  }
  for (int64_t step = 0; step < 3; ++step) {
    multiply(power, power, next);
    std::swap(power, next);
    for (int64_t i = 0; i < kSide * kSide; ++i) {
      factor[i] = round_half(power[i] + (i % (kSide + 1) == 0 ? R(1) : R(0)));
    }
    multiply(product, factor, next);
    std::swap(product, next);
  }
  for (int64_t i = 0; i < kSide; ++i)
    std::copy(product + i * kSide, product + (i + 1) * kSide, t + i * ld);
}

/// l = -L and Tm = (I - l)^-1: forward substitution by rows inside blocks, block substitution
/// between them.
template <typename R>
void invert(const KdaMode& mode, KdaData<R>& d, R* scratch) {
  const int64_t ld = d.chunk, rows = d.rows;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < i; ++j) {
      const R x = -(d.beta[i] * d.gm[i * ld + j]);
      d.l[i * ld + j] = mode.half_inverse ? round_half(x) : x;
    }
    std::fill(d.l + i * ld + i, d.l + i * ld + rows, R(0));
    std::fill(d.tm + i * ld, d.tm + i * ld + rows, R(0));
  }
  for (int64_t b = 0; b < rows; b += kBlock) {
    R* t = d.tm + b * ld + b;
    const R* l = d.l + b * ld + b;
    if (mode.half_inverse) {
      half_inverse_block(l, ld, t, scratch);
    } else {
      for (int64_t i = 0; i < kBlock; ++i) {
        R* row = t + i * ld;
        for (int64_t j = 0; j < i; ++j) {
          const Vec<R> x = splat(l[i * ld + j]);
          for (int64_t c = 0; c < kBlock; c += simd::kLanes<R>) {
            store(row + c, simd::fma(x, load(t + j * ld + c), load(row + c)));
          }
        }
        row[i] = 1;
      }
    }
    if (b == 0) continue;
    set_product(kBlock, b, b, plain<R>(d.l + b * ld, ld), d.tm, ld, scratch, ld);
    set_product(kBlock, b, kBlock, plain<R>(t, ld), scratch, ld, d.tm + b * ld, ld);
  }
  kda_round(mode.round_inverse, rows, rows, d.tm, ld);
}

template <typename R>
void operands(const KdaMode& mode, KdaData<R>& d) {
  const int64_t width = d.width;
  const auto rounded = [&](Vec<R> x) { return mode.round_operands ? simd::round_bf16(x) : x; };
  for (int64_t i = 0; i < d.rows; ++i) {
    const R *before = d.before + i / kBlock * width, *after = d.after + i / kBlock * width;
    const Vec<R> beta = splat(-d.beta[i]);
    for (int64_t c = 0; c < width; c += simd::kLanes<R>) {
      const int64_t at = i * width + c;
      store(d.bkt + at, rounded(beta * (load(d.k_start + at) * load(before + c))));
      store(d.qe + at, rounded(load(d.q_start + at) * load(before + c)));
      store(d.ke + at, rounded(load(d.k_end + at) * load(after + c)));
    }
  }
  for (int64_t b = 0; b < d.rows; b += kBlock) {
    const ChainA<R> t = plain<R>(d.tm + b * d.chunk, d.chunk);
    set_product(kBlock, width, b + kBlock, t, d.bkt, width, d.w + b * width, width);
    set_product(kBlock, width, b + kBlock, t, d.bv, width, d.n + b * width, width);
  }
  kda_round(mode.round_operands, d.rows, width, d.w, width);
  kda_round(mode.round_operands, d.rows, width, d.n, width);
}

}  // namespace

template <typename S, typename R>
void kda_prepare(const KdaCall<S, R>& call, const KdaChunk& chunk, int64_t head, KdaData<R>& d) {
  const KdaMode& mode = call.mode;
  const R scale = 1 / std::sqrt(static_cast<R>(call.dim));
  d.rows = kda_padded_rows(chunk.length);
  load_tokens(call, chunk, head, d);
  R* k_inverse = d.n;  // W and U are formed last: their room is scratch until then
  R* keys_T = d.w;
  block_decays(mode, d, k_inverse);
  std::fill(d.gm, d.gm + d.rows * d.chunk, R(0));
  std::fill(d.m, d.m + d.rows * d.chunk, R(0));
  scores_between(d, keys_T);
  if (mode.round_exp) {
    scores_within_rounded(chunk, d, k_inverse);
  } else {
    scores_within(chunk, d, d.bkt);
  }
  scale_scores(mode, scale, d);
  invert(mode, d, d.work);
  operands(mode, d);
}

template void kda_prepare(const KdaCall<double, double>&,
                          const KdaChunk&,
                          int64_t,
                          KdaData<double>&);
template void kda_prepare(const KdaCall<float, float>&, const KdaChunk&, int64_t, KdaData<float>&);
template void kda_prepare(const KdaCall<simd::Bf16, float>&,
                          const KdaChunk&,
                          int64_t,
                          KdaData<float>&);

}  // namespace lockstep::model
