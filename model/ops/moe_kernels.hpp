// Hot loops of the mixture of experts, on raw pointers. W is one of the width types of
// model/base/scalar.hpp; every array is contiguous.
#pragma once

#include <cstdint>

#include "model/base/scalar.hpp"
#include "model/ops/exact_rows.hpp"
#include "model/ops/linear_tiles.hpp"

namespace lockstep::model {

// --- router --------------------------------------------------------------------------------------

struct RouterForm {
  int64_t tokens, experts, top_k;
  int64_t groups, groups_kept;  ///< groups == 1: no limit
  bool normalise, softmax, round_scores;
  double scaling, eps;
};

/// logits [T, E], bias [E]; chosen [T, k] is read if `replay`, otherwise written; weights [T, k].
template <typename A>
void router_forward(const RouterForm& form,
                    const A* logits,
                    const A* bias,
                    bool replay,
                    int64_t* chosen,
                    A* weights);

/// dlogits [T, E], written whole.
template <typename A>
void router_backward(
    const RouterForm& form, const A* logits, const int64_t* chosen, const A* dweights, A* dlogits);

// --- clamped SwiGLU ------------------------------------------------------------------------------

struct SwigluForm {
  double limit;   ///< infinity: no clamp
  bool divide;    ///< D16: x / (1 + e^-x) instead of x * sigmoid(x)
  int roundings;  ///< D53: 1, 2 or 3
};

/// h[i] from gate[i], up[i] (rounded values in acc) for i < count.
template <typename W>
void swiglu_forward(const SwigluForm& form,
                    int64_t count,
                    const typename W::Acc* gate,
                    const typename W::Acc* up,
                    typename W::Acc* h);

/// Also h again; dgate and dup are not rounded. No array may overlap another.
template <typename W>
void swiglu_backward(const SwigluForm& form,
                     int64_t count,
                     const typename W::Acc* gate,
                     const typename W::Acc* up,
                     const typename W::Acc* dh,
                     typename W::Acc* h,
                     typename W::Acc* dgate,
                     typename W::Acc* dup);

// --- experts -------------------------------------------------------------------------------------

/// Experts [first, last) of a call, their weights raised to acc. gate, up, down point at expert
/// `first`; consecutive experts are `gate_stride` (also for up) and width * inner values apart.
template <typename A>
struct ExpertSlice {
  int64_t first, last;
  const A *gate, *up, *down;
  int64_t gate_stride;
};

struct ExpertsForm {
  int64_t rows, width, inner;  ///< R, D, I
  const int64_t* offsets;      ///< [E + 1]
  SwigluForm swiglu;
  RowTiles tiles;
};

/// x [R, D]; h [R, I] and (if not null) gate_up [R, 2 I] are written for the slice's rows, as is
/// out [R, D].
template <typename W>
void experts_forward(const ExpertsForm& form,
                     const ExpertSlice<typename W::Acc>& slice,
                     const typename W::Acc* x,
                     typename W::Act* gate_up,
                     typename W::Acc* h,
                     typename W::Act* out);

/// Weight gradients of a slice, in acc, laid out like ExpertSlice; null where not wanted.
template <typename A>
struct ExpertGradients {
  A *gate, *up, *down;
};

/// Scratch: h [R, I], dgate_up [R, 2 I]. dx [R, D] may be null.
template <typename W>
void experts_backward(const ExpertsForm& form,
                      const ExpertSlice<typename W::Acc>& slice,
                      const typename W::Acc* x,
                      const typename W::Act* gate_up,
                      const typename W::Acc* dout,
                      typename W::Acc* h,
                      typename W::Acc* dgate_up,
                      typename W::Act* dx,
                      const ExpertGradients<typename W::Acc>& grads);

/// Exact weight gradients of all experts from what experts_backward left in h and dgate_up. Expert
/// e's gate and up at e * gate_stride of theirs, down at e * width * inner.
struct ExactExperts {
  std::span<const int64_t> bounds;  ///< blocks of rows; offsets are among them
  int64_t num_experts, gate_stride;
  ExactTarget gate, up, down;  ///< strides width, width, inner
  Peak peak;
};
void experts_exact_gradients(const ExpertsForm& form,
                             const float* x,
                             const float* dout,
                             const float* h,
                             const float* dgate_up,
                             ExactExperts& to);

// --- between token order and expert order --------------------------------------------------------

struct CombineForm {
  int64_t tokens, slots, width;  ///< T, k, D
  bool weigh_rounded;            ///< D54: act(w * row) per expert
  bool sum_rounded;              ///< D55: rounded additions
};

/// place [T, k]: the sorted rows of each token, ascending; slot_of [R]: t * k + slot of each row.
void places_of_tokens(int64_t tokens, int64_t slots, const int64_t* slot_of, int64_t* place);

template <typename W>
void combine_forward(const CombineForm& form,
                     const typename W::Act* rows,
                     const int64_t* place,
                     const int64_t* slot_of,
                     const typename W::Acc* weights,
                     typename W::Act* out);
template <typename W>
void combine_backward(const CombineForm& form,
                      const typename W::Act* rows,
                      const int64_t* slot_of,
                      const typename W::Acc* weights,
                      const typename W::Act* dout,
                      typename W::Act* drows,
                      typename W::Acc* dweights);

/// out[t] = sum of rows[place[t][.]] in order, in acc, rounded once.
template <typename W>
void sum_places(int64_t tokens,
                int64_t slots,
                int64_t width,
                const typename W::Act* rows,
                const int64_t* place,
                typename W::Act* out);

}  // namespace lockstep::model
