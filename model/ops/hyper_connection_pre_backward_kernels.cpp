// hc_pre, backward: the forward block again, then its derivative, in cache. Sums over tokens go to
// one partial result per super block of tokens, merged in order.
#include <algorithm>
#include <memory>
#include <type_traits>
#include <vector>

#include "model/base/blas.hpp"
#include "model/base/parallel.hpp"
#include "model/ops/chain_gemm.hpp"
#include "model/ops/hyper_connection_block.hpp"

namespace lockstep::model {
namespace {

template <typename A>
struct Partials {
  A *fn, *base, *scale, *weight;
  ExactRow::Part* rest = nullptr;  ///< instead of base, scale, weight
};

template <typename W>
class BackwardBlock {
  using A = typename W::Acc;
  static constexpr int64_t kPack = HcMixer<A>::kPack;

 public:
  BackwardBlock(const HcPreInputs<W>& in, const HcPreGradients<W>& grads)
      : in_(in),
        grads_(grads),
        n_(in.shape.streams),
        D_(in.shape.width),
        K_(in.shape.row()),
        P_(in.shape.num_logits()),
        block_(hc::block_tokens(K_)),
        mixer_(n_, in.sinkhorn_iters, in.eps),
        widened_(std::is_same_v<W, WidthBf16> ? size(block_ * K_) : 0),
        operand_(size(block_ * K_)),
        dz_(size(block_ * K_)),
        dm_(size(block_ * P_)),
        du_(size(block_ * D_)),
        pre_(size(block_ * n_)),
        dpre_(size(kPack * n_)),
        pack_(size((2 * P_ + 4 * n_ + n_ * n_ * 2) * kPack)),
        u_(size(D_)),
        before_(size(D_)),
        dxhat_(size(D_)),
        tokens_(grads.exact != nullptr ? size(kPack * (P_ + 3 + D_)) : 0) {}

  /// `first`: the partial sums hold nothing yet.
  void run(int64_t begin, int64_t count, bool first, const Partials<A>& sums) {
    const A* x = widen(in_.x + begin * K_, widened_.data(), count * K_);
    const A* z = in_.unrounded != nullptr ? in_.unrounded + begin * K_ : x;
    for (int64_t t = 0; t < count; t += kPack) {
      mix(x + t * K_, begin + t, t, std::min(kPack, count - t), sums);
    }
    undo_projection(z, begin, count, first, sums);
  }

 private:
  static size_t size(int64_t count) { return static_cast<size_t>(count); }

  /// Coefficients of up to 16 tokens and the derivative of all that depends on them: writes pre_,
  /// du_ and dm_.
  void mix(const A* x, int64_t token, int64_t t, int64_t count, const Partials<A>& sums) {
    A* m = pack_.data();
    A* dlogit = m + P_ * kPack;
    A* pre = dlogit + P_ * kPack;
    A* post = pre + n_ * kPack;
    A* dpre = post + n_ * kPack;
    A* dpost = dpre + n_ * kPack;
    A* comb = dpost + n_ * kPack;
    A* dcomb = comb + n_ * n_ * kPack;
    hc::to_pack(grads_.m + token * P_, P_, count, m);
    mixer_.forward(m, in_.base, in_.scale, pre, post, comb);
    hc::from_pack(pre, n_, count, pre_.data() + t * n_);
    std::fill(tokens_.begin(), tokens_.end(), A(0));
    const int64_t rest = P_ + 3 + D_;
    for (int64_t b = 0; b < count; ++b) {
      undo_norm(x + b * K_,
                pre_.data() + (t + b) * n_,
                token + b,
                du_.data() + (t + b) * D_,
                sums.rest != nullptr ? tokens_.data() + b * rest + P_ + 3 : sums.weight);
      for (int64_t i = 0; i < n_; ++i) {
        dpre_[size(b * n_ + i)] = dot(du_.data() + (t + b) * D_, x + b * K_ + i * D_, D_);
      }
    }
    hc::to_pack(dpre_.data(), n_, count, dpre);
    hc::to_pack(grads_.dpost + token * n_, n_, count, dpost);
    hc::to_pack(grads_.dcomb + token * n_ * n_, n_ * n_, count, dcomb);
    mixer_.backward(pre, post, dpre, dpost, dcomb, dlogit);
    for (int64_t p = 0; p < P_; ++p) {
      const int64_t which = p < n_ ? 0 : p < 2 * n_ ? 1 : 2;
      A* d = dlogit + p * kPack;
      if (sums.rest != nullptr) {
        for (int64_t b = 0; b < count; ++b) {
          A* of_token = tokens_.data() + b * rest;
          of_token[p] = d[b];
          of_token[P_ + which] += d[b] * m[p * kPack + b];
          d[b] *= in_.scale[which];
        }
        continue;
      }
      A base = 0, scale = 0;
      for (int64_t b = 0; b < kPack; ++b) {  // a missing token's gradient is zero
        base += d[b];
        scale += d[b] * m[p * kPack + b];
        d[b] *= in_.scale[which];
      }
      sums.base[p] += base;
      sums.scale[which] += scale;
    }
    if constexpr (std::is_same_v<A, float>) {
      for (int64_t b = 0; sums.rest != nullptr && b < count; ++b)
        sums.rest->add(tokens_.data() + b * rest);
    }
    hc::from_pack(dlogit, P_, count, dm_.data() + t * P_);
  }

