#include "tests/support/fake_device.hpp"

#include <cuda_runtime_api.h>
#include <mpi.h>
#include <nccl.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <vector>

/// Work in order; each item says when it is done.
struct CUstream_st {
  std::deque<std::function<bool()>> items;
  int64_t added = 0, ended = 0;

  void add(std::function<bool()> item) {
    items.push_back(std::move(item));
    ++added;
  }
  void go() {
    while (!items.empty() && items.front()()) {
      items.pop_front();
      ++ended;
    }
  }
};

struct CUevent_st {
  CUstream_st* stream = nullptr;
  int64_t after = 0;
};

namespace {

bool g_broken = false;
int g_made = 0, g_ids = 0;

std::set<CUstream_st*>& streams() {
  static std::set<CUstream_st*> all;
  return all;
}

/// As a device would, all streams go on whoever is looked at.
void go_all() {
  for (CUstream_st* stream : streams()) stream->go();
}

struct Message {
  bool out;
  char* data;
  size_t bytes;
  int peer;
};

}  // namespace

struct ncclComm {
  int rank = 0, size = 1, tag = 0, root = 0, own_world = 0;
  std::vector<int> world;  ///< of each rank, once known
  bool ready = false, given_up = false;
  int told = 0;           ///< ranks the root knows
  std::vector<int> mail;  ///< being sent or received
  std::vector<MPI_Request> requests;

  /// Everybody tells the root who it is; the root tells everybody.
  void introduce() {
    if (ready || size == 1) {
      ready = true;
      return;
    }
    if (requests.empty()) {
      if (rank == 0) {
        mail.assign(2, 0);
        receive(MPI_ANY_SOURCE);
      } else {
        mail = {rank, own_world};
        send(root);
      }
    }
    if (!finished()) return;
    requests.clear();
    if (rank != 0) {
      if (told++ == 0) {
        mail.assign(static_cast<size_t>(size), 0);
        receive(root);
        return;
      }
      world = mail;
      ready = true;
      return;
    }
    if (told < size - 1) {
      world[static_cast<size_t>(mail[0])] = mail[1];
      if (++told < size - 1) return introduce();
      mail = world;
      for (int r = 1; r < size; ++r) send(world[static_cast<size_t>(r)]);
      return;
    }
    ready = true;
  }

 private:
  void send(int to) {
    requests.push_back(MPI_REQUEST_NULL);
    MPI_Isend(mail.data(),
              static_cast<int>(mail.size()),
              MPI_INT,
              to,
              tag,
              MPI_COMM_WORLD,
              &requests.back());
  }
  void receive(int from) {
    requests.push_back(MPI_REQUEST_NULL);
    MPI_Irecv(mail.data(),
              static_cast<int>(mail.size()),
              MPI_INT,
              from,
              tag,
              MPI_COMM_WORLD,
              &requests.back());
  }
  bool finished() {
    int done = 0;
    MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done, MPI_STATUSES_IGNORE);
    return done != 0;
  }
};

namespace {

struct Group {
  ncclComm* comm = nullptr;
  CUstream_st* stream = nullptr;
  std::vector<Message> messages;
  std::vector<std::function<void()>> copies;
};
Group g_group;

/// Messages of a group as one item: posted at its turn, done when all have arrived.
void issue(Group group) {
  struct State {
    Group group;
    bool posted = false;
    std::vector<MPI_Request> requests;
  };
  auto state = std::make_shared<State>();
  state->group = std::move(group);
  state->group.stream->add([state] {
    ncclComm* comm = state->group.comm;
    if (comm->given_up) return true;
    if (!state->posted) {
      state->posted = true;
      for (const auto& copy : state->group.copies) copy();
      for (const Message& m : state->group.messages) {
        state->requests.push_back(MPI_REQUEST_NULL);
        const int peer = comm->world[static_cast<size_t>(m.peer)], tag = comm->tag + 1;
        if (m.out) {
          MPI_Isend(m.data,
                    static_cast<int>(m.bytes),
                    MPI_BYTE,
                    peer,
                    tag,
                    MPI_COMM_WORLD,
                    &state->requests.back());
        } else {
          MPI_Irecv(m.data,
                    static_cast<int>(m.bytes),
                    MPI_BYTE,
                    peer,
                    tag,
                    MPI_COMM_WORLD,
                    &state->requests.back());
        }
      }
    }
    int done = 0;
    MPI_Testall(static_cast<int>(state->requests.size()),
                state->requests.data(),
                &done,
                MPI_STATUSES_IGNORE);
    return done != 0;
  });
}

void add(ncclComm* comm, CUstream_st* stream, bool out, const void* data, size_t bytes, int peer) {
  g_group.comm = comm;
  g_group.stream = stream;
  g_group.messages.push_back({out, static_cast<char*>(const_cast<void*>(data)), bytes, peer});
}

void copy(ncclComm* comm, CUstream_st* stream, void* to, const void* from, size_t bytes) {
  g_group.comm = comm;
  g_group.stream = stream;
  if (to != from) g_group.copies.emplace_back([=] { std::memcpy(to, from, bytes); });
}

cudaError_t allocate(void** data, size_t bytes) {
  *data = std::malloc(bytes);
  std::memset(*data, 0xab, bytes);
  return cudaSuccess;
}

}  // namespace

