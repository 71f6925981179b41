#include <algorithm>

#include "model/ops/moe_kernels.hpp"

namespace lockstep::model {
namespace {

/// The activation for one element: what was used in forward, and derivatives. All selects, so that
/// loops vectorise.
template <typename W, int kRoundings, bool kDivide>
struct Swiglu {
  using A = typename W::Acc;
  A gate, up;      // clamped
  A sig;           // sigmoid of the clamped gate
  A activated, h;  // as rounded

  Swiglu(A g, A u, A limit) {
    gate = g > limit ? limit : g;
    up = u > limit ? limit : (u < -limit ? -limit : u);
    sig = sigmoid(gate);
    if constexpr (kRoundings == 3) {
      activated = W::round(gate * W::round(sig));
    } else {
      activated = kDivide ? gate / (A(1) + exp_fast(-gate)) : gate * sig;
      if constexpr (kRoundings == 2) activated = W::round(activated);
    }
    h = W::round(activated * up);
  }
  [[nodiscard]] A slope() const {
    const A first = kRoundings == 3 ? W::round(sig) : sig;
    return first + gate * (sig * (A(1) - sig));
  }
};

/// Calls f<kRoundings, kDivide>(). Widths without rounding have one form only.
template <typename W, typename F>
void with_form(const SwigluForm& form, F&& f) {
  const int roundings = std::is_same_v<W, WidthBf16> ? form.roundings : 1;
  if (roundings == 3) {
    f.template operator()<3, false>();
  } else if (roundings == 2) {
    form.divide ? f.template operator()<2, true>() : f.template operator()<2, false>();
  } else {
    form.divide ? f.template operator()<1, true>() : f.template operator()<1, false>();
  }
}

}  // namespace

template <typename W>
void swiglu_forward(const SwigluForm& form,
                    int64_t count,
                    const typename W::Acc* gate,
                    const typename W::Acc* up,
                    typename W::Acc* h) {
  const auto limit = static_cast<typename W::Acc>(form.limit);
  with_form<W>(form, [&]<int kRoundings, bool kDivide>() {
    for (int64_t i = 0; i < count; ++i) {
      h[i] = Swiglu<W, kRoundings, kDivide>(gate[i], up[i], limit).h;
    }
  });
}

template <typename W>
void swiglu_backward(const SwigluForm& form,
                     int64_t count,
                     const typename W::Acc* gate,
                     const typename W::Acc* up,
                     const typename W::Acc* dh,
                     typename W::Acc* h,
                     typename W::Acc* dgate,
                     typename W::Acc* dup) {
  using A = typename W::Acc;
  const A limit = static_cast<A>(form.limit);
  with_form<W>(form, [&]<int kRoundings, bool kDivide>() {
    for (int64_t i = 0; i < count; ++i) {
      const A g = gate[i], u = up[i], d = dh[i];
      const Swiglu<W, kRoundings, kDivide> s(g, u, limit);
      h[i] = s.h;
      const A dg = d * s.up * s.slope(), du = d * s.activated;
      dgate[i] = g > limit ? A(0) : dg;
      dup[i] = (u > limit) | (u < -limit) ? A(0) : du;
    }
  });
}

template void swiglu_forward<WidthF64>(
    const SwigluForm&, int64_t, const double*, const double*, double*);
template void swiglu_forward<WidthF32>(
    const SwigluForm&, int64_t, const float*, const float*, float*);
template void swiglu_forward<WidthBf16>(
    const SwigluForm&, int64_t, const float*, const float*, float*);
template void swiglu_backward<WidthF64>(const SwigluForm&,
                                        int64_t,
                                        const double*,
                                        const double*,
                                        const double*,
                                        double*,
                                        double*,
                                        double*);
template void swiglu_backward<WidthF32>(
    const SwigluForm&, int64_t, const float*, const float*, const float*, float*, float*, float*);
template void swiglu_backward<WidthBf16>(
    const SwigluForm&, int64_t, const float*, const float*, const float*, float*, float*, float*);

}  // namespace lockstep::model