  /// Gradient of the collapsed stream from that of its RMSNorm.
  void undo_norm(const A* x, const A* pre, int64_t token, A* du, A* dweight) {
    A* u = u_.data();
    hc::collapse(x, pre, n_, D_, u);
    const A* measured = u;
    if (in_.unrounded_statistic) {
      std::copy_n(u, D_, before_.data());
      measured = before_.data();
    }
    const A inverse = hc::round_and_measure<W>(u, D_, in_.unrounded_statistic, in_.norm_eps);
    const typename W::Act* dout = grads_.dx_normed + token * D_;
    const A* w = in_.norm_weight;
    A* dxhat = dxhat_.data();
    for (int64_t d = 0; d < D_; ++d) {
      const A g = load(dout + d);
      const A xhat = u[d] * inverse;
      dweight[d] += g * (in_.two_roundings ? W::round(xhat) : xhat);
      dxhat[d] = g * w[d];
    }
    const A along = dot(dxhat, u, D_) * (inverse * inverse * inverse) / static_cast<A>(D_);
    for (int64_t d = 0; d < D_; ++d) du[d] = inverse * dxhat[d] - along * measured[d];
  }

  void undo_projection(
      const A* z, int64_t begin, int64_t count, bool first, const Partials<A>& sums) {
    const HcProjection& how = in_.how;
    const A* r = grads_.r + begin;
    const A* m = grads_.m + begin * P_;
    // project-then-normalise: m = r p, hence dp = r dm, dr = dm . p = dm . m / r.
    dr_.assign(size(count), A(0));
    if (!how.normalise_first) {
      for (int64_t t = 0; t < count; ++t) {
        for (int64_t p = 0; p < P_; ++p) {
          dr_[size(t)] += dm_[size(t * P_ + p)] * m[t * P_ + p] / r[t];
          dm_[size(t * P_ + p)] *= r[t];
        }
      }
    }
    const bool copies = how.normalise_first || how.operands == HcOperands::kTf32;
    if (sums.fn != nullptr) {
      if (copies) hc::projection_operand(z, r, count, K_, how, operand_.data());
      const A* operand = copies ? operand_.data() : z;
      if (grads_.exact != nullptr) {
        chain_gemm<A>(P_, K_, count, {dm_.data(), 1, P_}, {operand, K_}, sums.fn, K_, !first);
      } else {
        gemm(Op::kTranspose,
             Op::kNone,
             P_,
             K_,
             count,
             A(1),
             dm_.data(),
             P_,
             operand,
             K_,
             first ? A(0) : A(1),
             sums.fn,
             K_);
      }
    }
    rows_product(Op::kNone,
                 count,
                 K_,
                 P_,
                 dm_.data(),
                 P_,
                 in_.fn,
                 K_,
                 dz_.data(),
                 K_,
                 how.rows,
                 static_cast<A*>(nullptr));
    for (int64_t t = 0; t < count; ++t) {
      const A* zt = z + t * K_;
      const A* g = dz_.data() + t * K_;
      const A dr = how.normalise_first ? dot(g, zt, K_) : dr_[size(t)];
      const A direct = how.normalise_first ? r[t] : A(1);
      const A through_r = r[t] * r[t] * r[t] * dr / static_cast<A>(K_);
      const A* du = du_.data() + t * D_;
      typename W::Act* dx = grads_.dx + (begin + t) * K_;
      for (int64_t i = 0; i < n_; ++i) {
        const A pre = pre_[size(t * n_ + i)];
        const A *gi = g + i * D_, *zi = zt + i * D_;
        for (int64_t d = 0; d < D_; ++d) {
          store(dx + i * D_ + d, pre * du[d] + (direct * gi[d] - through_r * zi[d]));
        }
      }
    }
  }

