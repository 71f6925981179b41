// KDA in plain tensor functions: the per-token recurrence and the chunked form with every rounding
// point. Roundings are transparent to gradients.
#include <cmath>

#include "model/ops/kda.hpp"
#include "model/ops/kda_dispatch.hpp"
#include "model/ops/kda_mode.hpp"
#include "model/ops/power_of_two.hpp"

namespace lockstep::model {
namespace {

/// Inputs after gates and norms, all in the accumulation dtype.
struct Tokens {
  Tensor q, k, v;  ///< [T, H, D]
  Tensor g;        ///< [T, H, D] log decay; times log2(e) in base 2
  Tensor beta;     ///< [T, H]
};

Tensor half_through(const Tensor& x) {
  return x + (x.detach().to(at::kHalf).to(x.scalar_type()) - x.detach());
}

/// 1 / (1 + e^-x) by the branch whose exponential is at most 1. at::sigmoid has the same values,
/// but its gradient y (1 - y) has no digits left where the gate saturates.
Tensor gate_sigmoid(const Tensor& x) {
  const Tensor e = at::where(x > 0, -x, x).exp();
  return at::where(x > 0, 1 / (1 + e), e / (1 + e));
}

Tensor log_decay(const KdaInput& in, const KdaMode& mode, const Numerics& num) {
  const int64_t heads = in.q.size(1), dim = in.q.size(2);
  const Tensor rate =
      round_through(in.a_log.to(num.acc()), mode.round_decay).exp().view({heads, 1});
  const Tensor dt = round_through(in.dt_bias.to(num.acc()), mode.round_decay).view({heads, dim});
  const Tensor z = in.f.to(num.acc()) + dt;
  const Tensor x = rate * z;
  switch (mode.gate) {
    case KdaMode::Gate::kSigmoid:
      return mode.lower_bound * gate_sigmoid(x);
    case KdaMode::Gate::kQuotient:
      return mode.lower_bound / (1 + at::clamp_max(-x, 80).exp());
    case KdaMode::Gate::kTanh:
      return mode.lower_bound * (0.5 * (0.5 * x).tanh() + 0.5);
    case KdaMode::Gate::kSoftplus:
      break;
  }
  return -rate * at::where(z > 20, z, at::clamp_max(z, 20).exp().log1p());
}

Tensor l2norm(const Tensor& x, const KdaMode& mode, const Numerics& num) {
  const Tensor wide = x.to(num.acc());
  const Tensor root = (wide.square().sum(-1, /*keepdim=*/true) + kL2Eps).sqrt();
  return round_through(mode.l2_divides ? wide / root : wide * (1 / root), mode.round_normalised);
}

Tokens tokens_of(const KdaInput& in, const KdaMode& mode, const Numerics& num) {
  const Tensor logit = in.beta_logit.to(num.acc());
  const Tensor beta = mode.beta_tanh ? 0.5 * (0.5 * logit).tanh() + 0.5 : gate_sigmoid(logit);
  const Tensor g = log_decay(in, mode, num);
  return {l2norm(in.q, mode, num),
          l2norm(in.k, mode, num),
          in.v.to(num.acc()),
          mode.base2 ? g * (1 / std::log(2.0)) : g,
          round_through(beta, mode.round_beta)};
}

Tensor power(const Tensor& x, const KdaMode& mode) {
  return mode.base2 ? power_of_two(x) : x.exp();
}

/// Runs step(first row, end row, state) over pieces of each segment and collects outputs and
/// states.
template <typename Step>
KdaOutput over_segments(const KdaInput& in, const Numerics& num, int64_t piece, Step&& step) {
  const int64_t heads = in.q.size(1), dim = in.q.size(2);
  const auto options = in.q.options().dtype(num.acc());
  std::vector<Tensor> outputs = {at::zeros({0, heads, dim}, options)}, states;
  for (size_t s = 0; s + 1 < in.cu.size(); ++s) {
    Tensor state = in.initial_state.defined() ? in.initial_state[static_cast<int64_t>(s)]
                                              : at::zeros({heads, dim, dim}, options);
    for (int64_t row = in.cu[s]; row < in.cu[s + 1]; row += piece) {
      outputs.push_back(step(row, std::min(row + piece, in.cu[s + 1]), state));
    }
    states.push_back(state);
  }
  return {at::cat(outputs).to(num.act()), at::stack(states)};
}

/// Decays of a chunk as the matrices use them, [heads, rows, ...].
struct Decays {
  Tensor gm, m;       ///< [H, C, C] Gm strictly lower, M / s lower
  Tensor kt, qe, ke;  ///< [H, C, D] k exp(b), q exp(b), k exp(b_C - b)
  Tensor chunk;       ///< [H, D] exp(b_C)
};

/// One exponential per pair of rows and channel: exp(b_i - b_j), selected before it is taken.
Decays exact_decays(const Tensor& q, const Tensor& k, const Tensor& g, const KdaMode& mode) {
  const int64_t rows = q.size(1);
  const Tensor b = g.cumsum(1), end = b.select(1, rows - 1).unsqueeze(1);
  const Tensor lower = at::ones({rows, rows}, q.options().dtype(at::kBool)).tril().unsqueeze(-1);
  const Tensor difference = (b.unsqueeze(2) - b.unsqueeze(1))
                                .masked_fill(~lower, -std::numeric_limits<double>::infinity());
  const Tensor pair = power(difference, mode) * k.unsqueeze(1);
  const Tensor from_start = power(b, mode);
  return {(pair * k.unsqueeze(2)).sum(-1).tril(-1),
          (pair * q.unsqueeze(2)).sum(-1),
          k * from_start,
          q * from_start,
          k * power(end - b, mode),
          power(end, mode).squeeze(1)};
}

/// D25: exp(b), exp(-b) and exp(b_end) of every block of kBlock rows rounded to bf16.
Decays rounded_decays(const Tensor& q, const Tensor& k, const Tensor& g, const KdaMode& mode) {
  const int64_t heads = q.size(0), rows = q.size(1), dim = q.size(2), blocks = rows / kBlock;
  const auto product = [&](const Tensor& x) { return round_through(x, mode.round_operands); };
  const auto split = [&](const Tensor& x) { return x.view({heads, blocks, kBlock, dim}); };
  const Tensor b = split(g).cumsum(2);
  const Tensor from_start = round_through(power(b, mode), true);
  const Tensor inverse = round_through(power(-b, mode), true);
  const Tensor total = from_start.select(2, kBlock - 1);  // [H, blocks, D]
  const Tensor qs = product(split(q) * from_start), ks = product(split(k) * from_start);
  const Tensor ki = product(split(k) * inverse), ke = product(ki * total.unsqueeze(2));
  const auto over = [&](int64_t first, int64_t last) {  // decay over whole blocks
    Tensor d = at::ones({heads, 1, dim}, q.options());
    for (int64_t i = first; i < last; ++i) d = d * total.slice(1, i, i + 1);
    return d;
  };
  std::vector<Tensor> gm_rows, m_rows, kt, qe, kend;
  for (int64_t i = 0; i < blocks; ++i) {
    std::vector<Tensor> gm, m;
    for (int64_t j = 0; j < blocks; ++j) {
      if (j > i) {
        gm.push_back(at::zeros({heads, kBlock, kBlock}, q.options()));
        m.push_back(gm.back());
        continue;
      }
      const Tensor keys = i == j ? ki.select(1, j) : ke.select(1, j) * over(j + 1, i);
      gm.push_back(at::matmul(ks.select(1, i), keys.transpose(-1, -2)));
      m.push_back(at::matmul(qs.select(1, i), keys.transpose(-1, -2)));
    }
    gm_rows.push_back(at::cat(gm, -1));
    m_rows.push_back(at::cat(m, -1));
    kt.push_back(ks.select(1, i) * over(0, i));
    qe.push_back(qs.select(1, i) * over(0, i));
    kend.push_back(ke.select(1, i) * over(i + 1, blocks));
  }
  return {at::cat(gm_rows, 1).tril(-1),
          at::cat(m_rows, 1).tril(),
          at::cat(kt, 1),
          at::cat(qe, 1),
          at::cat(kend, 1),
          over(0, blocks).squeeze(1)};
}

/// (I + L)^-1 for strictly lower L [H, C, C].
Tensor inverse_of(const Tensor& lower, const KdaMode& mode) {
  const int64_t rows = lower.size(-1);
  const Tensor eye = at::eye(rows, lower.options());
  if (!mode.half_inverse) {
    const Tensor t = at::linalg_solve_triangular(
        eye + lower, eye.expand_as(lower), /*upper=*/false, /*left=*/true, /*unitriangular=*/true);
    return round_through(t, mode.round_inverse);
  }
  // fp16: (I-L)(I+L^2)(I+L^4)(I+L^8) per block, each product rounded; blocks merged in fp32.
  const Tensor l = half_through(lower);
  const Tensor small_eye = at::eye(kBlock, lower.options());
  Tensor result = at::zeros({lower.size(0), 0, rows}, lower.options());
  for (int64_t b = 0; b < rows; b += kBlock) {
    const Tensor strip = l.slice(1, b, b + kBlock);
    Tensor p = strip.slice(2, b, b + kBlock), t = half_through(small_eye - p);
    for (int step = 0; step < 3; ++step) {
      p = half_through(at::matmul(p, p));
      t = half_through(at::matmul(t, half_through(small_eye + p)));
    }
    const Tensor left = -at::matmul(t, at::matmul(strip.slice(2, 0, b), result.slice(2, 0, b)));
    const Tensor right = at::zeros({lower.size(0), kBlock, rows - b - kBlock}, lower.options());
    result = at::cat({result, at::cat({left, t, right}, 2)}, 1);
  }
  return round_through(result, true);
}

}  // namespace

KdaOutput kda_recurrent_reference(const KdaInput& in, const Numerics& num) {
  check_kda(in, num);
  const KdaMode mode = kda_mode(num, in.lower_bound, /*recurrent=*/true);
  const Tokens x = tokens_of(in, mode, num);
  const double scale = 1 / std::sqrt(static_cast<double>(in.q.size(2)));
  return over_segments(in, num, 1, [&](int64_t t, int64_t, Tensor& state) {
    const Tensor q = x.q[t].unsqueeze(-1), k = x.k[t].unsqueeze(-1);  // [H, D, 1]
    state = power(x.g[t], mode).unsqueeze(-1) * state;
    const Tensor delta = x.beta[t].unsqueeze(-1) * (x.v[t] - (k * state).sum(-2));
    state = state + k * delta.unsqueeze(-2);
    return (scale * (q * state).sum(-2)).unsqueeze(0);
  });
}

KdaOutput kda_chunk_reference(const KdaInput& in, const Numerics& num) {
  check_kda(in, num);
  const KdaMode mode = kda_mode(num, in.lower_bound, /*recurrent=*/false);
  if (mode.chunk == 0) return kda_recurrent_reference(in, num);
  const Tokens x = tokens_of(in, mode, num);
  const double scale = 1 / std::sqrt(static_cast<double>(in.q.size(2)));
  const auto operand = [&](const Tensor& t) { return round_through(t, mode.round_operands); };
  return over_segments(in, num, mode.chunk, [&](int64_t first, int64_t last, Tensor& state) {
    // Rows up to a whole block are tokens with q = k = v = beta = 0 and no decay.
    const int64_t rows = last - first, padding = kda_padded_rows(rows) - rows;
    const auto chunk = [&](const Tensor& t) {  // [H, C, D]
      return at::constant_pad_nd(t.slice(0, first, last).transpose(0, 1), {0, 0, 0, padding});
    };
    const Tensor q = chunk(x.q), k = chunk(x.k), v = chunk(x.v), g = chunk(x.g);
    const Tensor beta = chunk(x.beta.unsqueeze(-1));  // [H, C, 1]
    const Decays d = mode.round_exp ? rounded_decays(q, k, g, mode) : exact_decays(q, k, g, mode);
    const Tensor m = round_through(scale * d.m, mode.round_scores);
    const Tensor tm = inverse_of(beta * d.gm, mode);
    const Tensor w = operand(at::matmul(tm, operand(beta * d.kt)));
    const Tensor u = operand(at::matmul(tm, operand(beta * v)));
    const Tensor entry = round_through(state, mode.round_state), s = operand(entry);
    const Tensor n = operand(u - at::matmul(w, s));
    state = d.chunk.unsqueeze(-1) * entry + at::matmul(operand(d.ke).transpose(-1, -2), n);
    const Tensor o = scale * at::matmul(operand(d.qe), s) + at::matmul(m, n);
    return o.slice(1, 0, rows).transpose(0, 1);
  });
}

}  // namespace lockstep::model
