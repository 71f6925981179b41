// What every layer needs besides its input.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "model/base/packing.hpp"
#include "model/base/weight.hpp"
#include "model/config/model_config.hpp"
#include "model/config/numerics.hpp"
#include "model/seams/param_view.hpp"
#include "model/seams/sequence.hpp"
#include "model/seams/tensor_split.hpp"
#include "model/seams/token_exchange.hpp"
#include "model/seams/trace.hpp"

namespace lockstep::model {

/// Where the parallel schemes stand in. References stay valid for the whole forward and backward
/// pass.
struct Seams {
  SequenceSeam& sequence;
  TokenExchange& experts;
  TensorSplit& tensor;

  /// One process that holds everything.
  static Seams local();
};

/// The exact sums that gradients of a unit's parameters go to, by name.
using GradientSums = std::map<std::string, ExactSum>;

/// References stay valid for the whole forward and backward pass. `packing` is a private copy: a
/// layer that is recomputed sees the boundaries its first forward saw, whatever the caller has done
/// to its own since.
struct LayerContext {
  const ModelConfig& config;
  const Numerics& num;
  Packing packing;
  ParamView& params;
  Seams seams;
  TraceSink* trace = nullptr;  ///< may be null
  bool reference = false;      ///< plain reference operators
  const std::vector<Tensor>* replay =
      nullptr;  ///< per layer experts [T_local, k] to use instead of choosing; may be null
  RowBlocks blocks = nullptr;    ///< canonical tiles of local tokens, where a unit set them
  GradientSums* sums = nullptr;  ///< likewise

  /// Passes `value` to the trace if it is wanted.
  void record(const std::string& name, const Tensor& value) const {
    if (trace != nullptr && trace->wants(name)) trace->record(name, value);
  }
  /// The same with other parameters.
  [[nodiscard]] LayerContext with(ParamView& other, TraceSink* sink) const {
    return {config, num, packing, other, seams, sink, reference, replay, blocks, sums};
  }
  /// A parameter, with the sum its gradient goes to where there are sums.
  [[nodiscard]] Weight weight(const std::string& name) const {
    Weight w(params.get(name), ExactSum(), blocks);
    if (sums != nullptr && params.wants_grad(name))
      w.sum = sums->try_emplace(name, w.value.sizes(), "gradient of " + name).first->second;
    return w;
  }
};

/// "layers.3.self_attn": names of one layer's modules and parameters.
class LayerNames {
 public:
  LayerNames(const LayerContext& ctx, int64_t layer)
      : ctx_(ctx), prefix_(fmt::format("layers.{}.", layer)) {}
  [[nodiscard]] std::string operator()(std::string_view rest) const {
    return prefix_ + std::string(rest);
  }
  [[nodiscard]] Weight param(std::string_view rest) const { return ctx_.weight((*this)(rest)); }
  void record(std::string_view rest, const Tensor& value) const {
    ctx_.record((*this)(rest), value);
  }

 private:
  const LayerContext& ctx_;
  std::string prefix_;
};

}  // namespace lockstep::model
