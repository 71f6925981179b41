// Gradients of one chunk from its operands, N, S, Y and dS:
//   dM = tril(dO N^T), dL = -stril(Y N^T), dG = diag(beta) dL, dv = beta Y,
//   dbeta_i = Y_i v_i - Kt_i (Y S^T)_i + sum_j dL_ij Gm_ij,
//   dq'_i = s [exp(b_i) (dO S^T)_i + sum_{j<i} dM_ij k_j exp(b_i - b_j)],  dq_i = dq'_i + s dM_ii
//   k_i, row_i = sum_{j<i} dG_ij k_j exp(b_i - b_j) - exp(b_i) beta_i (Y S^T)_i, col_j = sum_{i>j}
//   (dG_ij k_i + s dM_ij q_i) exp(b_i - b_j),  tail_j = exp(b_C - b_j) (N dS^T)_j, dk_j = row_j +
//   col_j + tail_j + s dM_jj q_j, db_i = q_i dq'_i + k_i (row_i - col_i - tail_i [i < C]), db_C +=
//   exp(b_C) rowsum(S dS) + sum_{j<C} k_j tail_j,  dg_i = sum_{j>=i} db_j.
// The diagonal of dM and the last row's tail carry exponent 0 and have no part in db: they would
// cancel only in exact arithmetic. C is the last real row; rows after it have decay 1, so exp(b_C)
// is the decay over the padded chunk.
#include <algorithm>
#include <cmath>

#include "model/ops/kda_core.hpp"
#include "model/ops/kda_tile.hpp"

namespace lockstep::model {
namespace {

using simd::load;
using simd::splat;
using simd::store;
using simd::Vec;

/// Accumulators and temporaries of one chunk.
template <typename R>
struct Scratch {
  R *matrix_T, *n_T;         ///< [D, D], [D, C]
  R *dq, *row, *col, *tail;  ///< [C, D]
  R *keys, *queries;         ///< [C, D] rolled to a block's start or end
  R *dm, *dl;                ///< [C, C]
  R *raw, *row_q, *row_k, *row_db, *dt, *dt_sum, *last;  ///< [D]

