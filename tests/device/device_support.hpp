#pragma once

// What the device tests share: failing, recording, device memory with guard bands, random inputs,
// error measures, timing. For programs compiled by nvcc; no test framework.

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace lockstep::device_test {

inline int failures = 0;
inline FILE* json = nullptr;
inline bool first_record = true;

inline void must(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(2);
}
/// For results of the kernels' host functions: status, cuda_error, detail.
template <class Result>
void must_launch(const Result& result, const std::string& name) {
  if (result) return;
  std::fprintf(stderr,
               "%s: status %d cuda %d: %s\n",
               name.c_str(),
               static_cast<int>(result.status),
               result.cuda_error,
               result.detail);
  std::exit(2);
}
inline void record(const std::string& line) {
  std::fprintf(json, "%s\n  {%s}", first_record ? "" : ",", line.c_str());
  first_record = false;
}
inline void expect(bool good, const std::string& what) {
  if (!good) ++failures;
  if (!good) std::printf("FAIL %s\n", what.c_str());
}

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t count) : count_(count) {
    must(cudaMalloc(&data_, std::max<size_t>(count, 1) * sizeof(T)), "cudaMalloc");
  }
  explicit DeviceArray(const std::vector<T>& from) : DeviceArray(from.size()) {
    must(cudaMemcpy(data_, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice), "upload");
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  T* get() const { return data_; }
  size_t count() const { return count_; }
  void fill_bytes(int value) { must(cudaMemset(data_, value, count_ * sizeof(T)), "cudaMemset"); }
  std::vector<T> download() const { return download(0, count_); }
  std::vector<T> download(size_t first, size_t count) const {
    std::vector<T> to(count);
    must(cudaMemcpy(to.data(), data_ + first, count * sizeof(T), cudaMemcpyDeviceToHost),
         "download");
    return to;
  }

 private:
  T* data_ = nullptr;
  size_t count_ = 0;
};

constexpr size_t kGuard = 4096;

/// Output filled with 0xff (NaN) and followed by a guard band.
template <class T>
class Poisoned : public DeviceArray<T> {
 public:
  explicit Poisoned(size_t count) : DeviceArray<T>(count + kGuard), count_(count) {
    this->fill_bytes(0xff);
  }
  /// The values, after a look at the guard band.
  std::vector<T> checked(const std::string& name) const {
    std::vector<T> all = this->download();
    const unsigned char* guard = reinterpret_cast<const unsigned char*>(all.data() + count_);
    bool intact = true;
    for (size_t i = 0; i < kGuard * sizeof(T); ++i) intact = intact && guard[i] == 0xff;
    expect(intact, name + ": wrote outside its outputs");
    all.resize(count_);
    return all;
  }

 private:
  size_t count_;
};

__device__ inline float normal(uint64_t index, uint32_t stream) {
  uint64_t x =
      index * 0x9e3779b97f4a7c15ull + stream * 0xd1b54a32d192ed03ull + 0x2545f4914f6cdd1dull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  x ^= x >> 31;
  const float u = (static_cast<uint32_t>(x) + 1.0f) * 2.3283064e-10f;
  const float w = static_cast<uint32_t>(x >> 32) * 2.3283064e-10f;
  return sqrtf(-2.0f * logf(fminf(u, 1.0f))) * cosf(6.2831853f * w);
}
static __global__ void fill_bf16_kernel(uint16_t* to, size_t count, uint32_t stream, float scale) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x) {
    const __nv_bfloat16_raw bits = __float2bfloat16_rn(normal(i, stream) * scale);
    to[i] = bits.x;
  }
}
static __global__ void fill_float_kernel(
    float* to, size_t count, uint32_t stream, float scale, float shift) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x)
    to[i] = normal(i, stream) * scale + shift;
}
inline void fill(const DeviceArray<uint16_t>& to, uint32_t stream, float scale) {
  fill_bf16_kernel<<<1024, 256>>>(to.get(), to.count(), stream, scale);
}
inline void fill(const DeviceArray<float>& to, uint32_t stream, float scale, float shift) {
  fill_float_kernel<<<256, 256>>>(to.get(), to.count(), stream, scale, shift);
}

/// Row `row` of `a` has the bytes of row `other` of `b`.
template <class T>
bool same_rows(const std::vector<T>& a, size_t row, const std::vector<T>& b, size_t other, int n) {
  return a.empty() ? b.empty()
                   : std::memcmp(&a[row * n], &b[other * n], size_t(n) * sizeof(T)) == 0;
}

