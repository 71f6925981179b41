// The next token from logits.
#pragma once

#include <cstdint>

#include "model/base/torch.hpp"

namespace lockstep::harness {

struct Sampling {
  double temperature = 1.0;  ///< 0: the most likely token, ties to the lowest id
  double top_p = 1.0;        ///< in (0, 1]: the fewest most likely tokens that sum to it
  uint64_t seed = 0;         ///< of the request
};

/// Throws kConfig for a negative temperature or a top_p outside (0, 1].
void check_sampling(const Sampling& sampling);

/// A number in [0, 1) that depends on seed and index alone.
double sampling_uniform(uint64_t seed, int64_t index);

/// Token number `index` of a request: softmax(logits / temperature), in float64, cut to top_p,
/// tokens by descending logit, then id. The choice depends on the logits and (seed, index) alone,
/// not on other requests or on how many steps came before. logits [V] floating.
int64_t sample(const Tensor& logits, const Sampling& sampling, int64_t index);

}  // namespace lockstep::harness
