#include "parallel/comm/nccl_device.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdlib>
#include <utility>
#include <vector>

#include "parallel/comm/transport.hpp"

namespace lockstep::parallel {
namespace {

constexpr int kSmallestPower = 12;

std::vector<char*>& pool(Where where, int power) {
  static std::array<std::array<std::vector<char*>, 64>, 2> pools;
  return pools[where == Where::kDevice ? 0 : 1][static_cast<size_t>(power)];
}

int local_rank() {
  for (const char* name : {"OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"}) {
    if (const char* value = std::getenv(name)) return std::atoi(value);
  }
  return 0;
}

}  // namespace

void check_cuda(cudaError_t result, const char* call) {
  if (result == cudaSuccess) return;
  throw TransportError(fmt::format(
      "CUDA {} failed: {} ({})", call, cudaGetErrorString(result), cudaGetErrorName(result)));
}

std::string device_missing() {
  int count = 0;
  const cudaError_t result = cudaGetDeviceCount(&count);
  if (result == cudaSuccess && count > 0) return {};
  return fmt::format("NCCL needs a GPU, and there is none: {}; use --comm mpi here",
                     result == cudaSuccess ? "no device is visible" : cudaGetErrorString(result));
}

int use_device() {
  static const int device = [] {
    int count = 0;
    check_cuda(cudaGetDeviceCount(&count), "device count");
    return local_rank() % std::max(1, count);
  }();
  check_cuda(cudaSetDevice(device), "set device");
  return device;
}

Stream::Stream() {
  check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
}
Stream::~Stream() { cudaStreamDestroy(stream_); }

Event::Event() { check_cuda(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "event"); }
Event::~Event() { cudaEventDestroy(event_); }
void Event::record(const Stream& stream) {
  check_cuda(cudaEventRecord(event_, stream.get()), "event record");
}
bool Event::reached() const {
  const cudaError_t result = cudaEventQuery(event_);
  if (result == cudaErrorNotReady) return false;
  check_cuda(result, "event");
  return true;
}

Buffer::Buffer(Where where, int64_t bytes)
    : where_(where),
      power_(std::max(kSmallestPower,
                      static_cast<int>(std::bit_width(static_cast<uint64_t>(bytes))))) {
  std::vector<char*>& free = pool(where, power_);
  if (!free.empty()) {
    data_ = free.back();
    free.pop_back();
    return;
  }
  void* data = nullptr;
  const size_t size = size_t{1} << power_;
  check_cuda(where == Where::kDevice ? cudaMalloc(&data, size) : cudaMallocHost(&data, size),
             "buffer");
  data_ = static_cast<char*>(data);
}

Buffer::Buffer(Buffer&& other) noexcept
    : where_(other.where_), power_(other.power_), data_(std::exchange(other.data_, nullptr)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(where_, other.where_);
  std::swap(power_, other.power_);
  std::swap(data_, other.data_);
  return *this;
}

Buffer::~Buffer() {
  if (data_ != nullptr) pool(where_, power_).push_back(data_);
}

void free_buffers() noexcept {
  for (int power = 0; power < 64; ++power) {
    for (char* data : std::exchange(pool(Where::kDevice, power), {})) cudaFree(data);
    for (char* data : std::exchange(pool(Where::kPinnedHost, power), {})) cudaFreeHost(data);
  }
}

}  // namespace lockstep::parallel
