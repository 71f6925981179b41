// The engine's weights: merged projections as a serving engine keeps them, and derived copies, each
// with the parameters it is made of, so that all of them are made again by an update, and a copy
// that was forgotten is found.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "harness/engine/finite_source.hpp"
#include "harness/inference/byte_digest.hpp"
#include "harness/inference/vocabulary.hpp"
#include "model/config/numerics.hpp"
#include "parallel/mesh/mesh.hpp"
#include "parallel/plan/placement.hpp"

namespace lockstep::harness {

/// The part of a parameter that the engine's rank at `place` computes with: heads and inner
/// dimensions as in tp_slice, of the embedding and the head its entries of the vocabulary.
parallel::Placement engine_placement(const model::ModelConfig& config,
                                     const model::Numerics& num,
                                     const model::Topology& topology,
                                     const parallel::Coordinates& place,
                                     const model::Parameter& parameter);

/// A tensor that the forward pass reads.
struct EngineTensor {
  std::string name;                       ///< "layers.0.self_attn.in_proj_qkvbfg_a"
  std::vector<std::string> sources = {};  ///< parameters by internal name: this rank's part of
                                          ///< them, in the dtype the policy computes with
  std::string derivation;                 ///< in words: "rows of q_proj, k_proj, ..."
  bool derived = false;  ///< a second copy, which an update in place of the parameters would miss
  /// Empty: the rows of the sources, one source after another.
  std::function<Tensor(const std::vector<Tensor>&)> derive = {};
  int64_t block = 0;  ///< rows of the only source that make rows of the value by themselves; 0: all
  Tensor value = Tensor();  ///< keeps its storage for life
  int64_t version = 0;      ///< of the weights it was made from
};

class EngineWeights {
 public:
  /// Version 1. Loads everything this rank computes with. Throws kInput for damaged weights, kMesh
  /// for a split that has too few heads.
  EngineWeights(const std::shared_ptr<const model::WeightSource>& source,
                const model::Numerics& num,
                const parallel::Mesh& mesh);

  /// Throws kInternal for a name the engine does not hold.
  [[nodiscard]] const Tensor& at(std::string_view name) const;
  [[nodiscard]] bool holds(std::string_view name) const { return index_.contains(name); }
  [[nodiscard]] const std::vector<EngineTensor>& tensors() const { return tensors_; }
  [[nodiscard]] int64_t version() const { return version_; }
  [[nodiscard]] const Vocabulary& vocabulary() const { return vocabulary_; }

  /// Everything made again from other weights of the same model, in place; the version rises by
  /// one. Convolutions stay old where D64 = stale, the indexer's head weights where D65 = stale.
  /// Tensors named in `keep` stay as they are: the fault of a copy that is not refreshed.
  void update(const std::shared_ptr<const model::WeightSource>& source,
              const std::set<std::string>& keep = {});

  /// The same from weights that come in pieces: begin, every element of every parameter's part in
  /// ascending order, commit. In between, and for good if it is never committed, the weights are
  /// torn: check() throws. Pieces hold values of any floating dtype. A derived tensor keeps its
  /// sources until its block is complete, nothing else is held twice.
  void begin_update(int64_t version, const std::set<std::string>& keep = {});
  void put(const std::string& parameter, int64_t first, const Tensor& flat);
  /// Throws kInternal for a parameter that is not complete.
  void commit_update();
  /// Most bytes that derived tensors kept at a time in the last update.
  [[nodiscard]] int64_t peak_staged_bytes() const { return peak_staged_; }

  /// Names of tensors that differ in any bit from what the last update should have made of them.
  [[nodiscard]] std::vector<std::string> stale() const;
  /// Before the first use after an update: throws kInternal, on every rank, when the weights of one
  /// are torn or stale (but where D64 or D65 ask for it). Collective over the mesh, once an update.
  void check();

  /// What is wrong with the weights that were loaded; empty: nothing.
  [[nodiscard]] std::string non_finite() const { return non_finite_.text(); }

 private:
  /// What arrived of a parameter, and who is made of it: tensor, and which of its sources.
  struct Incoming {
    std::vector<int64_t> shape;  ///< of this rank's part
    at::ScalarType dtype;
    int64_t elements = 0, arrived = 0;
    std::vector<std::pair<size_t, size_t>> consumers;
  };
  /// What an update has made of a tensor so far.
  struct Progress {
    std::vector<ByteDigest> digests;  ///< of each source's rows, or of the derived value
    std::vector<Tensor> staged;       ///< flat parts of the sources of what is derived next
    std::vector<int64_t> filled;
    int64_t rows_in = 0, rows_out = 0;
    bool kept = false;
  };

  void add(EngineTensor tensor);
  void add_layer(int64_t layer);
  void load(const std::shared_ptr<const model::WeightSource>& source);
  void place(const std::string& parameter, int64_t first, const Tensor& flat);
  void stage(size_t tensor, size_t source, const Tensor& flat);
  void derive(size_t tensor);
  [[nodiscard]] bool shipped_stale(const std::string& name) const;
  [[nodiscard]] std::vector<int64_t> source_elements(const EngineTensor& tensor) const;
  /// What check() finds on this rank; empty: nothing.
  [[nodiscard]] std::string fault() const;

  const model::ModelConfig config_;
  const model::Numerics num_;
  const parallel::Mesh mesh_;
  const Vocabulary vocabulary_;
  NonFiniteWeights non_finite_;
  std::map<std::string, Incoming> incoming_;
  std::vector<EngineTensor> tensors_;
  std::vector<Progress> progress_;
  std::map<std::string, size_t, std::less<>> index_;
  int64_t version_ = 1, next_version_ = 1;
  int64_t staged_ = 0, peak_staged_ = 0;
  bool torn_ = false, unchecked_ = false;
};

}  // namespace lockstep::harness
