// Where the arrays of one (chunk, head) lie.
#include "model/ops/kda_core.hpp"

namespace lockstep::model {

template <typename R>
KdaLayout<R>::KdaLayout(int64_t dim, int64_t chunk, bool rounds_state_operand, bool backward)
    : width_((dim + simd::kPad<R> - 1) / simd::kPad<R> * simd::kPad<R>),
      chunk_(chunk),
      separate_operand_(rounds_state_operand),
      backward_(backward) {
  assign([this](bool in_slot, int64_t size) -> R* {
    (in_slot || backward_ ? slot_size_ : scratch_size_) += size;
    return nullptr;
  });
}

template <typename R>
KdaData<R> KdaLayout<R>::carve(R* slot, R* scratch) const {
  return assign([&](bool in_slot, int64_t size) {
    R*& from = in_slot || backward_ ? slot : scratch;
    R* result = from;
    if (from) from += size;
    return result;
  });
}

template <typename R>
template <typename Take>
KdaData<R> KdaLayout<R>::assign(Take&& take) const {
  const int64_t cd = chunk_ * width_, cc = chunk_ * chunk_, dd = width_ * width_;
  const int64_t blocks = chunk_ / kBlock;
  KdaData<R> d{};
  d.width = width_;
  d.chunk = chunk_;
  // What the chain and the output read.
  d.m = take(true, cc);
  d.w = take(true, cd);
  d.n = take(true, cd);
  d.qe = take(true, cd);
  d.ke = take(true, cd);
  d.chunk_decay = take(true, width_);
  d.s = take(true, dd);
  d.s_used = separate_operand_ ? take(true, dd) : d.s;
  // What only preparation and gradients read.
  d.q = take(false, cd);
  d.k = take(false, cd);
  d.beta = take(false, chunk_);
  d.decay = take(false, cd);
  d.from_start = take(false, cd);
  d.to_end = take(false, cd);
  d.total = take(false, blocks * width_);
  d.before = take(false, blocks * width_);
  d.after = take(false, blocks * width_);
  d.q_start = take(false, cd);
  d.k_start = take(false, cd);
  d.k_end = take(false, cd);
  d.gm = take(false, cc);
  d.l = take(false, cc);
  d.tm = take(false, cc);
  d.work = take(false, 4 * kBlock * kBlock);
  d.bkt = take(false, cd);
  d.bv = take(false, cd);
  if (backward_) {
    d.y = take(true, cd);
    d.dn = take(true, cd);
    d.dout = take(true, cd);
    d.ds = take(true, dd);
  }
  return d;
}

template class KdaLayout<float>;
template class KdaLayout<double>;

}  // namespace lockstep::model
