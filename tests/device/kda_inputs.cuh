#pragma once

// Inputs, error measures and records shared by the KDA device tests.

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "model/ops/kda_cuda.hpp"
#include "tests/device/kda_reference.hpp"

namespace lockstep::device_test {
namespace {

using model::KdaForwardArgs;
constexpr int kD = 128;

int failures = 0;
FILE* json = nullptr;
bool first_record = true;

void must(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(2);
}
void record(const std::string& line) {
  std::fprintf(json, "%s\n  {%s}", first_record ? "" : ",", line.c_str());
  first_record = false;
}
void expect(bool good, const std::string& what) {
  if (!good) ++failures;
  if (!good) std::printf("FAIL %s\n", what.c_str());
}

template <class T>
class DeviceArray {
 public:
  /// Not a number, and so are kBehind elements behind the end: whoever reads them shows it.
  explicit DeviceArray(size_t count) : count_(count) {
    must(cudaMalloc(&data_, (count + kBehind) * sizeof(T)), "cudaMalloc");
    must(cudaMemset(data_, 0xff, (count + kBehind) * sizeof(T)), "cudaMemset");
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  T* get() const { return data_; }
  size_t count() const { return count_; }
  void fill_bytes(int value) { must(cudaMemset(data_, value, count_ * sizeof(T)), "cudaMemset"); }
  void upload(const std::vector<T>& from) {
    must(cudaMemcpy(data_, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice), "upload");
  }
  std::vector<T> download() const {
    std::vector<T> to(count_);
    must(cudaMemcpy(to.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost), "download");
    return to;
  }

 private:
  static constexpr size_t kBehind = 32768;
  T* data_ = nullptr;
  size_t count_ = 0;
};

enum class Gate {
  kMixed,
  kStrong,
  kWeak,
  kChannels
};  // kChannels: one channel at -5, others mixed
enum class Key { kRandom, kEqual, kZero };
enum class Beta { kRandom, kZero, kOne };

__device__ float normal(uint64_t index, uint32_t stream) {
  uint64_t x =
      index * 0x9e3779b97f4a7c15ull + stream * 0xd1b54a32d192ed03ull + 0x2545f4914f6cdd1dull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  x ^= x >> 31;
  const float u = (static_cast<uint32_t>(x) + 1.0f) * 2.3283064e-10f;
  const float w = static_cast<uint32_t>(x >> 32) * 2.3283064e-10f;
  return sqrtf(-2.0f * logf(fminf(u, 1.0f))) * cosf(6.2831853f * w);
}
__global__ void fill_bf16(uint16_t* to, size_t count, uint32_t stream, float scale, float shift) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x) {
    const __nv_bfloat16_raw bits = __float2bfloat16_rn(normal(i, stream) * scale + shift);
    to[i] = bits.x;
  }
}
__global__ void fill_channel(uint16_t* to, size_t rows, int channel, float value) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < rows;
       i += size_t{gridDim.x} * blockDim.x) {
    const __nv_bfloat16_raw bits = __float2bfloat16_rn(value);
    to[i * kD + channel] = bits.x;
  }
}
__global__ void repeat_first_row(uint16_t* to, size_t count, size_t row) {
  for (size_t i = row + blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x)
    to[i] = to[i % row];
}
__global__ void fill_float(float* to, size_t count, uint32_t stream, float scale) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x)
    to[i] = normal(i, stream) * scale;
}

struct Problem {
  std::string name;
  std::vector<int64_t> lengths;
  int heads;
  Gate gate = Gate::kMixed;
  Key key = Key::kRandom;
  Beta beta = Beta::kRandom;
  bool state = true;
  uint32_t seed = 1;
};

class Inputs {
 public:
  explicit Inputs(const Problem& p)
      : tokens(total(p.lengths)),
        documents(static_cast<int64_t>(p.lengths.size())),
        heads(p.heads),
        q(elements()),
        k(elements()),
        v(elements()),
        f(elements()),
        beta(tokens * heads),
        a_log(heads),
        dt_bias(heads * size_t{kD}),
        cu(documents + 1),
        state(p.state ? documents * heads * size_t{kD} * kD : 0) {
    const uint32_t s = p.seed * 16;
    const float f_scale = p.gate == Gate::kMixed || p.gate == Gate::kChannels ? 1.5f : 0.1f;
    const float f_shift = p.gate == Gate::kStrong ? 60.0f : p.gate == Gate::kWeak ? -9.0f : -1.0f;
    const float b_scale = p.beta == Beta::kRandom ? 1.0f : 0.0f;
    const float b_shift = p.beta == Beta::kZero ? -30.0f : p.beta == Beta::kOne ? 30.0f : 0.0f;
    fill_bf16<<<1024, 256>>>(q.get(), q.count(), s, 1.0f, 0.0f);
    fill_bf16<<<1024, 256>>>(k.get(), k.count(), s + 1, p.key == Key::kZero ? 0.0f : 1.0f, 0.0f);
    if (p.key == Key::kEqual && tokens > 0)
      repeat_first_row<<<1024, 256>>>(k.get(), k.count(), heads * size_t{kD});
    fill_bf16<<<1024, 256>>>(v.get(), v.count(), s + 2, 1.0f, 0.0f);
    fill_bf16<<<1024, 256>>>(f.get(), f.count(), s + 3, f_scale, f_shift);
    if (p.gate == Gate::kChannels) fill_channel<<<1024, 256>>>(f.get(), tokens * heads, 17, 90.0f);
    fill_bf16<<<1024, 256>>>(beta.get(), beta.count(), s + 4, b_scale, b_shift);
    fill_float<<<64, 256>>>(a_log.get(), a_log.count(), s + 5, 0.4f);
    fill_float<<<64, 256>>>(dt_bias.get(), dt_bias.count(), s + 6, 1.0f);
    if (p.state) fill_float<<<1024, 256>>>(state.get(), state.count(), s + 7, 0.5f);
    bounds.assign(1, 0);
    for (const int64_t n : p.lengths) bounds.push_back(bounds.back() + n);
    cu.upload(bounds);
    must(cudaDeviceSynchronize(), "inputs");
  }
  size_t elements() const { return static_cast<size_t>(tokens) * heads * kD; }
  static int64_t total(const std::vector<int64_t>& lengths) {
    int64_t sum = 0;
    for (const int64_t n : lengths) sum += n;
    return sum;
  }