struct Error {
  double difference = 0, norm = 0, largest = 0;
  size_t count = 0, flipped = 0, not_finite = 0;
  void add(double value, double truth) {
    ++count;
    if (!std::isfinite(value)) {
      ++not_finite;
      return;
    }
    difference += (value - truth) * (value - truth);
    norm += truth * truth;
    largest = std::max(largest, std::fabs(value - truth));
    flipped += value != truth;
  }
  void add(const Error& e) {
    difference += e.difference, norm += e.norm, largest = std::max(largest, e.largest);
    count += e.count, flipped += e.flipped, not_finite += e.not_finite;
  }
  double relative() const {
    return norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
  }
  double flip_rate() const { return count > 0 ? double(flipped) / double(count) : 0; }
};

/// work(thread, i) for i in [0, count), thread t gets i = t, t + threads, ...
template <class Work>
void on_threads(int64_t count, size_t threads, const Work& work) {
  std::vector<std::thread> pool;
  for (size_t w = 0; w < threads; ++w)
    pool.emplace_back([&, w] {
      for (int64_t i = int64_t(w); i < count; i += int64_t(threads)) work(w, i);
    });
  for (auto& t : pool) t.join();
}
inline size_t cpu_threads() { return std::max(1u, std::thread::hardware_concurrency()); }

/// Median milliseconds of `call(i)`, i counting up; `inner` calls between two events.
template <class Call>
double median_ms(int count, int inner, const Call& call) {
  std::vector<float> times;
  cudaEvent_t begin, end;
  must(cudaEventCreate(&begin), "event");
  must(cudaEventCreate(&end), "event");
  for (int i = 0, n = 0; i < count + 3; ++i) {
    must(cudaEventRecord(begin), "record");
    for (int k = 0; k < inner; ++k) call(n++);
    must(cudaEventRecord(end), "record");
    must(cudaEventSynchronize(end), "timed run");
    float ms = 0;
    must(cudaEventElapsedTime(&ms, begin, end), "elapsed");
    if (i >= 3) times.push_back(ms / static_cast<float>(inner));
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

/// Times `call` beside a device copy that moves as many bytes (half in, half out); prints and
/// records one line.
template <class Call>
void time_beside_copy(const std::string& name, double bytes, int count, const Call& call) {
  const double single = median_ms(count, 1, call);
  const double stream = median_ms(std::max(count / 5, 3), 5, call);
  const double again = median_ms(count, 1, call);
  const size_t half = static_cast<size_t>(bytes / 2);
  DeviceArray<unsigned char> from(half), to(half);
  from.fill_bytes(0x5a);
  const double copy = median_ms(20, 1, [&](int) {
    must(cudaMemcpyAsync(to.get(), from.get(), half, cudaMemcpyDeviceToDevice), "copy");
  });
  std::printf(
      "%-34s %8.4f ms (again %.4f, back to back %.4f) %6.0f GB/s; copy %.4f ms %6.0f GB/s; share "
      "%.3f, back to back %.3f\n",
      name.c_str(),
      single,
      again,
      stream,
      bytes / single * 1e-6,
      copy,
      bytes / copy * 1e-6,
      copy / single,
      copy / stream);
  char text[384];
  std::snprintf(text,
                sizeof text,
                "\"time\": \"%s\", \"ms\": %.4f, \"ms_again\": %.4f, \"ms_back_to_back\": %.4f, "
                "\"gb_per_s\": %.0f, \"copy_ms\": %.4f, \"copy_gb_per_s\": %.0f",
                name.c_str(),
                single,
                again,
                stream,
                bytes / single * 1e-6,
                copy,
                bytes / copy * 1e-6);
  record(text);
  std::fflush(stdout);
}

/// `run(mode)` between opening and closing the record file. Exit code of the program.
template <class Run>
int device_main(int argc, char** argv, const char* modes, const Run& run) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s %s OUT.json\n", argv[0], modes);
    return 2;
  }
  json = std::fopen(argv[2], "w");
  if (json == nullptr) {
    std::fprintf(stderr, "cannot write %s\n", argv[2]);
    return 2;
  }
  cudaDeviceProp device;
  int driver = 0;
  must(cudaGetDeviceProperties(&device, 0), "device");
  must(cudaDriverGetVersion(&driver), "driver");
  std::printf(
      "%s, %d multiprocessors, CUDA driver %d\n", device.name, device.multiProcessorCount, driver);
  std::fprintf(
      json, "{\"device\": \"%s\", \"cuda_driver\": %d, \"records\": [", device.name, driver);
  run(std::string(argv[1]));
  std::fprintf(json, "\n], \"failures\": %d}\n", failures);
  std::fclose(json);
  std::printf(failures == 0 ? "all checks passed\n" : "%d checks FAILED\n", failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace lockstep::device_test