namespace lockstep::tests {

void break_fake_nccl(bool broken) { g_broken = broken; }
int fake_nccl_communicators() { return g_made; }

}  // namespace lockstep::tests

// --- the CUDA runtime ----------------------------------------------------------------------------
extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }
const char* cudaGetErrorString(cudaError_t) { return "error of the fake device"; }
const char* cudaGetErrorName(cudaError_t) { return "fake"; }
cudaError_t cudaMalloc(void** data, size_t bytes) { return allocate(data, bytes); }
cudaError_t cudaMallocHost(void** data, size_t bytes) { return allocate(data, bytes); }
cudaError_t cudaFree(void* data) {
  std::free(data);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* data) { return cudaFree(data); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int) {
  *stream = new CUstream_st;
  streams().insert(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  streams().erase(stream);
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
  *event = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  event->stream = stream;
  event->after = stream->added;
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  go_all();
  return event->stream->ended >= event->after ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaMemcpyAsync(
    void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  stream->add([=] {
    std::memcpy(to, from, bytes);
    return true;
  });
  return cudaSuccess;
}

// --- NCCL, with communicators that do not block --------------------------------------------------

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t) { return "error of the fake NCCL"; }
const char* ncclGetLastError(ncclComm_t) { return ""; }
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  int world_rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
  const int words[2] = {world_rank, g_ids++};
  std::memset(id, 0, sizeof *id);
  std::memcpy(id->internal, words, sizeof words);
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(
    ncclComm_t* comm, int size, ncclUniqueId id, int rank, ncclConfig_t* config) {
  if (config->blocking != 0) return ncclInvalidArgument;
  ++g_made;
  int words[2];
  std::memcpy(words, id.internal, sizeof words);
  *comm = new ncclComm;
  (*comm)->rank = rank;
  (*comm)->size = size;
  (*comm)->root = words[0];
  (*comm)->tag = 1000000 + words[0] * 20000 + 2 * words[1];
  (*comm)->world.assign(static_cast<size_t>(size), 0);
  MPI_Comm_rank(MPI_COMM_WORLD, &(*comm)->own_world);
  (*comm)->world[static_cast<size_t>(rank)] = (*comm)->own_world;
  return ncclInProgress;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  if (!comm->ready) comm->introduce();
  *state = g_broken ? ncclRemoteError : comm->ready ? ncclSuccess : ncclInProgress;
  return ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  comm->given_up = true;  // kept: items of its stream may still look
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) { return ncclCommDestroy(comm); }
ncclResult_t ncclGroupStart() {
  g_group = {};
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (g_group.comm != nullptr) issue(std::move(g_group));
  g_group = {};
  return ncclSuccess;
}
ncclResult_t ncclSend(const void* data,
                      size_t count,
                      ncclDataType_t type,
                      int peer,
                      ncclComm_t comm,
                      cudaStream_t stream) {
  if (type != ncclUint8 || peer >= comm->size) return ncclInvalidArgument;
  add(comm, stream, true, data, count, peer);
  return ncclSuccess;
}
ncclResult_t ncclRecv(
    void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  if (type != ncclUint8 || peer >= comm->size) return ncclInvalidArgument;
  add(comm, stream, false, data, count, peer);
  return ncclSuccess;
}
ncclResult_t ncclAllGather(const void* send,
                           void* receive,
                           size_t count,
                           ncclDataType_t,
                           ncclComm_t comm,
                           cudaStream_t stream) {
  for (int r = 0; r < comm->size; ++r) {
    char* place = static_cast<char*>(receive) + static_cast<size_t>(r) * count;
    if (r == comm->rank) {
      copy(comm, stream, place, send, count);
      continue;
    }
    add(comm, stream, true, send, count, r);
    add(comm, stream, false, place, count, r);
  }
  return ncclSuccess;
}
ncclResult_t ncclBroadcast(const void* send,
                           void* receive,
                           size_t count,
                           ncclDataType_t,
                           int root,
                           ncclComm_t comm,
                           cudaStream_t stream) {
  if (comm->rank != root) {
    add(comm, stream, false, receive, count, root);
    return ncclSuccess;
  }
  copy(comm, stream, receive, send, count);
  for (int r = 0; r < comm->size; ++r) {
    if (r != root) add(comm, stream, true, send, count, r);
  }
  return ncclSuccess;
}

}  // extern "C"