  const HcPreInputs<W>& in_;
  const HcPreGradients<W>& grads_;
  int64_t n_, D_, K_, P_, block_;
  HcMixer<A> mixer_;
  std::vector<A> widened_, operand_, dz_, dm_, du_, pre_, dpre_, pack_, u_, before_, dxhat_, dr_,
      tokens_;  ///< [token of a pack][P base, 3 scale, D weight]
};

/// Tokens per partial sum: at most 64 partial sums, whatever the number of tokens.
int64_t super_block_tokens(int64_t tokens) {
  const int64_t even_share = (tokens + 63) / 64;
  return std::max<int64_t>(256, (even_share + 63) / 64 * 64);
}

/// Blocks of tokens on all threads, each with its own part of the exact sums.
template <typename W>
void backward_exactly(const HcPreInputs<W>& in, const HcPreGradients<W>& grads) {
  using A = typename W::Acc;
  const HcExactSums& exact = *grads.exact;
  const int64_t P = in.shape.num_logits(), K = in.shape.row(), D = in.shape.width;
  const int64_t step = hc::block_tokens(K);
  const auto blocks = static_cast<int64_t>(exact.bounds.size()) - 1;
  parallel_for(0, blocks, 1, [&](int64_t b, int64_t e) {
    BackwardBlock<W> work(in, grads);
    std::vector<A> fn(static_cast<size_t>(P * K));
    ExactRow::Part fn_part(P * K), rest_part(P + 3 + D);
    for (int64_t block = b; block < e; ++block) {
      const int64_t begin = exact.bounds[static_cast<size_t>(block)],
                    end = exact.bounds[static_cast<size_t>(block) + 1];
      if (begin == end) continue;
      for (int64_t t = begin; t < end; t += step) {
        work.run(t,
                 std::min(step, end - t),
                 t == begin,
                 {fn.data(), nullptr, nullptr, nullptr, &rest_part});
      }
      if constexpr (std::is_same_v<A, float>) fn_part.add(fn.data());
    }
    exact.fn->merge(fn_part);
    exact.rest->merge(rest_part);
  });
}

}  // namespace

template <typename W>
void hc_pre_backward(const HcPreInputs<W>& in, const HcPreGradients<W>& grads) {
  if (grads.exact != nullptr) return backward_exactly(in, grads);
  using A = typename W::Acc;
  const int64_t T = in.shape.tokens, P = in.shape.num_logits(), K = in.shape.row(),
                D = in.shape.width;
  const int64_t block = hc::block_tokens(K), super = super_block_tokens(T);
  const int64_t supers = (T + super - 1) / super;
  const int64_t fn_size = grads.dfn != nullptr ? P * K : 0;
  const int64_t small = P + 3 + D;
  // Not initialised: the first block of each super block writes its sums whole.
  const std::unique_ptr<A[]> fn_sums(new A[static_cast<size_t>(supers * fn_size)]);
  std::vector<A> small_sums(static_cast<size_t>(supers * small));
  parallel_for(0, supers, 1, [&](int64_t b, int64_t e) {
    BackwardBlock<W> work(in, grads);
    for (int64_t s = b; s < e; ++s) {
      A* sums = small_sums.data() + s * small;
      const Partials<A> partials{
          fn_size > 0 ? fn_sums.get() + s * fn_size : nullptr, sums, sums + P, sums + P + 3};
      const int64_t end = std::min(T, (s + 1) * super);
      for (int64_t t = s * super; t < end; t += block) {
        work.run(t, std::min(block, end - t), t == s * super, partials);
      }
    }
  });
  const auto merge = [&](const A* sums, int64_t stride, int64_t count, A* to) {
    parallel_for(0, count, 4096, [&](int64_t b, int64_t e) {
      for (int64_t i = b; i < e; ++i) to[i] = A(0);
      for (int64_t s = 0; s < supers; ++s) {
        for (int64_t i = b; i < e; ++i) to[i] += sums[s * stride + i];
      }
    });
  };
  if (fn_size > 0) merge(fn_sums.get(), fn_size, fn_size, grads.dfn);
  merge(small_sums.data(), small, P, grads.dbase);
  merge(small_sums.data() + P, small, 3, grads.dscale);
  merge(small_sums.data() + P + 3, small, D, grads.dnorm_weight);
}

template void hc_pre_backward(const HcPreInputs<WidthF64>&, const HcPreGradients<WidthF64>&);
template void hc_pre_backward(const HcPreInputs<WidthF32>&, const HcPreGradients<WidthF32>&);
template void hc_pre_backward(const HcPreInputs<WidthBf16>&, const HcPreGradients<WidthBf16>&);

}  // namespace lockstep::model
