#pragma once

// The experts in float64 on the device, one thread per element of a product: the truth, and with
// `rounded` the plain form of the bf16 policy (every bf16 tensor rounded where it stands).

#include <cmath>
#include <vector>

#include "tests/device/device_support.hpp"

namespace lockstep::device_test {

__device__ inline double to_bf16(double x) {
  return static_cast<double>(__bfloat162float(__float2bfloat16_rn(static_cast<float>(x))));
}
static __global__ void widen_kernel(const uint16_t* from, double* to, size_t count) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x)
    to[i] = static_cast<double>(__uint_as_float(uint32_t{from[i]} << 16));
}

/// c[m cm + n] = sum over k of a[m am + k ak] b[n bn + k bk].
struct NaiveProduct {
  const double *a, *b;
  double* c;
  int64_t am, ak, bn, bk, cm;
  int m, n, k;
  bool rounded;
};
static __global__ void __launch_bounds__(1024) naive_kernel(NaiveProduct p) {
  __shared__ double a[32][33], b[32][33];
  const int tx = threadIdx.x % 32, ty = threadIdx.x / 32;
  const int m0 = blockIdx.y * 32, n0 = blockIdx.x * 32;
  double sum = 0;
  for (int k0 = 0; k0 < p.k; k0 += 32) {
    // Lanes along the contiguous index.
    const int am = p.ak == 1 ? ty : tx, ak = p.ak == 1 ? tx : ty;
    const int bn = p.bk == 1 ? ty : tx, bk = p.bk == 1 ? tx : ty;
    a[am][ak] = m0 + am < p.m && k0 + ak < p.k ? p.a[(m0 + am) * p.am + (k0 + ak) * p.ak] : 0.0;
    b[bn][bk] = n0 + bn < p.n && k0 + bk < p.k ? p.b[(n0 + bn) * p.bn + (k0 + bk) * p.bk] : 0.0;
    __syncthreads();
#pragma unroll 8
    for (int k = 0; k < 32; ++k) sum += a[ty][k] * b[tx][k];
    __syncthreads();
  }
  if (m0 + ty < p.m && n0 + tx < p.n)
    p.c[(m0 + ty) * p.cm + n0 + tx] = p.rounded ? to_bf16(sum) : sum;
}
inline void naive_product(const NaiveProduct& p) {
  if (p.m == 0 || p.n == 0) return;
  naive_kernel<<<dim3((p.n + 31) / 32, (p.m + 31) / 32), 1024>>>(p);
  must(cudaGetLastError(), "naive product");
}

struct NaiveSwiglu {
  int64_t rows, inner;
  double limit;
  int roundings;
  bool rounded;
  const double *products, *dh;  // dh null: forward only
  double *h, *dproducts;
};
static __global__ void naive_swiglu_kernel(NaiveSwiglu p) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < p.rows * p.inner;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t row = i / p.inner, at = row * 2 * p.inner + i % p.inner;
    const double g = p.products[at], u = p.products[at + p.inner];
    const double gate = fmin(g, p.limit), up = fmax(fmin(u, p.limit), -p.limit);
    const double s = 1 / (1 + exp(-gate));
    const auto round = [&](double x, bool wanted) { return p.rounded && wanted ? to_bf16(x) : x; };
    const double first = round(s, p.roundings == 3);
    const double activated = round(gate * first, p.roundings >= 2);
    p.h[i] = round(activated * up, true);
    if (p.dh == nullptr) continue;
    const double dg = p.dh[i] * up * (first + gate * s * (1 - s)), du = p.dh[i] * activated;
    p.dproducts[at] = g > p.limit ? 0 : round(dg, true);
    p.dproducts[at + p.inner] = fabs(u) > p.limit ? 0 : round(du, true);
  }
}

struct ExpertsReference {
  DeviceArray<double> products, h, out, dh, dproducts, dx, dgate_up, ddown;

