// Hot loops of the output head, on raw pointers in acc.
#pragma once

#include <cstdint>

#include "model/ops/linear_tiles.hpp"

namespace lockstep::model {

enum class TemperatureForm : uint8_t { kMultiply, kDivide, kRaw };

struct HeadForm {
  int64_t tokens, width, vocab;  ///< of one chunk
  bool round_logits;             ///< D59
  TemperatureForm form;          ///< D60
  double temperature;
  RowTiles tiles;
};

/// h [T, D], weight [V, D], labels [T] (-1: none). Writes logprobs [T], log_sum [T] and, if not
/// null, entropy [T].
template <typename A>
void head_forward(const HeadForm& form,
                  const A* h,
                  const A* weight,
                  const int64_t* labels,
                  A* logprobs,
                  A* log_sum,
                  A* entropy);

/// Gradient of the logits, [T, V], rounded like them. log_sum as head_forward wrote it.
template <typename A>
void head_logit_gradient(const HeadForm& form,
                         const A* h,
                         const A* weight,
                         const int64_t* labels,
                         const A* log_sum,
                         const A* dlogprobs,
                         A* dlogits);

/// dweight [V, D] = or += dlogits^T h.
template <typename A>
void head_weight_gradient(const HeadForm& form, const A* dlogits, const A* h, bool add, A* dweight);

}  // namespace lockstep::model
