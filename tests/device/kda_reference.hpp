#pragma once

// Float64 per-token recurrence on the CPU: the truth the device kernels are compared with.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace lockstep::device_test {

inline float from_bf16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

/// One document and head. Rows are contiguous [length, 128]; state is [128 K, 128 V], updated.
struct HeadInput {
  const uint16_t *q, *k, *v, *f, *beta_logit;
  int64_t length;
  double a_log;
  const float* dt_bias;
  double lower_bound;
};

inline void kda_recurrence(const HeadInput& in, std::vector<double>& state, double* o) {
  constexpr int kD = 128;
  std::vector<double> q(kD), k(kD), alpha(kD), read(kD), delta(kD);
  const double scale = 1.0 / std::sqrt(128.0), slope = std::exp(in.a_log);
  for (int64_t t = 0; t < in.length; ++t) {
    double qq = 0, kk = 0;
    for (int c = 0; c < kD; ++c) {
      q[c] = from_bf16(in.q[t * kD + c]);
      k[c] = from_bf16(in.k[t * kD + c]);
      qq += q[c] * q[c];
      kk += k[c] * k[c];
      const double x = slope * (from_bf16(in.f[t * kD + c]) + static_cast<double>(in.dt_bias[c]));
      alpha[c] = std::exp(in.lower_bound / (1.0 + std::exp(-x)));
      read[c] = 0;
    }
    const double qn = 1.0 / std::sqrt(qq + 1e-6), kn = 1.0 / std::sqrt(kk + 1e-6);
    const double beta = 1.0 / (1.0 + std::exp(-static_cast<double>(from_bf16(in.beta_logit[t]))));
    for (int c = 0; c < kD; ++c) {
      double* row = &state[static_cast<size_t>(c) * kD];
      const double a = alpha[c], kc = k[c] * kn;
      for (int j = 0; j < kD; ++j) {
        row[j] *= a;
        read[j] += kc * row[j];
      }
    }
    for (int j = 0; j < kD; ++j) delta[j] = beta * (from_bf16(in.v[t * kD + j]) - read[j]);
    double* out = o + t * kD;
    for (int j = 0; j < kD; ++j) out[j] = 0;
    for (int c = 0; c < kD; ++c) {
      double* row = &state[static_cast<size_t>(c) * kD];
      const double kc = k[c] * kn, qc = q[c] * qn * scale;
      for (int j = 0; j < kD; ++j) {
        row[j] += kc * delta[j];
        out[j] += qc * row[j];
      }
    }
  }
}

/// Gradients of one document and head. Rows are contiguous [length, 128].
struct HeadGradients {
  std::vector<double> dq, dk, dv, df, dbeta, ddt_bias, dstate;
  double da_log = 0;
};

