// The trainer engine: forward, loss and gradients of the whole model under a policy and a topology.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "harness/engine/documents.hpp"
#include "harness/trainer/dtype_audit.hpp"
#include "model/checkpoint/weight_source.hpp"
#include "model/config/numerics.hpp"
#include "model/config/topology.hpp"
#include "parallel/checkpoint/distributed_checkpoint.hpp"
#include "parallel/mesh/mesh.hpp"
#include "parallel/optim/optimizer.hpp"

namespace lockstep::harness {

struct TrainerOptions {
  model::Numerics numerics = model::Numerics::policy("float32");
  bool logits = true;      ///< return all logits (memory tokens x vocab)
  bool grads = false;      ///< return the gradient of every trainable parameter
  bool recompute = false;  ///< keep only layer inputs in forward, recompute each layer in backward
  bool stream_layers = false;    ///< read each layer's weights from disk when it runs and drop them
                                 ///< after; no gradients
  at::Device device = at::kCPU;  ///< where weights and activations live (device_of()); CUDA takes
                                 ///< one rank, a policy that is not invariant, and no steps
  bool reference_ops = false;    ///< plain reference operators instead of the fast forms
  /// Rows where the sequence is cut over cp ranks, {0, ..., T}; empty: near-even.
  std::vector<int64_t> cp_cuts;
  /// Expert choice to take instead of the router's own (D68): per layer the experts [T, top_k]
  /// int64 of all documents, micro-batch after micro-batch, as trace "layers.N.mlp.gate.experts"
  /// gives them; undefined for dense layers. Empty: own choice; given exactly when D68 is replay.
  std::vector<Tensor> replay;
  std::string trace;  ///< glob over module names whose outputs (and, with grads, gradients) are
                      ///< returned; empty: none
  /// For train_step(): masters in float32 (float64 in the float64 policy), gradients on.
  std::optional<parallel::OptimizerOptions> optimizer;
  double router_bias_speed = 0;  ///< balance of experts after each step, see update_router_bias
  std::function<void(int64_t done, int64_t total, const char* what)>
      progress;  ///< called per layer; may be empty
};

/// Everything is that of the whole row and the same on every rank; local_* are this rank's rows.
/// All tensors are on the CPU.
/// Names of gradients are checkpoint tensor names.
struct TrainerResult {
  Tensor logits;    ///< [T, V] float64 in the float64 policy, else float32; undefined unless
                    ///< asked for
  Tensor logprobs;  ///< [T] of each next token, NaN at a document's last
  double loss = 0;  ///< mean next-token cross entropy over all documents; 0 without targets
  int64_t num_targets = 0;
  std::map<std::string, Tensor> grads;  ///< of `loss`, in the dtype the parameter is used in
  std::vector<std::pair<std::string, Tensor>>
      trace;  ///< module name -> [T, ...] output; "grad:" prefix for gradients
  Tensor local_logits, local_logprobs;   ///< this rank's rows
  int64_t local_begin = 0;               ///< first global row held here
  double forward_s = 0, backward_s = 0;  ///< wall time on this rank
  int64_t peak_rss_bytes = 0;            ///< of the process, high-water mark
  std::string non_finite;  ///< what is wrong with the weights this rank loaded; empty: nothing
};

struct TrainStep {
  double loss = 0;  ///< mean over all targets of all micro-batches
  int64_t num_targets = 0;
  parallel::OptimizerStep optimizer;
  double forward_s = 0, backward_s = 0, optimizer_s = 0;
};

class Trainer {
 public:
  /// Loads (or, streaming, opens) the weights. mesh must outlive the trainer; a mesh of one rank
  /// needs no MPI. Throws kConfig for a model this policy or topology cannot run, kInput for
  /// damaged weights.
  Trainer(std::shared_ptr<const model::WeightSource> source,
          TrainerOptions options,
          const parallel::Mesh& mesh);
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;
  ~Trainer();

  /// All ranks call it with the same documents. Throws kInput for ids outside the vocabulary, kComm
  /// when a peer fails.
  TrainerResult run(const Documents& documents);
  /// Several micro-batches one after the other, at least one: the loss is the mean over the targets
  /// of all of them, gradients are added up. Rows of the result follow each other, micro-batch by
  /// micro-batch; local_begin is that of the first.
  TrainerResult run(const std::vector<Documents>& micro_batches);

  /// Forward and backward of each micro-batch, gradients added up, then one step of the optimizer.
  /// The loss is divided by the targets of all of them, so cutting a batch differently changes
  /// nothing but roundings. Throws kConfig without TrainerOptions::optimizer, else like run().
  TrainStep train_step(const std::vector<Documents>& micro_batches);

  /// Every parameter as it is now, whole, under checkpoint tensor names, in the dtype of its
  /// shards. Collective.
  [[nodiscard]] std::map<std::string, Tensor> weights() const;
  /// This rank's rows of every parameter. Throws kConfig when weights are streamed from disk.
  [[nodiscard]] const parallel::ShardedParameters& shards() const;

  /// The float32 parameters of a bfloat16 policy, with their dtype at each point they reached so
  /// far. The trainer throws where one is not float32 (kInput for a file, else kInternal).
  [[nodiscard]] const std::vector<AuditRow>& audit() const;

  /// Masters, moments, step count and the caller's values in a new folder (see save_checkpoint), at
  /// any topology readable. Collective.
  void save(const std::string& folder, std::map<std::string, std::string> values = {}) const;
  /// Goes on from there: weights, and moments if this trainer has an optimizer. Collective.
  parallel::TrainingState load(const std::string& folder);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep::harness
