// NCCL on device memory, or on host memory staged through the device. Only movement: sums are
// formed by the caller in rank order, which no reduction of NCCL promises.
#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "parallel/comm/nccl_communicator.hpp"

namespace lockstep::parallel {
namespace {

constexpr int kIdTag = 32001;  // of messages that make a communicator of a pair

/// What to copy where once the device is done with host memory's copies.
struct Staging {
  Buffer device_in, device_out, host_in, host_out;
  void* destination = nullptr;
  int64_t bytes = 0;
};

class NcclWork final : public Work {
 public:
  NcclWork() = default;
  explicit NcclWork(std::shared_ptr<Communicator> comm, Staging staging)
      : comm_(std::move(comm)), staging_(std::move(staging)), event_(std::make_unique<Event>()) {
    event_->record(comm_->stream());
  }
  NcclWork(const NcclWork&) = delete;
  NcclWork& operator=(const NcclWork&) = delete;
  ~NcclWork() override { abandon(); }

  bool done() override {
    if (!event_) return true;
    if (!event_->reached()) {
      comm_->check();
      return false;
    }
    if (staging_.bytes > 0)
      std::memcpy(
          staging_.destination, staging_.host_out.get(), static_cast<size_t>(staging_.bytes));
    event_.reset();
    return true;
  }

  void abandon() noexcept override {
    if (!event_) return;
    comm_->abort("a call on it was given up");
    event_.reset();
  }

 private:
  std::shared_ptr<Communicator> comm_;
  Staging staging_;
  std::unique_ptr<Event> event_;
};

class NcclTransport final : public Transport {
 public:
  NcclTransport(NcclPlace place, bool host_memory)
      : place_(std::move(place)), host_memory_(host_memory) {}

  WorkPtr all_gather(const void* send,
                     void* receive,
                     const Rows& rows,
                     int64_t row_bytes,
                     const Until& until) override {
    const bool even = std::all_of(
        rows.count.begin(), rows.count.end(), [&](int64_t c) { return c == rows.count[0]; });
    const auto own = static_cast<size_t>(place_.rank);
    const int64_t mine = rows.count[own] * row_bytes;
    return run(
        group(until),
        {send, mine, receive, rows.total * row_bytes},
        [&](ncclComm_t comm, cudaStream_t stream, const char* in, char* out) {
          if (even) {
            check_nccl(
                nccl_api()->all_gather(in, out, static_cast<size_t>(mine), ncclUint8, comm, stream),
                "all-gather");
            return;
          }
          for (size_t r = 0; r < rows.count.size(); ++r) {
            const int64_t bytes = rows.count[r] * row_bytes;
            give(comm, stream, in, mine, r);
            take(comm, stream, out + rows.start[r] * row_bytes, bytes, r);
          }
          copy(stream, out + rows.start[own] * row_bytes, in, mine);
        },
        until);
  }

  WorkPtr all_to_all(const void* send,
                     const Rows& out_rows,
                     void* receive,
                     const Rows& in_rows,
                     int64_t row_bytes,
                     const Until& until) override {
    const auto own = static_cast<size_t>(place_.rank);
    return run(
        group(until),
        {send, out_rows.total * row_bytes, receive, in_rows.total * row_bytes},
        [&](ncclComm_t comm, cudaStream_t stream, const char* in, char* out) {
          for (size_t r = 0; r < out_rows.count.size(); ++r) {
            give(
                comm, stream, in + out_rows.start[r] * row_bytes, out_rows.count[r] * row_bytes, r);
            take(comm, stream, out + in_rows.start[r] * row_bytes, in_rows.count[r] * row_bytes, r);
          }
          copy(stream,
               out + in_rows.start[own] * row_bytes,
               in + out_rows.start[own] * row_bytes,
               out_rows.count[own] * row_bytes);
        },
        until);
  }

  WorkPtr broadcast(void* data, int64_t bytes, int root, const Until& until) override {
    return run(
        group(until),
        {data, bytes, data, bytes},
        [&](ncclComm_t comm, cudaStream_t stream, const char* in, char* out) {
          check_nccl(nccl_api()->broadcast(
                         in, out, static_cast<size_t>(bytes), ncclUint8, root, comm, stream),
                     "broadcast");
        },
        until);
  }

  WorkPtr send(const void* data, int64_t bytes, int to, int, const Until& until) override {
    return run(
        pair(to, until),
        {data, bytes, nullptr, 0},
        [&](ncclComm_t comm, cudaStream_t stream, const char* in, char*) {
          check_nccl(nccl_api()->send(in,
                                      static_cast<size_t>(bytes),
                                      ncclUint8,
                                      place_.rank < to ? 1 : 0,
                                      comm,
                                      stream),
                     "send");
        },
        until);
  }

  WorkPtr receive(void* data, int64_t bytes, int from, int, const Until& until) override {
    return run(
        pair(from, until),
        {nullptr, 0, data, bytes},
        [&](ncclComm_t comm, cudaStream_t stream, const char*, char* out) {
          check_nccl(nccl_api()->receive(out,
                                         static_cast<size_t>(bytes),
                                         ncclUint8,
                                         place_.rank < from ? 1 : 0,
                                         comm,
                                         stream),
                     "receive");
        },
        until);
  }

  WorkPtr barrier(const Until& until) override {
    // Whoever has everybody's byte knows that everybody came.
    use_device();
    Staging staging;
    staging.device_in = Buffer(Where::kDevice, 1);
    staging.device_out = Buffer(Where::kDevice, static_cast<int64_t>(place_.world_ranks.size()));
    const std::shared_ptr<Communicator>& comm = group(until);
    comm->issue(
        [&](ncclComm_t handle, cudaStream_t stream) {
          check_nccl(
              nccl_api()->all_gather(
                  staging.device_in.get(), staging.device_out.get(), 1, ncclUint8, handle, stream),
              "all-gather");
        },
        until);
    return std::make_unique<NcclWork>(comm, std::move(staging));
  }