/// Backward of kda_recurrence, token by token in reverse. `state` enters the document, `dstate` is
/// the gradient of the state that leaves it.
inline HeadGradients kda_recurrence_backward(const HeadInput& in,
                                             std::vector<double> state,
                                             const uint16_t* dout,
                                             std::vector<double> dstate) {
  constexpr int kD = 128;
  constexpr int64_t kBlock = 32;  // tokens between kept states
  const auto rows = static_cast<size_t>(in.length) * kD;
  HeadGradients g;
  for (std::vector<double>* x : {&g.dq, &g.dk, &g.dv, &g.df}) x->resize(rows);
  g.dbeta.resize(static_cast<size_t>(in.length));
  g.ddt_bias.assign(kD, 0.0);
  const double scale = 1.0 / std::sqrt(128.0), slope = std::exp(in.a_log);
  struct Token {
    std::vector<double> q = std::vector<double>(kD), k = q, alpha = q, sigma = q, z = q, rest = q,
                        u = q;
    double q_inverse, k_inverse, beta;
  };
  const auto load = [&](int64_t t, Token& x) {
    double qq = 0, kk = 0;
    for (int c = 0; c < kD; ++c) {
      x.q[c] = from_bf16(in.q[t * kD + c]);
      x.k[c] = from_bf16(in.k[t * kD + c]);
      qq += x.q[c] * x.q[c];
      kk += x.k[c] * x.k[c];
      x.z[c] = from_bf16(in.f[t * kD + c]) + static_cast<double>(in.dt_bias[c]);
      x.sigma[c] = 1.0 / (1.0 + std::exp(-slope * x.z[c]));
      x.alpha[c] = std::exp(in.lower_bound * x.sigma[c]);
    }
    x.q_inverse = 1.0 / std::sqrt(qq + 1e-6);
    x.k_inverse = 1.0 / std::sqrt(kk + 1e-6);
    for (int c = 0; c < kD; ++c) {
      x.q[c] *= x.q_inverse;
      x.k[c] *= x.k_inverse;
    }
    x.beta = 1.0 / (1.0 + std::exp(-static_cast<double>(from_bf16(in.beta_logit[t]))));
  };
  // state <- after token t; x.rest = v - k (alpha state), x.u = beta rest
  const auto step = [&](int64_t t, Token& x, std::vector<double>& s) {
    for (int j = 0; j < kD; ++j) x.rest[j] = from_bf16(in.v[t * kD + j]);
    for (int c = 0; c < kD; ++c)
      for (int j = 0; j < kD; ++j) {
        double& value = s[static_cast<size_t>(c) * kD + j];
        value *= x.alpha[c];
        x.rest[j] -= x.k[c] * value;
      }
    for (int j = 0; j < kD; ++j) x.u[j] = x.beta * x.rest[j];
    for (int c = 0; c < kD; ++c)
      for (int j = 0; j < kD; ++j) s[static_cast<size_t>(c) * kD + j] += x.k[c] * x.u[j];
  };
  std::vector<std::vector<double>> kept;
  Token x;
  for (int64_t t = 0; t < in.length; ++t) {
    if (t % kBlock == 0) kept.push_back(state);
    load(t, x);
    step(t, x, state);
  }
  std::vector<std::vector<double>> before(kBlock);
  std::vector<Token> tokens(kBlock);
  std::vector<double> du(kD), dr(kD), do_row(kD), after(kD * kD);
  for (int64_t block = static_cast<int64_t>(kept.size()) - 1; block >= 0; --block) {
    const int64_t first = block * kBlock, last = std::min(first + kBlock, in.length);
    std::vector<double> s = kept[static_cast<size_t>(block)];
    for (int64_t t = first; t < last; ++t) {
      before[t - first] = s;
      load(t, tokens[t - first]);
      step(t, tokens[t - first], s);
    }
    for (int64_t t = last - 1; t >= first; --t) {
      const Token& y = tokens[t - first];
      const std::vector<double>& old = before[t - first];
      for (int j = 0; j < kD; ++j) {
        do_row[j] = from_bf16(dout[t * kD + j]);
        du[j] = 0;
      }
      double *dq = &g.dq[t * kD], *dk = &g.dk[t * kD], *df = &g.df[t * kD];
      for (int c = 0; c < kD; ++c) {
        double sum_q = 0, sum_k = 0;
        for (int j = 0; j < kD; ++j) {
          const double now = y.alpha[c] * old[static_cast<size_t>(c) * kD + j] + y.k[c] * y.u[j];
          double& d = dstate[static_cast<size_t>(c) * kD + j];
          sum_q += now * do_row[j];
          d += scale * y.q[c] * do_row[j];
          sum_k += d * y.u[j];
          du[j] += y.k[c] * d;
        }
        dq[c] = scale * sum_q;
        dk[c] = sum_k;
      }
      double dbeta = 0;
      for (int j = 0; j < kD; ++j) {
        dbeta += du[j] * y.rest[j];
        g.dv[t * kD + j] = y.beta * du[j];
        dr[j] = -y.beta * du[j];
      }
      g.dbeta[t] =
          dbeta * y.beta / (1.0 + std::exp(static_cast<double>(from_bf16(in.beta_logit[t]))));
      double along_q = 0, along_k = 0;
      for (int c = 0; c < kD; ++c) {
        double sum_k = 0, sum_alpha = 0;
        for (int j = 0; j < kD; ++j) {
          const double previous = old[static_cast<size_t>(c) * kD + j];
          double& d = dstate[static_cast<size_t>(c) * kD + j];
          sum_k += y.alpha[c] * previous * dr[j];
          d += y.k[c] * dr[j];
          sum_alpha += d * previous;
          d *= y.alpha[c];
        }
        dk[c] += sum_k;
        const double other = 1.0 / (1.0 + std::exp(slope * y.z[c]));
        df[c] = sum_alpha * y.alpha[c] * in.lower_bound * y.sigma[c] * other * slope;
        g.ddt_bias[c] += df[c];
        g.da_log += df[c] * y.z[c];
        along_q += y.q[c] * dq[c];
        along_k += y.k[c] * dk[c];
      }
      for (int c = 0; c < kD; ++c) {
        dq[c] = (dq[c] - y.q[c] * along_q) * y.q_inverse;
        dk[c] = (dk[c] - y.k[c] * along_k) * y.k_inverse;
      }
    }
  }
  g.dstate = std::move(dstate);
  return g;
}

}  // namespace lockstep::device_test
