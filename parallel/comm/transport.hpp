// How bytes get from rank to rank of one group. Callers of Group never see this; included by this
// room's sources only.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "model/base/error.hpp"

namespace lockstep::parallel {

/// A transport failed. Says nothing of the call it served: whoever waits for that adds it.
class TransportError : public Error {
 public:
  explicit TransportError(const std::string& message) : Error(ErrorKind::kComm, message) {}
};

/// Rows of each rank, one rank after the other.
struct Rows {
  std::vector<int64_t> count, start;
  int64_t total = 0;

  explicit Rows(std::vector<int64_t> counts) : count(std::move(counts)) {
    for (const int64_t c : count) {
      start.push_back(total);
      total += c;
    }
  }
};

/// An operation on its way. Its buffers belong to it until done() said true.
class Work {
 public:
  virtual ~Work() = default;
  /// True once it has ended. Never blocks. Throws kComm when the transport failed.
  virtual bool done() = 0;
  /// Nobody waits for it any longer: it should not write into its buffers, as far as that can be
  /// had.
  virtual void abandon() noexcept {}
};
using WorkPtr = std::unique_ptr<Work>;

/// Blocks until the condition holds, at most until the deadline of the call; then throws.
using Until = std::function<void(const std::function<bool()>& condition)>;

/// Raw bytes on host memory or on device memory, whichever the transport is for. `row_bytes` is the
/// size of a row. Messages between two ranks are received in the order in which they were sent.
/// Throws TransportError, or kConfig for what this machine lacks.
class Transport {
 public:
  virtual ~Transport() = default;
  /// `receive` gets rows.total rows; this rank gives rows.count[rank].
  virtual WorkPtr all_gather(
      const void* send, void* receive, const Rows& rows, int64_t row_bytes, const Until& until) = 0;
  virtual WorkPtr all_to_all(const void* send,
                             const Rows& out,
                             void* receive,
                             const Rows& in,
                             int64_t row_bytes,
                             const Until& until) = 0;
  virtual WorkPtr broadcast(void* data, int64_t bytes, int root, const Until& until) = 0;
  virtual WorkPtr send(const void* data, int64_t bytes, int to, int tag, const Until& until) = 0;
  virtual WorkPtr receive(void* data, int64_t bytes, int from, int tag, const Until& until) = 0;
  virtual WorkPtr barrier(const Until& until) = 0;
};

// --- NCCL; a stub says what is missing where it was not built in ---------------------------------

/// Why this process cannot use NCCL, with the remedy; empty when it can.
std::string nccl_missing();

/// A group as NCCL has to know it.
struct NcclPlace {
  std::string name;
  std::vector<int> world_ranks;  ///< of the members, by rank
  int rank = 0;
  Transport* host = nullptr;  ///< carries the identifiers of communicators; outlives the transport
};

/// `host_memory`: pointers are to host memory and are staged through the device, else they are
/// device pointers. Communicators are made when first needed (one for the group, one for each pair
/// that exchanges messages) and kept for later groups of the same name and ranks.
std::unique_ptr<Transport> nccl_transport(NcclPlace place, bool host_memory);

/// Gives up whatever is in flight. For a process that ends after a failure.
void nccl_abort_all() noexcept;
/// Frees buffers, streams and communicators. Every rank, before MPI ends.
void nccl_close_all() noexcept;

}  // namespace lockstep::parallel
