#include <cmath>
#include <type_traits>

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

/// restrict, because the run-time test for overlaps of six arrays is one the compiler gives up on.
template <typename W, int kRoundings, bool kDivide>
void unclamped_gradient(int64_t count,
                        typename W::Acc limit,
                        const typename W::Acc* __restrict gate,
                        const typename W::Acc* __restrict up,
                        const typename W::Acc* __restrict dh,
                        typename W::Acc* __restrict h,
                        typename W::Acc* __restrict dgate,
                        typename W::Acc* __restrict dup) {
  for (int64_t i = 0; i < count; ++i) {
    const Swiglu<W, kRoundings, kDivide> s(gate[i], up[i], limit);
    h[i] = s.h;
    dgate[i] = dh[i] * s.up * s.slope();
    dup[i] = dh[i] * s.activated;
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
    unclamped_gradient<W, kRoundings, kDivide>(count, limit, gate, up, dh, h, dgate, dup);
  });
  // On its own, because the compiler does not vectorise the loop above with selects in it.
  for (int64_t i = 0; i < count; ++i) {
    const A dg = dgate[i], du = dup[i];
    dgate[i] = gate[i] > limit ? A(0) : dg;
    dup[i] = std::abs(up[i]) > limit ? A(0) : du;
  }
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