  int64_t tokens, documents;
  int heads;
  DeviceArray<uint16_t> q, k, v, f, beta;
  DeviceArray<float> a_log, dt_bias;
  DeviceArray<int64_t> cu;
  DeviceArray<float> state;
  std::vector<int64_t> bounds;
};

KdaForwardArgs arguments(const Inputs& in) {
  KdaForwardArgs a;
  a.tokens = in.tokens;
  a.documents = in.documents;
  a.heads = in.heads;
  a.q_THK = in.q.get();
  a.k_THK = in.k.get();
  a.v_THV = in.v.get();
  a.f_THK = in.f.get();
  a.beta_logit_TH = in.beta.get();
  a.a_log_H = in.a_log.get();
  a.dt_bias_HK = in.dt_bias.get();
  a.cu_seqlens = in.cu.get();
  a.initial_state_NHKV = in.state.count() > 0 ? in.state.get() : nullptr;
  return a;
}

struct Error {
  double frobenius = 0, largest = 0;
  size_t not_finite = 0;
};
class ErrorSum {
 public:
  void add(double value, double truth) {
    if (!std::isfinite(value)) {
      ++bad_;
      return;
    }
    difference_ += (value - truth) * (value - truth);
    norm_ += truth * truth;
    largest_difference_ = std::max(largest_difference_, std::fabs(value - truth));
    largest_ = std::max(largest_, std::fabs(truth));
  }
  void add(const ErrorSum& e) {
    difference_ += e.difference_;
    norm_ += e.norm_;
    largest_difference_ = std::max(largest_difference_, e.largest_difference_);
    largest_ = std::max(largest_, e.largest_);
    bad_ += e.bad_;
  }
  Error result() const {
    return {norm_ > 0 ? std::sqrt(difference_ / norm_) : std::sqrt(difference_),
            largest_ > 0 ? largest_difference_ / largest_ : largest_difference_,
            bad_};
  }

 private:
  double difference_ = 0, norm_ = 0, largest_difference_ = 0, largest_ = 0;
  size_t bad_ = 0;
};

std::vector<uint16_t> head_rows(const DeviceArray<uint16_t>& from,
                                int64_t first,
                                int64_t rows,
                                int heads,
                                int head,
                                int width) {
  std::vector<uint16_t> to(static_cast<size_t>(rows) * width);
  if (rows > 0)
    must(cudaMemcpy2D(to.data(),
                      width * 2,
                      from.get() + (first * heads + head) * width,
                      static_cast<size_t>(heads) * width * 2,
                      width * 2,
                      rows,
                      cudaMemcpyDeviceToHost),
         "copy rows");
  return to;
}

void open_records(const char* path) {
  json = std::fopen(path, "w");
  if (json == nullptr) {
    std::fprintf(stderr, "cannot write %s\n", path);
    std::exit(2);
  }
  cudaDeviceProp device;
  int driver = 0;
  must(cudaGetDeviceProperties(&device, 0), "device");
  must(cudaDriverGetVersion(&driver), "driver");
  std::printf(
      "%s, %d multiprocessors, CUDA driver %d\n", device.name, device.multiProcessorCount, driver);
  std::fprintf(
      json, "{\"device\": \"%s\", \"cuda_driver\": %d, \"records\": [", device.name, driver);
}
/// Exit code of the program.
int close_records() {
  std::fprintf(json, "\n], \"failures\": %d}\n", failures);
  std::fclose(json);
  std::printf(failures == 0 ? "all checks passed\n" : "%d checks FAILED\n", failures);
  return failures == 0 ? 0 : 1;
}

/// Runs work(i) for i < count on all cores of the host.
template <class Work>
void on_all_cores(size_t count, const Work& work) {
  std::vector<std::thread> pool;
  const size_t threads = std::max(1u, std::thread::hardware_concurrency());
  for (size_t t = 0; t < threads; ++t)
    pool.emplace_back([&, t] {
      for (size_t i = t; i < count; i += threads) work(i);
    });
  for (auto& t : pool) t.join();
}

}  // namespace
}  // namespace lockstep::device_test