 private:
  struct Ends {
    const void* send;
    int64_t send_bytes;
    void* receive;
    int64_t receive_bytes;
  };

  /// Issues `body` on device copies of the buffers, or on the buffers themselves.
  template <typename Body>
  WorkPtr run(const std::shared_ptr<Communicator>& comm,
              const Ends& ends,
              const Body& body,
              const Until& until) {
    if (ends.send_bytes == 0 && ends.receive_bytes == 0) return std::make_unique<NcclWork>();
    use_device();
    comm->check();
    Staging staging;
    const auto* in = static_cast<const char*>(ends.send);
    auto* out = static_cast<char*>(ends.receive);
    cudaStream_t stream = comm->stream().get();
    if (host_memory_) {
      staging.device_in = Buffer(Where::kDevice, ends.send_bytes);
      staging.device_out = Buffer(Where::kDevice, ends.receive_bytes);
      staging.host_in = Buffer(Where::kPinnedHost, ends.send_bytes);
      staging.host_out = Buffer(Where::kPinnedHost, ends.receive_bytes);
      staging.destination = ends.receive;
      staging.bytes = ends.receive_bytes;
      if (ends.send_bytes > 0)
        std::memcpy(staging.host_in.get(), ends.send, static_cast<size_t>(ends.send_bytes));
      copy(stream, staging.device_in.get(), staging.host_in.get(), ends.send_bytes);
      in = staging.device_in.get();
      out = staging.device_out.get();
    }
    comm->issue([&](ncclComm_t handle, cudaStream_t s) { body(handle, s, in, out); }, until);
    if (host_memory_)
      copy(stream, staging.host_out.get(), staging.device_out.get(), ends.receive_bytes);
    return std::make_unique<NcclWork>(comm, std::move(staging));
  }

  static void copy(cudaStream_t stream, void* to, const void* from, int64_t bytes) {
    if (bytes == 0) return;
    check_cuda(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, stream),
               "copy");
  }
  void give(
      ncclComm_t comm, cudaStream_t stream, const char* data, int64_t bytes, size_t to) const {
    if (bytes == 0 || to == static_cast<size_t>(place_.rank)) return;
    check_nccl(nccl_api()->send(
                   data, static_cast<size_t>(bytes), ncclUint8, static_cast<int>(to), comm, stream),
               "send");
  }
  void take(ncclComm_t comm, cudaStream_t stream, char* data, int64_t bytes, size_t from) const {
    if (bytes == 0 || from == static_cast<size_t>(place_.rank)) return;
    check_nccl(
        nccl_api()->receive(
            data, static_cast<size_t>(bytes), ncclUint8, static_cast<int>(from), comm, stream),
        "receive");
  }

  static void finish(Work& work, const Until& until) {
    until([&] { return work.done(); });
  }

  /// The communicator of the whole group.
  const std::shared_ptr<Communicator>& group(const Until& until) {
    if (group_) return group_;
    const HostLink link{[&](const void* mine, void* all, int64_t bytes) {
                          const Rows rows(std::vector<int64_t>(place_.world_ranks.size(), 1));
                          finish(*place_.host->all_gather(mine, all, rows, bytes, until), until);
                        },
                        [&](void* data, int64_t bytes) {
                          finish(*place_.host->broadcast(data, bytes, 0, until), until);
                        }};
    group_ = obtain_communicator(place_.name, place_.world_ranks, place_.rank, link, until);
    return group_;
  }

  /// One of this rank and that one: messages must not need the rest of the group to come along.
  const std::shared_ptr<Communicator>& pair(int peer, const Until& until) {
    std::shared_ptr<Communicator>& kept = pairs_[peer];
    if (kept) return kept;
    const bool first = place_.rank < peer;
    const HostLink link{
        [&](const void* mine, void* all, int64_t bytes) {
          char* slots = static_cast<char*>(all);
          std::memcpy(slots + (first ? 0 : bytes), mine, static_cast<size_t>(bytes));
          const WorkPtr in =
              place_.host->receive(slots + (first ? bytes : 0), bytes, peer, kIdTag, until);
          const WorkPtr out = place_.host->send(mine, bytes, peer, kIdTag, until);
          finish(*in, until);
          finish(*out, until);
        },
        [&](void* data, int64_t bytes) {
          finish(first ? *place_.host->send(data, bytes, peer, kIdTag, until)
                       : *place_.host->receive(data, bytes, peer, kIdTag, until),
                 until);
        }};
    std::vector<int> ranks = {place_.world_ranks[static_cast<size_t>(first ? place_.rank : peer)],
                              place_.world_ranks[static_cast<size_t>(first ? peer : place_.rank)]};
    kept = obtain_communicator(place_.name + " messages", ranks, first ? 0 : 1, link, until);
    return kept;
  }

  NcclPlace place_;
  bool host_memory_;
  std::shared_ptr<Communicator> group_;
  std::map<int, std::shared_ptr<Communicator>> pairs_;
};

}  // namespace

std::string nccl_missing() {
  std::string why;
  if (nccl_api(&why) == nullptr) return why;
  return device_missing();
}

std::unique_ptr<Transport> nccl_transport(NcclPlace place, bool host_memory) {
  return std::make_unique<NcclTransport>(std::move(place), host_memory);
}

}  // namespace lockstep::parallel
