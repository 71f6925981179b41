// What a group holds, and a call of it on its way. Included by this room's sources only.
#pragma once

#include <mpi.h>

#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/comm/group.hpp"
#include "parallel/comm/ledger.hpp"
#include "parallel/comm/transport.hpp"

namespace lockstep::parallel {

struct GroupImpl {
  /// A group of one, without MPI.
  GroupImpl();
  /// Ranks of an MPI communicator, freed with the group when `owned`. `key` is the same on all of
  /// them and different from that of every other group they are in.
  GroupImpl(MPI_Comm comm, bool owned, uint64_t key, std::string name);
  GroupImpl(const GroupImpl&) = delete;
  GroupImpl& operator=(const GroupImpl&) = delete;
  ~GroupImpl();

  /// For tensors on the host over NCCL, or for tensors on the device.
  Transport& nccl(bool host_memory) const;

  MPI_Comm comm = MPI_COMM_NULL;  // MPI_COMM_NULL: a group of one without MPI
  bool owned = false;
  int rank = 0, size = 1;
  uint64_t key = 0;
  std::string name;
  std::vector<int> world_ranks;  ///< of the members, by rank
  std::unique_ptr<Transport> host;
  mutable std::unique_ptr<Transport> nccl_host, nccl_device;
  mutable Ledger ledger;
  mutable int64_t splits = 0;
};

/// One call of a group, for messages and deadlines.
struct Call {
  const GroupImpl& g;
  CommOp op;
  std::string_view what;
  int peer = -1;         ///< rank waited for, -1 in a collective
  int64_t sequence = 0;  ///< of the collective, 0 if it is not recorded
  uint64_t hash = 0;

  /// "group cp rank 0 of 2: layer 3 kda state", the beginning of every message.
  [[nodiscard]] std::string where() const;
  /// For transports that have to wait within a call.
  [[nodiscard]] Until until() const;
};

/// Adds the time it lives to the ledger of the call's group.
class CallTime {
 public:
  explicit CallTime(const Call& call) : call_(call), start_(std::chrono::steady_clock::now()) {}
  CallTime(const CallTime&) = delete;
  CallTime& operator=(const CallTime&) = delete;
  ~CallTime();

 private:
  const Call& call_;
  std::chrono::steady_clock::time_point start_;
};

/// Makes the call known to the other ranks of this machine, and throws kComm when one of them made
/// another call in its place.
void announce(const Call& call);

/// Throws the transport's error with the call in front, or the difference between calls behind it.
[[noreturn]] void tell_failure(const TransportError& error, const Call& call);

/// Polls until the work has ended. Throws kComm when the transport fails, when another rank makes
/// another call in this one's place, or when the deadline passes: then with the ranks that keep it
/// from ending and what they do.
void wait(Work& work, const Call& call);

}  // namespace lockstep::parallel
