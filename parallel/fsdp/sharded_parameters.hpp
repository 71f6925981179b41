// Fully sharded parameters: each rank of a group keeps some rows of every parameter, gathers a unit
// when the model enters it, and adds gradients back onto its rows when the unit's backward is done.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "model/seams/param_view.hpp"
#include "parallel/mesh/mesh.hpp"

namespace lockstep::parallel {

/// One parameter as a rank sees it before sharding: after tensor and expert parallelism took their
/// part.
struct ParamSpec {
  std::string name;
  int64_t unit = 0;
  bool expert = false;           ///< shared over the expert-shard group instead of fsdp x cp
  std::vector<int64_t> shape;    ///< dim 0 is sharded, near-even, any size
  at::ScalarType compute_dtype;  ///< of get(): cast before the gather
  bool trainable = true;
  bool tp_split = false;  ///< tp ranks hold different parts; else they hold the same
  std::string alias;  ///< a second name under which the head asks for it (tied embedding), or empty
  std::function<Tensor(int64_t begin, int64_t end)> load_rows;  ///< any floating dtype
};

struct ShardOptions {
  bool grads = false;
  bool masters = false;              ///< shards kept in `wide` instead of the compute dtype
  at::ScalarType wide = at::kFloat;  ///< dtype of masters and of reduced gradients
  bool prefetch = true;              ///< start gathering the next unit while one computes
  int64_t head_unit = 0;             ///< stays gathered between forward and backward
  at::Device device = at::kCPU;      ///< of shards, parameters and gradients; CUDA: one rank
  bool exact = false;                ///< gradients come as pairs of exact sums (wide is float32)
};

/// One rank's rows of a parameter.
struct Shard {
  ParamSpec spec;
  int64_t begin = 0, end = 0;  ///< rows of spec.shape held here
  Tensor value;                ///< [end - begin, ...] contiguous; the optimizer writes here
  Tensor grad;   ///< same shape, wide; sum over all tokens of all ranks so far; undefined: none
  Tensor pairs;  ///< exact: what grad is rounded from, [2, shape...] float64
};

/// A unit's parameters are gathered in one collective per (group, dtype): fp32 islands do not ride
/// with bf16 tensors. Gradients are cast to `wide`, summed over the shard group in ascending rank
/// order onto the owner of each row, then over dp, and added to Shard::grad; every rank sends every
/// trainable parameter of the unit, zeros where no token of its reached it. Outside of a unit its
/// gathered storage is freed, though the graph may still refer to it; it is filled again before
/// backward. With a group of one and equal dtypes get() is the shard itself. Exact gradients travel
/// as their pairs, 16 bytes an element, and are added up as pairs over ranks and calls: any order
/// gives the same bytes.
class ShardedParameters final : public model::ParamView {
 public:
  /// Loads this rank's rows. mesh must outlive it.
  ShardedParameters(std::vector<ParamSpec> specs, const Mesh& mesh, ShardOptions options);

  Tensor get(const std::string& name) override;
  [[nodiscard]] bool wants_grad(const std::string& name) const override;
  void enter(int64_t unit, model::Pass pass) override;
  void leave(int64_t unit, model::Pass pass) override;
  void add_grads(int64_t unit, std::vector<model::NamedGrad> grads) override;

  [[nodiscard]] std::vector<Shard>& shards() { return shards_; }
  [[nodiscard]] const std::vector<Shard>& shards() const { return shards_; }
  [[nodiscard]] const Group& group_of(const Shard& shard) const {
    return shard.spec.expert ? mesh_.expert_shard() : mesh_.shard();
  }
  void zero_grads();
  /// Gradients are exact sums: the same bytes however they are sharded.
  [[nodiscard]] bool exact() const { return options_.exact; }
  /// Rows of the whole group for a tensor shaped like the shard. Collective.
  [[nodiscard]] Tensor gather(const Shard& shard, const Tensor& rows) const;

 private:
  /// Parameters of one unit that travel together.
  struct Bucket {
    const Group* group;
    at::ScalarType dtype;
    std::vector<size_t> params;
    std::vector<int64_t> elements;  ///< of each rank
    std::optional<Pending> pending;
  };
  [[nodiscard]] size_t index(const std::string& name) const;
  [[nodiscard]] std::vector<int64_t> cuts(const Shard& shard) const;
  void start(Bucket& bucket);
  void finish(Bucket& bucket);
  void reduce(const Bucket& bucket, const std::map<size_t, model::NamedGrad>& grads);
  void add_to_shard(Shard& shard, const Tensor& part) const;
  std::vector<Bucket>* buckets(int64_t unit);

  const Mesh& mesh_;
  ShardOptions options_;
  std::vector<Shard> shards_;
  std::vector<Tensor> gathered_;  ///< whole parameters, storage empty outside of their unit
  std::map<std::string, size_t> by_name_;
  std::map<int64_t, std::vector<Bucket>> units_;
};

}  // namespace lockstep::parallel
