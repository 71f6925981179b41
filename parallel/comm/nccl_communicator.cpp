#include "parallel/comm/nccl_communicator.hpp"

#include <algorithm>
#include <chrono>
#include <map>
#include <thread>
#include <utility>

#include "parallel/comm/ledger.hpp"

namespace lockstep::parallel {
namespace {

using Known = std::pair<std::string, std::vector<int>>;

/// In the same order on all ranks, as far as they share them.
std::map<Known, std::vector<std::shared_ptr<Communicator>>>& registry() {
  static std::map<Known, std::vector<std::shared_ptr<Communicator>>> all;
  return all;
}

template <typename Body>
void for_all(const Body& body) {
  for (auto& [_, list] : registry()) {
    for (const auto& comm : list) body(*comm);
  }
}

}  // namespace

Communicator::Communicator(const ncclUniqueId& id, int size, int rank, const Until& until)
    : mark_(hash_bytes(kHashStart, id.internal, sizeof id.internal) | 1) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  try {
    check_nccl(nccl_api()->init_rank(&comm_, size, id, rank, &config), "communicator");
    until([this] { return settled(); });
  } catch (const std::exception& error) {
    abort(error.what());
    throw;
  }
}

Communicator::~Communicator() { abort("its owner is gone"); }

bool Communicator::settled() {
  ncclResult_t state = ncclSuccess;
  check_nccl(nccl_api()->async_error(comm_, &state), "state");
  check_nccl(state, "communicator");
  return state != ncclInProgress;
}

void Communicator::issue(const std::function<void(ncclComm_t, cudaStream_t)>& body,
                         const Until& until) {
  check();
  use_device();
  try {
    check_nccl(nccl_api()->group_start(), "group");
    try {
      body(comm_, stream_.get());
    } catch (...) {
      nccl_api()->group_end();
      throw;
    }
    check_nccl(nccl_api()->group_end(), "group");
    until([this] { return settled(); });
  } catch (const std::exception& error) {
    abort(error.what());
    throw;
  }
}

void Communicator::check() {
  if (comm_ == nullptr)
    throw TransportError(fmt::format("this NCCL communicator was given up: {}", why_));
  try {
    (void)settled();
  } catch (const TransportError& error) {
    abort(error.what());
    throw;
  }
}

void Communicator::abort(const std::string& why) noexcept {
  if (comm_ == nullptr) return;
  why_ = why;
  nccl_api()->abort(std::exchange(comm_, nullptr));
}

void Communicator::close() noexcept {
  if (comm_ == nullptr) return;
  why_ = "the session has ended";
  // Peers that are gone must not keep this rank from ending.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  ncclResult_t state = nccl_api()->finalize(comm_);
  while (state == ncclInProgress && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
    if (nccl_api()->async_error(comm_, &state) != ncclSuccess) break;
  }
  if (state == ncclSuccess) {
    nccl_api()->destroy(std::exchange(comm_, nullptr));
  } else {
    abort(why_);
  }
}

std::shared_ptr<Communicator> obtain_communicator(const std::string& name,
                                                  const std::vector<int>& world_ranks,
                                                  int rank,
                                                  const HostLink& host,
                                                  const Until& until) {
  use_device();
  std::vector<std::shared_ptr<Communicator>>& list = registry()[{name, world_ranks}];
  std::shared_ptr<Communicator> free;
  for (const auto& comm : list) {
    if (comm.use_count() == 1 && comm->usable()) {
      free = comm;
      break;
    }
  }
  const uint64_t mine = free ? free->mark() : 0;
  std::vector<uint64_t> all(world_ranks.size());
  host.gather(&mine, all.data(), sizeof mine);
  if (mine != 0 && std::all_of(all.begin(), all.end(), [&](uint64_t m) { return m == mine; }))
    return free;
  ncclUniqueId id{};
  if (rank == 0) check_nccl(nccl_api()->get_unique_id(&id), "unique id");
  host.broadcast(&id, sizeof id);
  auto made = std::make_shared<Communicator>(id, static_cast<int>(world_ranks.size()), rank, until);
  list.push_back(made);
  return made;
}

void nccl_abort_all() noexcept {
  for_all([](Communicator& comm) { comm.abort("the session was aborted"); });
}

void nccl_close_all() noexcept {
  if (registry().empty()) return;
  free_buffers();
  for_all([](Communicator& comm) { comm.close(); });
  registry().clear();
}

}  // namespace lockstep::parallel
