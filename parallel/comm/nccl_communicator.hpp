// NCCL communicators with the life they need: made without blocking, watched for errors while they
// work, aborted when one comes, kept for later groups of the same ranks. Included by this room's
// NCCL sources only.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "parallel/comm/nccl_api.hpp"
#include "parallel/comm/nccl_device.hpp"

namespace lockstep::parallel {

class Communicator {
 public:
  /// Collective over its ranks. Throws TransportError, or what `until` throws.
  Communicator(const ncclUniqueId& id, int size, int rank, const Until& until);
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  ~Communicator();

  /// Issues the calls of `body` as one group on stream() and returns once NCCL has taken them.
  void issue(const std::function<void(ncclComm_t, cudaStream_t)>& body, const Until& until);
  /// Throws TransportError when it has met an error, whose reason stays: later calls throw it too.
  void check();
  /// Ends what is in flight; kernels stop waiting for peers. The reason is told by later calls.
  void abort(const std::string& why) noexcept;
  /// Orderly end, on all ranks.
  void close() noexcept;

  [[nodiscard]] const Stream& stream() const { return stream_; }
  /// The same on all ranks, different for every communicator.
  [[nodiscard]] uint64_t mark() const { return mark_; }
  [[nodiscard]] bool usable() const { return comm_ != nullptr; }

 private:
  [[nodiscard]] bool settled();
  Stream stream_;
  ncclComm_t comm_ = nullptr;
  uint64_t mark_ = 0;
  std::string why_;
};

/// One that the ranks of this group share; collective over them. One that an earlier group of this
/// name and these ranks left behind is taken if all ranks still have it: making one costs far more
/// than a collective. `host` has `size` ranks of which this is `rank`, and carries the identifier.
struct HostLink {
  std::function<void(const void* mine, void* all, int64_t bytes)> gather;
  std::function<void(void* data, int64_t bytes)> broadcast;  ///< from rank 0
};
std::shared_ptr<Communicator> obtain_communicator(const std::string& name,
                                                  const std::vector<int>& world_ranks,
                                                  int rank,
                                                  const HostLink& host,
                                                  const Until& until);

}  // namespace lockstep::parallel
