// The whole text model between token ids and the final hidden state.
#pragma once

#include <functional>

#include "model/layers/context.hpp"

namespace lockstep::model {

struct DecoderOptions {
  bool recompute = false;  ///< keep only each layer's input; run the layer again in backward
                           ///< (bitwise the same gradients)
  std::function<void(int64_t done, int64_t total)>
      progress;  ///< after each layer's forward; may be empty
};

/// One layer: X [T, n, D] -> [T, n, D]. `selection` is carried between sparse attention layers (see
/// dsa_mixer).
Tensor block(const LayerContext& ctx, int64_t layer, const Tensor& x, Tensor& selection);

/// Layers [first, last) applied to X. Every residual mixing is finished at the cut: running [0,2)
/// then [2,4) gives the bytes of [0,4), provided `selection` is handed on too.
Tensor run_layers(const LayerContext& ctx,
                  int64_t first,
                  int64_t last,
                  Tensor x,
                  Tensor& selection,
                  const DecoderOptions& options);

/// ids [T] int64 local rows -> streams after the last layer, [T, n, D] act. The embedding and each
/// layer are units (see run_unit); the head, finish() and what follows, is the caller's.
Tensor decoder_layers(const LayerContext& ctx, const Tensor& ids, const DecoderOptions& options);

/// Streams at the start: the embedding copied n times, [T, n, D].
Tensor embed_streams(const LayerContext& ctx, const Tensor& ids);

/// Mean of the streams and the final norm.
Tensor finish(const LayerContext& ctx, const Tensor& x);

}  // namespace lockstep::model
