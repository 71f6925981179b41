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

/// Vocabulary entries whose maximum and sums are formed together.
inline constexpr int64_t kHeadPanel = 4096;
inline int64_t head_panel_count(int64_t vocab) { return (vocab + kHeadPanel - 1) / kHeadPanel; }

/// What a panel contributes to a row.
template <typename A>
struct PanelSums {
  A largest, sum, weighted;  ///< max z, sum e^(z - max), sum z e^(z - max)
};

/// h [T, D], weight [V, D]. Writes sums [T, panels] (weighted: 0 unless `entropy`) and, where a
/// label is in [0, V), its logit to label_logits [T].
template <typename A>
void head_panels(const HeadForm& form,
                 const A* h,
                 const A* weight,
                 const int64_t* labels,
                 bool entropy,
                 PanelSums<A>* sums,
                 A* label_logits);
/// sums [T, panels] merged in order. logprobs [T]: logits of the labels before, log-probabilities
/// after, 0 where the label is -1. Writes log_sum [T] and, if not null, entropy [T].
template <typename A>
void head_merge(int64_t tokens,
                int64_t panels,
                const PanelSums<A>* sums,
                const int64_t* labels,
                A* logprobs,
                A* log_sum,
                A* entropy);

/// Both: h [T, D], weight [V, D], labels [T] (-1: none).
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