  Scratch(std::vector<R>& room, int64_t width, int64_t chunk) {
    const int64_t cd = chunk * width;
    room.resize(static_cast<size_t>(width * width + 8 * cd + 2 * chunk * chunk + 7 * width));
    R* p = room.data();
    const auto take = [&p](int64_t size) {
      R* result = p;
      p += size;
      return result;
    };
    matrix_T = take(width * width);
    n_T = take(cd);
    for (R** x : {&dq, &row, &col, &tail, &keys, &queries}) *x = take(cd);
    dm = take(chunk * chunk);
    dl = take(chunk * chunk);
    for (R** x : {&raw, &row_q, &row_k, &row_db, &dt, &dt_sum, &last}) *x = take(width);
  }
};

/// s dM and -dL on and below the diagonal blocks, exact zeros above the diagonal.
template <typename R>
void score_gradients(const KdaData<R>& d, Scratch<R>& s) {
  const int64_t width = d.width, ld = d.chunk;
  transpose_into(d.rows, width, d.n, width, s.n_T, ld);
  for (int64_t b = 0; b < d.rows; b += kBlock) {
    const int64_t n = b + kBlock;
    const ChainA<R> dout = plain<R>(d.dout + b * width, width);
    const ChainA<R> y = plain<R>(d.y + b * width, width);
    set_product(kBlock, n, width, dout, s.n_T, ld, s.dm + b * ld, ld);
    set_product(kBlock, n, width, y, s.n_T, ld, s.dl + b * ld, ld);
    for (int64_t i = b; i < n; ++i) {
      std::fill(s.dm + i * ld + i + 1, s.dm + i * ld + n, R(0));
      std::fill(s.dl + i * ld + i, s.dl + i * ld + n, R(0));
    }
  }
}

/// dq and row from exp(b_i) times products with the state; tail.
template <typename R>
void state_terms(const KdaData<R>& d, Scratch<R>& s, R* y_state) {
  const int64_t width = d.width;
  transpose_into(width, width, d.s_used, width, s.matrix_T, width);
  set_product(d.rows, width, width, plain<R>(d.dout, width), s.matrix_T, width, s.dq, width);
  set_product(d.rows, width, width, plain<R>(d.y, width), s.matrix_T, width, y_state, width);
  transpose_into(width, width, d.ds, width, s.matrix_T, width);
  set_product(d.rows, width, width, plain<R>(d.n, width), s.matrix_T, width, s.tail, width);
  for (int64_t i = 0; i < d.rows; ++i) {
    const R *before = d.before + i / kBlock * width, *after = d.after + i / kBlock * width;
    const Vec<R> beta = splat(d.beta[i]);
    for (int64_t c = 0; c < width; c += simd::kLanes<R>) {
      const int64_t at = i * width + c;
      const Vec<R> e = load(d.from_start + at) * load(before + c);
      store(s.dq + at, load(s.dq + at) * e);
      store(s.row + at, -(beta * load(y_state + at) * e));
      store(s.tail + at, load(s.tail + at) * (load(d.to_end + at) * load(after + c)));
    }
  }
}

/// Terms of dq, row and col between different blocks.
template <typename R>
void between_blocks(const KdaData<R>& d, Scratch<R>& s) {
  const int64_t width = d.width, ld = d.chunk, blocks = d.rows / kBlock;
  constexpr int64_t kStep = simd::kLanes<R>;
  const int64_t area = kBlock * width;
  R* sum = s.n_T;  // not needed any more: at least [kBlock, D]
  const auto add_scaled = [&](const R* factor, R* dst) {
    for (int64_t c = 0; c < area; c += kStep) {
      store(dst + c, simd::fma(load(sum + c), load(factor + c), load(dst + c)));
    }
  };
  const auto decay_rows = [&](const R* total, int64_t first, int64_t last, R* x) {
    for (int64_t i = first; i < last; ++i) {
      for (int64_t c = 0; c < width; c += kStep) {
        store(x + i * width + c, load(x + i * width + c) * load(total + c));
      }
    }
  };
  for (int64_t b = 1; b < blocks; ++b) {  // keys of earlier blocks, decayed to b's start
    const int64_t old = (b - 1) * kBlock, now = b * kBlock;
    decay_rows(d.total + (b - 1) * width, 0, old, s.keys);
    std::copy(d.k_end + old * width, d.k_end + now * width, s.keys + old * width);
    set_product(kBlock, width, now, plain<R>(s.dm + now * ld, ld), s.keys, width, sum, width);
    add_scaled(d.from_start + now * width, s.dq + now * width);
    set_product(kBlock, width, now, plain<R>(s.dl + now * ld, ld), s.keys, width, sum, width);
    add_scaled(d.from_start + now * width, s.row + now * width);
  }
  std::fill(s.col, s.col + d.rows * width, R(0));
  for (int64_t b = blocks - 2; b >= 0; --b) {  // keys and queries of later blocks, back to b's end
    const int64_t now = b * kBlock, next = now + kBlock, after = next + kBlock;
    decay_rows(d.total + (b + 1) * width, after, d.rows, s.keys);
    decay_rows(d.total + (b + 1) * width, after, d.rows, s.queries);
    std::copy(d.k_start + next * width, d.k_start + after * width, s.keys + next * width);
    std::copy(d.q_start + next * width, d.q_start + after * width, s.queries + next * width);
    const int64_t inner = d.rows - next;
    const ChainA<R> dl = transposed<R>(s.dl + next * ld + now, ld);
    const ChainA<R> dm = transposed<R>(s.dm + next * ld + now, ld);
    set_product(kBlock, width, inner, dl, s.keys + next * width, width, sum, width);
    add_product(kBlock, width, inner, dm, s.queries + next * width, width, sum, width);
    add_scaled(d.to_end + now * width, s.col + now * width);
  }
}

/// Terms inside a block, pair by pair: exp(b_i - b_j) grows by one token's factor per step.
template <typename R>
void within_blocks(const KdaData<R>& d, int64_t length, Scratch<R>& s) {
  const int64_t width = d.width, ld = d.chunk;
  for (int64_t b = 0; b < length; b += kBlock) {
    const int64_t end = std::min(b + kBlock, length);
    for (int64_t c = 0; c < width; c += simd::kLanes<R>) {
      for (int64_t j = b; j < end; ++j) {
        const Vec<R> kj = load(d.k + j * width + c);
        Vec<R> e = splat(R(1)), col = load(s.col + j * width + c);
        for (int64_t i = j + 1; i < end; ++i) {
          const int64_t at = i * width + c;
          e = e * load(d.decay + at);
          const Vec<R> dm = splat(s.dm[i * ld + j]), dg = splat(s.dl[i * ld + j]);
          const Vec<R> decayed = kj * e;
          store(s.dq + at, simd::fma(dm, decayed, load(s.dq + at)));
          store(s.row + at, simd::fma(dg, decayed, load(s.row + at)));
          const Vec<R> pair = simd::fma(dg, load(d.k + at), dm * load(d.q + at));
          col = simd::fma(pair, e, col);
        }
        store(s.col + j * width + c, col);
      }
    }
  }
}

/// Through x / sqrt(x.x + eps), from the raw row: (d - xhat (xhat.d)) / sqrt(.), in place over d.
template <typename R>
void l2norm_backward(int64_t width, const R* raw, R* d) {
  const R inverse = 1 / std::sqrt(simd::dot(raw, raw, width) + static_cast<R>(kL2Eps));
  const R along = simd::dot(raw, d, width) * inverse * inverse;
  for (int64_t c = 0; c < width; c += simd::kLanes<R>) {
    store(d + c, (load(d + c) - load(raw + c) * splat(along)) * splat(inverse));
  }
}

/// df of one row from dg; adds to the sums for dt_bias and A_log (per lane).
template <typename R>
void gate_backward(const KdaMode& mode,
                   R rate,
                   int64_t width,
                   const R* dt,
                   const R* dg,
                   R* f,
                   R* dt_sum,
                   Vec<R>& rate_sum) {
  const R lb = static_cast<R>(mode.lower_bound);
  for (int64_t c = 0; c < width; c += simd::kLanes<R>) {
    const Vec<R> z = load(f + c) + load(dt + c);
    Vec<R> df;
    if (mode.gate == KdaMode::Gate::kSoftplus) {
      df = splat(-rate) * load(dg + c) * simd::sigmoid(z);
      Vec<R> g{};
      for (int64_t i = 0; i < simd::kLanes<R>; ++i) {
        g[i] = -rate * (z[i] > 20 ? z[i] : std::log1p(std::exp(z[i])));
      }
      rate_sum = simd::fma(load(dg + c), g, rate_sum);
    } else {
      // 1 - sigmoid(x) as sigmoid(-x): the difference has no digits left when the gate saturates.
      const Vec<R> x = splat(rate) * z;
      df = load(dg + c) * splat(lb) * simd::sigmoid(x) * simd::sigmoid(-x) * splat(rate);
      rate_sum = simd::fma(df, z, rate_sum);
    }
    store(dt_sum + c, load(dt_sum + c) + df);
    store(f + c, df);
  }
}

}  // namespace

template <typename S, typename R>
void kda_chunk_gradients(const KdaCall<S, R>& call,
                         int64_t chunk_index,
                         int64_t head,
                         const KdaData<R>& d,
                         const KdaGradients<S, R>& grads,
                         std::vector<R>& room) {
  const KdaChunk& chunk = call.chunks[static_cast<size_t>(chunk_index)];
  const int64_t width = d.width, dim = call.dim, ld = d.chunk, at_head = head * dim;
  constexpr int64_t kStep = simd::kLanes<R>;
  Scratch<R> s(room, width, d.chunk);

  R* y_state = s.keys;
  score_gradients(d, s);
  state_terms(d, s, y_state);

  // dbeta, and -dL becomes dG.
  for (int64_t i = 0; i < chunk.length; ++i) {
    const int64_t t = chunk.row + i, at = i * width;
    const R* before = d.before + i / kBlock * width;
    simd::load_row(call.v.data + t * call.v.stride + at_head, dim, s.raw, width);
    R dbeta = simd::dot(d.y + at, s.raw, width);
    for (int64_t c = 0; c < width; c += kStep) {
      store(s.raw + c, load(d.k_start + at + c) * load(before + c));
    }
    dbeta -= simd::dot(s.raw, y_state + at, width);
    for (int64_t j = 0; j < i; ++j) {
      dbeta = std::fma(-s.dl[i * ld + j], d.gm[i * ld + j], dbeta);
      s.dl[i * ld + j] *= -d.beta[i];
    }
    // beta (1 - beta), with 1 - beta free of cancellation.
    const R logit = simd::widen(call.beta_logit.data[t * call.beta_logit.stride + head]);
    const R slope = 1 / ((1 + std::exp(-logit)) * (1 + std::exp(logit)));
    simd::narrow(grads.dbeta_logit + t * call.heads + head, dbeta * slope);
    for (int64_t c = 0; c < width; c += kStep) {
      store(s.raw + c, splat(d.beta[i]) * load(d.y + at + c));
    }
    simd::store_row(s.raw, dim, grads.dv + t * call.heads * dim + at_head);
  }

  between_blocks(d, s);
  within_blocks(d, chunk.length, s);

  // dq, dk, db (over the queries' scratch) and what the last row's b gets from the state.
  for (int64_t c = 0; c < width; ++c) {
    s.last[c] = d.chunk_decay[c] * simd::dot(d.s + c * width, d.ds + c * width, width);
  }
  R* db = s.queries;
  for (int64_t i = 0; i < chunk.length; ++i) {
    const int64_t t = chunk.row + i, out = t * call.heads * dim + at_head;
    const Vec<R> diagonal = splat(s.dm[i * ld + i]);
    const bool last_row = i == chunk.length - 1;
    for (int64_t c = 0; c < width; c += kStep) {
      const int64_t at = i * width + c;
      const Vec<R> q = load(d.q + at), k = load(d.k + at);
      const Vec<R> dq = load(s.dq + at);
      const Vec<R> row = load(s.row + at), col = load(s.col + at), tail = load(s.tail + at);
      const Vec<R> tail0 = last_row ? Vec<R>{} : tail;
      store(s.row_q + c, dq + diagonal * k);
      store(s.row_k + c, row + col + tail + diagonal * q);
      store(db + at, q * dq + k * (row - col - tail0));
      store(s.last + c, simd::fma(k, tail0, load(s.last + c)));
    }
    simd::load_row(call.q.data + t * call.q.stride + at_head, dim, s.raw, width);
    l2norm_backward(width, s.raw, s.row_q);
    simd::store_row(s.row_q, dim, grads.dq + out);
    simd::load_row(call.k.data + t * call.k.stride + at_head, dim, s.raw, width);
    l2norm_backward(width, s.raw, s.row_k);
    simd::store_row(s.row_k, dim, grads.dk + out);
  }

  // dg as the reverse running sum of db, then the gate.
  R* dg = s.last;
  Vec<R> rate_sum{};
  simd::load_row(call.dt_bias + at_head, dim, s.dt, width);
  std::fill(s.dt_sum, s.dt_sum + width, R(0));
  for (int64_t i = chunk.length - 1; i >= 0; --i) {
    const int64_t t = chunk.row + i;
    for (int64_t c = 0; c < width; c += kStep) {
      store(dg + c, load(dg + c) + load(db + i * width + c));
    }
    simd::load_row(call.f.data + t * call.f.stride + at_head, dim, s.raw, width);
    gate_backward(call.mode, call.rate[head], width, s.dt, dg, s.raw, s.dt_sum, rate_sum);
    simd::store_row(s.raw, dim, grads.df + t * call.heads * dim + at_head);
  }
  const int64_t partial = chunk_index * call.heads + head;
  std::copy(s.dt_sum, s.dt_sum + dim, grads.ddt_partial + partial * dim);
  grads.drate_partial[partial] = simd::sum(rate_sum);
}

#define LOCKSTEP_KDA(S, R)                                     \
  template void kda_chunk_gradients(const KdaCall<S, R>&,      \
                                    int64_t,                   \
                                    int64_t,                   \
                                    const KdaData<R>&,         \
                                    const KdaGradients<S, R>&, \
                                    std::vector<R>&);
LOCKSTEP_KDA(double, double)
LOCKSTEP_KDA(float, float)
LOCKSTEP_KDA(simd::Bf16, float)
#undef LOCKSTEP_KDA

}  // namespace lockstep::model
