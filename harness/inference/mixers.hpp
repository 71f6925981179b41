// The parts of a layer as the engine computes them: merged projections, caches instead of whole
// documents. x [T, D] act are the rows of a batch.
#pragma once

#include <string>
#include <string_view>

#include "harness/inference/batch.hpp"
#include "harness/inference/weights.hpp"
#include "model/base/op_timer.hpp"
#include "model/seams/tensor_split.hpp"
#include "model/seams/trace.hpp"

namespace lockstep::harness {

struct StepContext {
  const model::ModelConfig& config;
  const model::Numerics& num;
  const EngineWeights& weights;
  const Caches& caches;
  model::TensorSplit& tensor;
  const Batch& batch;
  model::TraceSink* trace = nullptr;  ///< may be null; rows are those of the batch
};

/// Weights and modules of one layer by name.
class EngineLayer {
 public:
  EngineLayer(const StepContext& ctx, int64_t layer)
      : ctx_(ctx), prefix_(fmt::format("layers.{}.", layer)) {}
  [[nodiscard]] std::string operator()(std::string_view rest) const {
    return prefix_ + std::string(rest);
  }
  [[nodiscard]] const Tensor& weight(std::string_view rest) const {
    return ctx_.weights.at((*this)(rest));
  }
  void record(std::string_view rest, const Tensor& value) const {
    const std::string name = (*this)(rest);
    if (ctx_.trace != nullptr && ctx_.trace->wants(name)) ctx_.trace->record(name, value);
  }

 private:
  const StepContext& ctx_;
  std::string prefix_;
};

/// Rows of a KDA chunk where a step continues the open chunk (D28 = document): its rows are kept
/// and computed again with the new ones, so that chunked prefill gives the bits of a whole one. 0:
/// each prefill call starts a chunk.
int64_t replayed_chunk(const model::Numerics& num);
/// Decoding, too, runs the chunked form over the open chunk: in the invariant policies, where a
/// row's bits do not depend on how it was computed.
bool decodes_by_chunks(const model::Numerics& num);

/// Advances the layer's convolution rows and recurrent states.
Tensor engine_kda(const StepContext& ctx, int64_t layer, const Tensor& x);
/// Writes latents, pools and ring. `selection`: of the last layer with an indexer, entries of each
/// row's request, int32 [T, width]; replaced where this layer has its own.
Tensor engine_dsa(const StepContext& ctx, int64_t layer, const Tensor& x, Tensor& selection);
Tensor engine_mlp(const StepContext& ctx, int64_t layer, const Tensor& x);

/// Output projection, whole on every rank; see model::project_out.
Tensor engine_project_out(const StepContext& ctx,
                          const Tensor& y,
                          const Tensor& weight,
                          const std::string& what);

}  // namespace lockstep::harness