  ExpertsReference(const std::vector<int64_t>& offsets,
                   int64_t D,
                   int64_t I,
                   double limit,
                   int roundings,
                   bool rounded,
                   const DeviceArray<double>& x,
                   const DeviceArray<double>& gate_up,
                   const DeviceArray<double>& down,
                   const DeviceArray<double>& dout)
      : products(offsets.back() * 2 * I),
        h(offsets.back() * I),
        out(offsets.back() * D),
        dh(offsets.back() * I),
        dproducts(offsets.back() * 2 * I),
        dx(offsets.back() * D),
        dgate_up(gate_up.count()),
        ddown(down.count()) {
    const int64_t R = offsets.back();
    const int d = int(D), i = int(I);
    const auto each = [&](const auto& call) {
      for (size_t e = 0; e + 1 < offsets.size(); ++e)
        call(int64_t(e), offsets[e], int(offsets[e + 1] - offsets[e]));
    };
    each([&](int64_t e, int64_t r, int n) {
      naive_product({x.get() + r * D,
                     gate_up.get() + e * 2 * I * D,
                     products.get() + r * 2 * I,
                     D,
                     1,
                     D,
                     1,
                     2 * I,
                     n,
                     2 * i,
                     d,
                     rounded});
    });
    NaiveSwiglu s{R, I, limit, roundings, rounded, products.get(), nullptr, h.get(), nullptr};
    naive_swiglu_kernel<<<512, 256>>>(s);
    each([&](int64_t e, int64_t r, int n) {
      const double* w = down.get() + e * D * I;
      naive_product({h.get() + r * I, w, out.get() + r * D, I, 1, I, 1, D, n, d, i, rounded});
      naive_product({dout.get() + r * D, w, dh.get() + r * I, D, 1, 1, I, I, n, i, d, rounded});
    });
    s.dh = dh.get(), s.dproducts = dproducts.get();
    naive_swiglu_kernel<<<512, 256>>>(s);
    each([&](int64_t e, int64_t r, int n) {
      const double* dp = dproducts.get() + r * 2 * I;
      naive_product({dp,
                     gate_up.get() + e * 2 * I * D,
                     dx.get() + r * D,
                     2 * I,
                     1,
                     1,
                     D,
                     D,
                     n,
                     d,
                     2 * i,
                     rounded});
      naive_product({dp,
                     x.get() + r * D,
                     dgate_up.get() + e * 2 * I * D,
                     1,
                     2 * I,
                     1,
                     D,
                     D,
                     2 * i,
                     d,
                     n,
                     rounded});
      naive_product({dout.get() + r * D,
                     h.get() + r * I,
                     ddown.get() + e * D * I,
                     1,
                     D,
                     1,
                     I,
                     I,
                     d,
                     i,
                     n,
                     rounded});
    });
    must(cudaDeviceSynchronize(), "reference");
  }
};

/// sums: squares of difference and of truth, count of values that are not finite.
template <class T>
__global__ void compare_kernel(const T* value, const double* truth, size_t count, double* sums) {
  double difference = 0, norm = 0, bad = 0;
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x) {
    double v;
    if constexpr (sizeof(T) == 2)
      v = static_cast<double>(__uint_as_float(uint32_t{value[i]} << 16));
    else
      v = value[i];
    if (!isfinite(v)) {
      bad += 1;
      continue;
    }
    difference += (v - truth[i]) * (v - truth[i]);
    norm += truth[i] * truth[i];
  }
  atomicAdd(sums, difference), atomicAdd(sums + 1, norm), atomicAdd(sums + 2, bad);
}
struct Deviation {
  double relative, not_finite;
};
template <class T>
Deviation deviation(const T* value, const DeviceArray<double>& truth) {
  DeviceArray<double> sums(3);
  sums.fill_bytes(0);
  compare_kernel<<<512, 256>>>(value, truth.get(), truth.count(), sums.get());
  const std::vector<double> s = sums.download();
  return {s[1] > 0 ? std::sqrt(s[0] / s[1]) : std::sqrt(s[0]), s[2]};
}

}  // namespace lockstep::device_test
