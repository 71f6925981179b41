// Streams, events and buffers of the device that this rank communicates from. Included by this
// room's NCCL sources only.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

namespace lockstep::parallel {

/// Throws TransportError unless the result is success.
void check_cuda(cudaError_t result, const char* call);

/// Why there is no device, empty when there is one.
std::string device_missing();

/// Index of the device of this rank (its number on this machine, modulo the number of devices), and
/// makes it current for this thread.
int use_device();

class Stream {
 public:
  Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream();
  [[nodiscard]] cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

class Event {
 public:
  Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event();
  void record(const Stream& stream);
  /// Everything before record() has ended. Throws TransportError for a device error.
  [[nodiscard]] bool reached() const;

 private:
  cudaEvent_t event_ = nullptr;
};

enum class Where { kDevice, kPinnedHost };

/// A buffer out of a pool. Nothing is given back to the device before free_buffers(): freeing waits
/// for all kernels of the device, and one of them may be waiting for a peer.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Where where, int64_t bytes);
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();
  [[nodiscard]] char* get() const { return data_; }

 private:
  Where where_ = Where::kDevice;
  int power_ = 0;  ///< holds 2^power bytes
  char* data_ = nullptr;
};

/// Frees the pooled buffers that nobody holds.
void free_buffers() noexcept;

}  // namespace lockstep::parallel
