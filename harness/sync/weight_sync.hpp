// Weights of the trainer's shards brought into the inference engine in memory, over all ranks of a
// job: agreed on first, then moved bucket by bucket, so that no rank holds a second copy of the
// model.
#pragma once

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "harness/inference/weights.hpp"
#include "harness/sync/transfer_plan.hpp"
#include "parallel/comm/group.hpp"
#include "parallel/fsdp/sharded_parameters.hpp"

namespace lockstep::harness {

struct SyncOptions {
  int64_t bucket_bytes = int64_t{256} << 20;  ///< most that a rank sends or receives at a time
  std::function<void(int64_t bucket, int64_t buckets)> progress;  ///< before each; may be empty
};

/// What a trainer rank has of a parameter.
struct OfferedTensor {
  std::string name;
  at::ScalarType wire;  ///< it travels in
  Tensor rows;          ///< of its shard, any floating dtype
};

struct SyncReport {
  int64_t version = 0;
  int64_t bytes_sent = 0, bytes_received = 0;  ///< of weights, to and from other ranks
  int64_t bytes_copied = 0;                    ///< to this rank itself
  int64_t agreement_bytes = 0;                 ///< received to agree on what is sent
  int64_t buckets = 0;
  int64_t peak_buffer_bytes = 0;  ///< of send and receive buffers and what is taken out of them
  int64_t peak_staged_bytes = 0;  ///< sources of derived tensors that wait for the rest of them
  double seconds = 0;
};

class WeightSync {
 public:
  /// `sides` are ranks of `group` and the same on all of them. Collective over the group.
  WeightSync(const parallel::Group& group, SyncSides sides, SyncOptions options = {});

  [[nodiscard]] const TransferPlan& plan() const { return plan_; }

  /// What a trainer rank has, for run(). Tensors are shared, not copied.
  [[nodiscard]] std::vector<OfferedTensor> offer(const parallel::ShardedParameters& params) const;

  /// Brings the weights of `version` into every engine rank's `weights` (null on ranks without one;
  /// `offered` empty on ranks that do not train). Collective over the group.
  ///
  /// Throws kInput on every rank, with the list of all that is wrong on any of them, before
  /// anything is changed: parameters that are missing, unknown, offered twice, of another shape or
  /// dtype than planned; trainer ranks of another version; a version that is not above the one
  /// served; another plan. Throws kComm when a rank is lost on the way; the weights are then torn,
  /// and the engine refuses to run. No rank serves the new version before all have all of it.
  /// `keep` as in EngineWeights::update.
  SyncReport run(int64_t version,
                 const std::vector<OfferedTensor>& offered,
                 EngineWeights* weights,
                 const std::set<std::string>& keep = {});

 private:
  using Index = std::vector<const OfferedTensor*>;
  [[nodiscard]] int64_t agree(int64_t version,
                              const std::vector<OfferedTensor>& offered,
                              const EngineWeights* weights) const;
  [[nodiscard]] Tensor packed(const std::vector<Piece>& bucket,
                              const Index& offered,
                              std::vector<int64_t>& counts,
                              SyncReport& report) const;
  void unpack(const std::vector<Piece>& bucket,
              const Tensor& bytes,
              const std::vector<int64_t>& counts,
              EngineWeights& weights,
              SyncReport& report) const;

  parallel::Group group_;
  SyncOptions options_;
  TransferPlan plan_;
};

}  // namespace lockstep::harness
