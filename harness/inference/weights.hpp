// The engine's weights: merged projections as a serving engine keeps them, and derived copies, each
// with the parameters it is made of, so that all of them can be made again and compared bit for
// bit.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "harness/engine/finite_source.hpp"
#include "model/config/numerics.hpp"
#include "parallel/mesh/mesh.hpp"

namespace lockstep::harness {

/// A tensor that the forward pass reads.
struct EngineTensor {
  std::string name;                       ///< "layers.0.self_attn.in_proj_qkvbfg_a"
  std::vector<std::string> sources = {};  ///< parameters by internal name: this rank's part of
                                          ///< them, in the dtype the policy computes with
  std::string derivation;                 ///< in words: "rows of q_proj, k_proj, ..."
  bool derived = false;  ///< a second copy, which an update in place of the parameters would miss
  std::function<Tensor(const std::vector<Tensor>&)> derive;
  Tensor value = Tensor();  ///< keeps its storage for life
  int64_t version = 0;      ///< of the weights it was made from
};

class EngineWeights {
 public:
  /// Version 1. Loads everything this rank computes with. Throws kInput for damaged weights, kMesh
  /// for a split that has too few heads.
  EngineWeights(std::shared_ptr<const model::WeightSource> source,
                const model::Numerics& num,
                const parallel::Mesh& mesh);

  /// Throws kInternal for a name the engine does not hold.
  [[nodiscard]] const Tensor& at(std::string_view name) const;
  [[nodiscard]] bool holds(std::string_view name) const { return index_.contains(name); }
  [[nodiscard]] const std::vector<EngineTensor>& tensors() const { return tensors_; }
  [[nodiscard]] int64_t version() const { return version_; }

  /// Everything made again from other weights of the same model, in place; the version rises by
  /// one. Convolutions stay old where D64 = stale, the indexer's head weights where D65 = stale.
  /// Tensors named in `keep` stay as they are: the fault of a copy that is not refreshed.
  void update(std::shared_ptr<const model::WeightSource> source,
              const std::set<std::string>& keep = {});

  /// Names of tensors that differ in any bit from what the current parameters give.
  [[nodiscard]] std::vector<std::string> stale() const;

  /// What is wrong with the weights that were loaded; empty: nothing.
  [[nodiscard]] std::string non_finite() const { return non_finite_.text(); }

 private:
  void add(EngineTensor tensor);
  void add_layer(int64_t layer);
  [[nodiscard]] Tensor made(const EngineTensor& tensor) const;

  const model::Numerics num_;
  const parallel::Mesh mesh_;
  NonFiniteWeights non_finite_;
  std::shared_ptr<const model::WeightSource> source_;
  std::map<std::string, model::Parameter> parameters_;
  std::vector<EngineTensor> tensors_;
  std::map<std::string, size_t, std::less<>> index_;
  int64_t version_ = 1;
};

}  // namespace lockstep::harness
