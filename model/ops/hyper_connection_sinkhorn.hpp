// From the P logits of a token to pre, post and comb, and back. Sixteen tokens at a time, token
// fastest, so that every line is a vector operation; a short pack is padded with zero logits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "model/base/scalar.hpp"

namespace lockstep::model {

template <typename A>
class HcMixer {
 public:
  static constexpr int64_t kPack = 16;

  HcMixer(int64_t streams, int64_t iterations, A eps)
      : n_(streams),
        steps_(2 * iterations - 1),
        eps_(eps),
        softmax_(size(n_ * n_)),
        iterates_(size(steps_ * n_ * n_)),
        sums_(size(steps_ * n_)) {}

  /// m [P][16]; base [P], scale [3]; pre, post [n][16], comb [n * n][16]. Keeps what backward
  /// needs.
  void forward(const A* m, const A* base, const A* scale, A* pre, A* post, A* comb) {
    for (int64_t i = 0; i < n_; ++i) {
      for (int64_t b = 0; b < kPack; ++b) {
        pre[i * kPack + b] = sigmoid(m[i * kPack + b] * scale[0] + base[i]) + eps_;
      }
      const A* m_post = m + (n_ + i) * kPack;
      for (int64_t b = 0; b < kPack; ++b) {
        post[i * kPack + b] = sigmoid(m_post[b] * scale[1] + base[n_ + i]) * A(2);
      }
    }
    for (int64_t i = 0; i < n_; ++i)
      softmax_row(m + (2 + i) * n_ * kPack, base + (2 + i) * n_, scale[2], i);
    for (size_t e = 0; e < softmax_.size(); ++e) comb[e] = softmax_[e] + eps_;
    for (int64_t step = 0; step < steps_; ++step) {
      A* result = iterates_.data() + step * n_ * n_ * kPack;
      normalise(step, step == 0 ? comb : result - n_ * n_ * kPack, result);
    }
    std::copy_n(iterates_.data() + (steps_ - 1) * n_ * n_ * kPack, n_ * n_ * kPack, comb);
  }

  /// After forward of the same pack. pre, post as it returned them; dpre, dpost [n][16]; dcomb [n *
  /// n][16] is overwritten. Writes dlogit [P][16], the gradient of m * scale + base.
  void backward(const A* pre, const A* post, const A* dpre, const A* dpost, A* dcomb, A* dlogit) {
    for (int64_t e = 0; e < n_ * kPack; ++e) {
      const A s = pre[e] - eps_, t = post[e] * A(0.5);
      dlogit[e] = dpre[e] * s * (A(1) - s);
      dlogit[n_ * kPack + e] = dpost[e] * A(2) * t * (A(1) - t);
    }
    for (int64_t step = steps_ - 1; step >= 0; --step) undo_normalise(step, dcomb);
    for (int64_t i = 0; i < n_; ++i) {
      const A* s = softmax_.data() + i * n_ * kPack;
      const A* dc = dcomb + i * n_ * kPack;
      A* dl = dlogit + (2 + i) * n_ * kPack;
      A along[kPack] = {};
      for (int64_t e = 0; e < n_; ++e) {
        for (int64_t b = 0; b < kPack; ++b) along[b] += dc[e * kPack + b] * s[e * kPack + b];
      }
      for (int64_t e = 0; e < n_; ++e) {
        for (int64_t b = 0; b < kPack; ++b) {
          dl[e * kPack + b] = s[e * kPack + b] * (dc[e * kPack + b] - along[b]);
        }
      }
    }
  }

 private:
  static size_t size(int64_t count) { return static_cast<size_t>(count * kPack); }

  void softmax_row(const A* m, const A* base, A scale, int64_t row) {
    A* c = softmax_.data() + row * n_ * kPack;
    A largest[kPack], total[kPack] = {};
    for (int64_t j = 0; j < n_; ++j) {
      for (int64_t b = 0; b < kPack; ++b) {
        const A logit = m[j * kPack + b] * scale + base[j];
        c[j * kPack + b] = logit;
        largest[b] = j == 0 || logit > largest[b] ? logit : largest[b];
      }
    }
    for (int64_t j = 0; j < n_; ++j) {
      for (int64_t b = 0; b < kPack; ++b) {
        const A e = exp_fast(c[j * kPack + b] - largest[b]);
        c[j * kPack + b] = e;
        total[b] += e;
      }
    }
    for (int64_t j = 0; j < n_; ++j) {
      for (int64_t b = 0; b < kPack; ++b) c[j * kPack + b] /= total[b];
    }
  }

  // Even steps divide columns (the sum runs over i), odd steps rows.
  [[nodiscard]] int64_t group_stride(int64_t step) const {
    return step % 2 == 0 ? kPack : n_ * kPack;
  }
  [[nodiscard]] int64_t member_stride(int64_t step) const {
    return step % 2 == 0 ? n_ * kPack : kPack;
  }

  void normalise(int64_t step, const A* from, A* to) {
    const int64_t group = group_stride(step), member = member_stride(step);
    for (int64_t g = 0; g < n_; ++g) {
      A* sum = sums_.data() + (step * n_ + g) * kPack;
      A total[kPack] = {};
      for (int64_t e = 0; e < n_; ++e) {
        const A* c = from + g * group + e * member;
        for (int64_t b = 0; b < kPack; ++b) total[b] += c[b];
      }
      for (int64_t b = 0; b < kPack; ++b) total[b] += eps_;
      for (int64_t e = 0; e < n_; ++e) {
        const A* c = from + g * group + e * member;
        A* y = to + g * group + e * member;
        for (int64_t b = 0; b < kPack; ++b) y[b] = c[b] / total[b];
      }
      std::copy_n(total, kPack, sum);
    }
  }

  /// y = c / (sum c + eps): dc = (dy - sum(dy y)) / (sum c + eps).
  void undo_normalise(int64_t step, A* d) const {
    const int64_t group = group_stride(step), member = member_stride(step);
    const A* result = iterates_.data() + step * n_ * n_ * kPack;
    for (int64_t g = 0; g < n_; ++g) {
      const A* sum = sums_.data() + (step * n_ + g) * kPack;
      A along[kPack] = {};
      for (int64_t e = 0; e < n_; ++e) {
        const int64_t at = g * group + e * member;
        for (int64_t b = 0; b < kPack; ++b) along[b] += d[at + b] * result[at + b];
      }
      A inverse[kPack];
      for (int64_t b = 0; b < kPack; ++b) inverse[b] = A(1) / sum[b];
      for (int64_t e = 0; e < n_; ++e) {
        A* dc = d + g * group + e * member;
        for (int64_t b = 0; b < kPack; ++b) dc[b] = (dc[b] - along[b]) * inverse[b];
      }
    }
  }

  int64_t n_, steps_;
  A eps_;
  std::vector<A> softmax_, iterates_, sums_;
};

}  // namespace lockstep::model
