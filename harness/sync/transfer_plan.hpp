// Which bytes of the trainer's shards go where in the inference engine: arithmetic only, the same
// on every rank.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "model/checkpoint/parameters.hpp"
#include "model/config/numerics.hpp"
#include "model/config/topology.hpp"
#include "parallel/plan/placement.hpp"

namespace lockstep::harness {

/// The two engines of a sync and the ranks they run on. A rank may be in both.
struct SyncSides {
  model::ModelConfig config;
  model::Numerics trainer, engine;
  model::Topology trainer_topology, engine_topology;  ///< the engine's: tp only
  std::vector<int64_t> trainer_ranks, engine_ranks;   ///< of the group, by rank of the mesh
};

/// Ranks first, first + 1, ... of a group.
std::vector<int64_t> consecutive_ranks(int64_t first, int64_t count);

/// In which dtype a parameter travels to an engine of these numerics. Policies that are not bf16:
/// the engine's. bf16: float32 for hyper-connections, A_log, dt_bias and the correction bias (D66)
/// and for convolutions (D15), else bfloat16, the router's weight too, as trainers send it. In the
/// invariant policies nothing may be lost: what the engine computes with.
at::ScalarType wire_dtype(const model::Parameter& parameter, const model::Numerics& engine);

/// Elements that one rank has of a parameter for another.
struct Transfer {
  size_t parameter = 0;                ///< index in TransferPlan::parameters()
  int64_t from = 0, to = 0;            ///< ranks of the group
  int64_t row_begin = 0, row_end = 0;  ///< of the shard of `from`, in rows of its part
  int64_t elements = 0, bytes = 0;     ///< on the wire; `from` = `to` is a copy
};

/// Consecutive elements of a whole parameter, and where they are in a shard and in a part.
struct Copy {
  int64_t whole, shard, part, count;
};

/// Elements [begin, end) of a whole parameter, moved together.
struct Piece {
  size_t parameter;
  int64_t begin, end;
};

class TransferPlan {
 public:
  /// Throws kConfig for a bucket below 64 bytes, kMesh for sides that do not fit their ranks.
  TransferPlan(SyncSides sides, int64_t bucket_bytes);

  [[nodiscard]] const SyncSides& sides() const { return sides_; }
  /// All but a tied head, in the order in which they move.
  [[nodiscard]] const std::vector<model::Parameter>& parameters() const { return parameters_; }
  [[nodiscard]] at::ScalarType wire(size_t parameter) const { return wire_[parameter]; }
  /// Of one element.
  [[nodiscard]] int64_t wire_bytes(size_t parameter) const {
    return static_cast<int64_t>(c10::elementSize(wire_[parameter]));
  }
  /// By parameter, then receiver, then sender. A receiver that is a trainer rank takes what it can
  /// from its own replica; others take parameter p from replica p mod dp.
  [[nodiscard]] const std::vector<Transfer>& transfers() const { return transfers_; }
  /// Pieces that move in one exchange: in all of them together no rank sends or receives more than
  /// bucket_bytes.
  [[nodiscard]] const std::vector<std::vector<Piece>>& buckets() const { return buckets_; }

  /// What rank `from` sends rank `to` of a piece, ascending in all three.
  [[nodiscard]] std::vector<Copy> copies(const Piece& piece, int64_t from, int64_t to) const;
  /// Shape of the rows that a trainer rank of the group holds.
  [[nodiscard]] std::vector<int64_t> shard_shape(size_t parameter, int64_t rank) const;
  [[nodiscard]] bool trains(int64_t rank) const { return trainer_rank(rank) >= 0; }
  [[nodiscard]] bool serves(int64_t rank) const { return engine_rank(rank) >= 0; }

  /// Bytes that arrive at a rank, own ones included: of every parameter its part in wire dtype.
  [[nodiscard]] int64_t part_bytes(int64_t rank) const;
  /// Of the transfers between different ranks.
  [[nodiscard]] int64_t bytes_sent(int64_t rank) const;
  [[nodiscard]] int64_t bytes_received(int64_t rank) const;
  /// Differs between plans that differ.
  [[nodiscard]] uint64_t fingerprint() const;

 private:
  struct Source {
    parallel::Placement placed;
    int64_t begin, end;
  };
  /// What the transfers of a parameter depend on: its name within the layer, whether that is of
  /// KDA, and the replica.
  [[nodiscard]] std::tuple<std::string, bool, int64_t> kind_of(size_t parameter) const;
  [[nodiscard]] int64_t trainer_rank(int64_t rank) const;
  [[nodiscard]] int64_t engine_rank(int64_t rank) const;
  [[nodiscard]] Source source(size_t parameter, int64_t trainer_rank) const;
  [[nodiscard]] parallel::Placement target(size_t parameter, int64_t engine_rank) const;
  [[nodiscard]] bool holds(size_t parameter, int64_t from, int64_t to) const;
  void plan_buckets(int64_t bucket_bytes);

  SyncSides sides_;
  std::vector<model::Parameter> parameters_;
  std::vector<at::ScalarType> wire_;
  std::vector<Transfer> transfers_;
  std::vector<std::vector<Piece>> buckets_;
};

}  // namespace lockstep::harness
