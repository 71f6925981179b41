// Inputs and comparisons shared by the tests of KDA, convolution and norms.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "model/base/same_bytes.hpp"
#include "model/base/seeded.hpp"
#include "model/config/numerics.hpp"

namespace lockstep::model::test {

/// Value i of the stream: sin(step (i + 1)), float64, row-major.
inline Tensor wave(at::IntArrayRef sizes, double step) {
  Tensor t = at::empty(sizes, at::kDouble);
  for (int64_t i = 0; i < t.numel(); ++i) {
    t.data_ptr<double>()[i] = std::sin(step * static_cast<double>(i + 1));
  }
  return t;
}

/// Uniform in [-scale, scale), exact in float32.
inline Tensor seeded(at::IntArrayRef sizes, std::string_view name, double scale = 1) {
  int64_t count = 1;
  for (const int64_t s : sizes) count *= s;
  const std::vector<float> values = seeded_uniform(7, name, count);
  Tensor t = at::empty(sizes, at::kDouble);
  for (int64_t i = 0; i < count; ++i) {
    t.data_ptr<double>()[i] = scale * static_cast<double>(values[static_cast<size_t>(i)]);
  }
  return t;
}

/// A new leaf of the given dtype that wants a gradient.
inline Tensor leaf(const Tensor& t, at::ScalarType dtype) {
  return t.defined() ? t.detach().to(dtype).clone().set_requires_grad(true) : t;
}

inline double max_abs(const Tensor& a, const Tensor& b) {
  if (a.numel() == 0) return 0;
  return (a.detach().to(at::kDouble) - b.detach().to(at::kDouble)).abs().max().item<double>();
}

/// |a - b| / |b|, Euclidean; |a| when b is zero.
inline double rel_l2(const Tensor& a, const Tensor& b) {
  if (a.numel() == 0) return 0;
  const Tensor wide_a = a.detach().to(at::kDouble), wide_b = b.detach().to(at::kDouble);
  const double norm = wide_b.norm().item<double>();
  const double difference = (wide_a - wide_b).norm().item<double>();
  return norm > 0 ? difference / norm : difference;
}

/// {0, l0, l0 + l1, ...}
inline std::vector<int64_t> boundaries(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> cu = {0};
  for (const int64_t l : lengths) cu.push_back(cu.back() + l);
  return cu;
}

inline std::string numbers(double a, double b) {
  return fmt::format("max abs {}, rel L2 {}", a, b);
}

#define EXPECT_CLOSE(got, want, rel_bound)      \
  EXPECT_LE(rel_l2((got), (want)), (rel_bound)) \
      << #got << ": max abs " << max_abs((got), (want)) << ", shape " << (want).sizes()

}  // namespace lockstep::model::test
