// What this rank communicated: every call of every group, in order, with its bytes. Ranks of one
// group must make the same collective calls in the same order; comparing ledgers finds the first
// one that differs.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::parallel {

class Group;

enum class CommOp : uint8_t {
  kAllGather,
  kAllToAll,
  kReduceScatter,
  kAllReduce,
  kBroadcast,
  kBarrier,
  kSplit,
  kSend,
  kReceive,
};
/// "all-gather", "receive".
std::string_view op_name(CommOp op);
/// Send and receive concern two ranks; all other calls the whole group.
constexpr bool is_collective(CommOp op) { return op != CommOp::kSend && op != CommOp::kReceive; }

struct LedgerEntry {
  int64_t sequence = 0;  ///< number of the collective in its group, from 1; 0 for send and receive
  CommOp op = CommOp::kBarrier;
  int64_t peer = -1;                           ///< of send and receive
  int64_t bytes_sent = 0, bytes_received = 0;  ///< to and from other ranks
  std::string what;
  uint64_t hash = 0;   ///< of op, what and size: equal on all ranks of a collective
  uint64_t chain = 0;  ///< hash of this and all earlier collectives of the group
};

/// "call 17, all-gather of layer 3 keys".
std::string describe(const LedgerEntry& entry);

/// Calls of one group on one rank: sums over all of them, and the last kKept in full.
class Ledger {
 public:
  static constexpr size_t kKept = 64;

  explicit Ledger(std::string group, int64_t size);
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;
  ~Ledger();

  /// `size_hash` covers what must agree between ranks besides op and what, such as the number of
  /// all rows. Returns the entry, valid until the next call.
  const LedgerEntry& record(CommOp op,
                            std::string_view what,
                            int64_t bytes_sent,
                            int64_t bytes_received,
                            uint64_t size_hash,
                            int64_t peer = -1);

  /// Time this rank spent inside a recorded call: moving bytes and waiting for the others.
  void add_seconds(double seconds);

  [[nodiscard]] const std::deque<LedgerEntry>& last() const { return last_; }
  [[nodiscard]] int64_t collectives() const { return collectives_; }
  [[nodiscard]] uint64_t chain() const { return chain_; }
  [[nodiscard]] int64_t sent_to(int64_t peer) const { return sent_[static_cast<size_t>(peer)]; }
  [[nodiscard]] int64_t received_from(int64_t peer) const {
    return received_[static_cast<size_t>(peer)];
  }

 private:
  std::string group_;
  std::deque<LedgerEntry> last_;
  std::vector<int64_t> sent_, received_;  ///< messages by peer
  int64_t collectives_ = 0;
  uint64_t chain_ = 0;
};

/// Sums of this process over all groups of a name, ended ones too.
struct LedgerTotals {
  std::string group;
  int64_t size = 0;  ///< ranks of the largest such group
  int64_t calls = 0, bytes_sent = 0, bytes_received = 0;
  double seconds = 0;  ///< inside calls, waiting for slower ranks included
};
/// By name. Groups of one rank never appear.
std::vector<LedgerTotals> ledger_totals();
/// The same as a table: one line for each axis.
std::string ledger_table();

/// Where the ledgers of a group part.
struct LedgerDifference {
  int64_t sequence = 0;  ///< of the first collective that is not the same on all ranks; 0 when it
                         ///< is older than what is kept, or when messages do not pair
  int64_t rank = 0;      ///< first rank of the group that differs from rank 0
  std::vector<std::string> calls;  ///< of each rank
  std::string text;                ///< one sentence with all of it
};
/// Collective over the group. Nothing when all ranks made the same collectives in the same order
/// and every message sent was received. Not itself recorded. Cost: 16 bytes a rank when equal.
std::optional<LedgerDifference> compare_ledgers(const Group& group);

/// 64-bit FNV-1a, continued from `hash`.
uint64_t hash_bytes(uint64_t hash, const void* data, size_t size) noexcept;
inline constexpr uint64_t kHashStart = 0xcbf29ce484222325ULL;
template <typename T>
uint64_t hash_value(uint64_t hash, const T& value) noexcept {
  static_assert(std::is_trivially_copyable_v<T>);
  return hash_bytes(hash, &value, sizeof value);
}

}  // namespace lockstep::parallel
