// hc_pre, forward: blocks of tokens that stay in cache; one product for all logits of a block.
#include <vector>

#include "model/base/parallel.hpp"
#include "model/ops/hyper_connection_block.hpp"

namespace lockstep::model {
namespace {

template <typename W>
class ForwardBlock {
  using A = typename W::Acc;
  static constexpr int64_t kPack = HcMixer<A>::kPack;

 public:
  ForwardBlock(const HcPreInputs<W>& in, const HcPreOutputs<W>& out)
      : in_(in),
        out_(out),
        n_(in.shape.streams),
        D_(in.shape.width),
        K_(in.shape.row()),
        P_(in.shape.num_logits()),
        block_(hc::block_tokens(K_)),
        mixer_(n_, in.sinkhorn_iters, in.eps),
        widened_(std::is_same_v<W, WidthBf16> ? size(block_ * K_) : 0),
        operand_(size(block_ * K_)),
        logits_(size(block_ * P_)),
        partial_(size(block_ * P_)),
        product_(size(block_ * P_)),
        scratch_(in.how.rows == RowTiles::kFixed ? size(block_ * (K_ + P_)) : 0),
        pack_(size((P_ + 2 * n_ + n_ * n_) * kPack)),
        pre_(size(block_ * n_)),
        u_(size(D_)) {}

  void run(int64_t begin, int64_t count) {
    const A* x = widen(in_.x + begin * K_, widened_.data(), count * K_);
    const A* z = in_.unrounded != nullptr ? in_.unrounded + begin * K_ : x;
    A* r = out_.r + begin;
    for (int64_t t = 0; t < count; ++t) {
      const A square = dot(z + t * K_, z + t * K_, K_);
      r[t] = A(1) / std::sqrt(square / static_cast<A>(K_) + in_.norm_eps);
    }
    A* m = out_.m + begin * P_;
    project(z, r, count);
    for (int64_t t = 0; t < count; ++t) {
      const A factor = in_.how.normalise_first ? A(1) : r[t];
      for (int64_t p = 0; p < P_; ++p) m[t * P_ + p] = logits_[size(t * P_ + p)] * factor;
    }
    for (int64_t t = 0; t < count; t += kPack) mix(begin, t, std::min(kPack, count - t));
    for (int64_t t = 0; t < count; ++t) {
      normalised_sum(x + t * K_, pre_.data() + t * n_, out_.x_normed + (begin + t) * D_);
    }
  }

 private:
  static size_t size(int64_t count) { return static_cast<size_t>(count); }

  /// logits_ [count, P]
  void project(const A* z, const A* r, int64_t count) {
    const HcProjection& how = in_.how;
    const bool copies = how.normalise_first || how.operands == HcOperands::kTf32;
    if (copies) hc::projection_operand(z, r, count, K_, how, operand_.data());
    const A* operand = copies ? operand_.data() : z;
    const int terms = how.operands == HcOperands::kBf16x3 ? 3 : 1;
    std::fill(logits_.begin(), logits_.end(), A(0));
    for (int64_t k0 = 0; k0 < K_; k0 += how.slice_width) {
      const int64_t width = std::min(how.slice_width, K_ - k0);
      std::fill(partial_.begin(), partial_.end(), A(0));
      for (int term = 0; term < terms; ++term) {
        const A* fn = in_.fn_terms + term * P_ * K_ + k0;
        rows_product(Op::kTranspose,
                     count,
                     P_,
                     width,
                     operand + k0,
                     K_,
                     fn,
                     K_,
                     product_.data(),
                     P_,
                     how.rows,
                     scratch_.data());
        for (int64_t e = 0; e < count * P_; ++e) partial_[size(e)] += product_[size(e)];
      }
      for (int64_t e = 0; e < count * P_; ++e) logits_[size(e)] += partial_[size(e)];
    }
  }

  void mix(int64_t begin, int64_t t, int64_t count) {
    A* m = pack_.data();
    A* pre = m + P_ * kPack;
    A* post = pre + n_ * kPack;
    A* comb = post + n_ * kPack;
    hc::to_pack(out_.m + (begin + t) * P_, P_, count, m);
    mixer_.forward(m, in_.base, in_.scale, pre, post, comb);
    hc::from_pack(pre, n_, count, pre_.data() + t * n_);
    hc::from_pack(post, n_, count, out_.post + (begin + t) * n_);
    hc::from_pack(comb, n_ * n_, count, out_.comb + (begin + t) * n_ * n_);
  }

  void normalised_sum(const A* x, const A* pre, typename W::Act* out) {
    A* u = u_.data();
    hc::collapse(x, pre, n_, D_, u);
    const A inverse = hc::round_and_measure<W>(u, D_, in_.unrounded_statistic, in_.norm_eps);
    const A* w = in_.norm_weight;
    if (in_.two_roundings) {
      for (int64_t d = 0; d < D_; ++d) store(out + d, W::round(u[d] * inverse) * w[d]);
    } else {
      for (int64_t d = 0; d < D_; ++d) store(out + d, u[d] * inverse * w[d]);
    }
  }

  const HcPreInputs<W>& in_;
  const HcPreOutputs<W>& out_;
  int64_t n_, D_, K_, P_, block_;
  HcMixer<A> mixer_;
  std::vector<A> widened_, operand_, logits_, partial_, product_, scratch_, pack_, pre_, u_;
};

}  // namespace

template <typename W>
void hc_pre_forward(const HcPreInputs<W>& in, const HcPreOutputs<W>& out) {
  const int64_t block = hc::block_tokens(in.shape.row());
  const int64_t blocks = (in.shape.tokens + block - 1) / block;
  parallel_for(0, blocks, 1, [&](int64_t b, int64_t e) {
    ForwardBlock<W> work(in, out);
    for (int64_t i = b; i < e; ++i) {
      work.run(i * block, std::min(block, in.shape.tokens - i * block));
    }
  });
}

template void hc_pre_forward(const HcPreInputs<WidthF64>&, const HcPreOutputs<WidthF64>&);
template void hc_pre_forward(const HcPreInputs<WidthF32>&, const HcPreOutputs<WidthF32>&);
template void hc_pre_forward(const HcPreInputs<WidthBf16>&, const HcPreOutputs<WidthBf16>&);

}  // namespace lockstep::model
