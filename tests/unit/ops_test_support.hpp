// For tests of operators: seeded tensors, distances, and gradients of every input of a function.
#pragma once

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <string>
#include <vector>

#include "model/base/same_bytes.hpp"
#include "model/base/seeded.hpp"
#include "model/base/torch.hpp"
#include "model/config/numerics.hpp"

namespace lockstep::model::test {

/// w(n, a)_i = sin(a (i + 1)), float64.
inline Tensor sine(at::IntArrayRef sizes, double a) {
  Tensor t = at::empty(sizes, at::kDouble);
  for (int64_t i = 0; i < t.numel(); ++i) {
    t.data_ptr<double>()[i] = std::sin(a * static_cast<double>(i + 1));
  }
  return t;
}

/// Roughly normal values (sum of three uniforms, variance 1) times `std`, by name; float64.
inline Tensor random(const std::string& name, at::IntArrayRef sizes, double std = 1.0) {
  Tensor t = at::empty(sizes, at::kDouble);
  const std::vector<float> u = seeded_uniform(17, name, 3 * t.numel());
  for (int64_t i = 0; i < t.numel(); ++i) {
    const auto at = static_cast<size_t>(3 * i);
    t.data_ptr<double>()[i] = std * (static_cast<double>(u[at]) + static_cast<double>(u[at + 1]) +
                                     static_cast<double>(u[at + 2]));
  }
  return t;
}

inline double max_abs(const Tensor& a, const Tensor& b) {
  if (a.numel() == 0) return 0;
  return (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
}

/// Norm of the difference over the norm of `want`; 0 for two zeros.
inline double rel_l2(const Tensor& got, const Tensor& want) {
  EXPECT_EQ(got.sizes(), want.sizes());
  const Tensor w = want.detach().to(at::kDouble);
  const double d = (got.detach().to(at::kDouble) - w).norm().item<double>();
  const double n = w.norm().item<double>();
  return d == 0 ? 0 : d / n;
}

using TensorFunction = std::function<std::vector<Tensor>(const std::vector<Tensor>&)>;

struct Evaluated {
  std::vector<Tensor> outputs, gradients;
};

/// Outputs of f, and the gradient of sum_k <output_k, fixed random weights_k> for every floating
/// input. The weights have the outputs' dtypes, so that a bf16 output receives a bf16 gradient.
inline Evaluated evaluate(const TensorFunction& f, const std::vector<Tensor>& inputs) {
  std::vector<Tensor> leaves, wanted;
  for (const Tensor& t : inputs) {
    leaves.push_back(t.defined() ? t.detach().clone() : t);
    if (t.defined() && t.is_floating_point()) {
      leaves.back().requires_grad_(true);
      wanted.push_back(leaves.back());
    }
  }
  std::vector<Tensor> before;
  for (const Tensor& t : leaves) before.push_back(t.defined() ? t.detach().clone() : t);
  Evaluated result;
  result.outputs = f(leaves);
  std::vector<Tensor> roots, seeds;
  for (size_t k = 0; k < result.outputs.size(); ++k) {
    const Tensor& out = result.outputs[k];
    if (!out.requires_grad()) continue;
    roots.push_back(out);
    seeds.push_back(random("seed" + std::to_string(k), out.sizes()).to(out.scalar_type()));
  }
  result.gradients = torch::autograd::grad(roots, wanted, seeds, false, false, true);
  for (size_t i = 0; i < leaves.size(); ++i) {
    if (!leaves[i].defined()) continue;
    EXPECT_TRUE(same_bytes(leaves[i], before[i])) << "input " << i << " was written to";
  }
  return result;
}

/// Relative L2 of every output and gradient within the bounds.
inline void expect_close(const Evaluated& got,
                         const Evaluated& want,
                         double output_bound,
                         double gradient_bound,
                         const std::string& what) {
  ASSERT_EQ(got.outputs.size(), want.outputs.size());
  ASSERT_EQ(got.gradients.size(), want.gradients.size());
  for (size_t i = 0; i < got.outputs.size(); ++i) {
    EXPECT_EQ(got.outputs[i].scalar_type(), want.outputs[i].scalar_type()) << what << i;
    EXPECT_LE(rel_l2(got.outputs[i], want.outputs[i]), output_bound) << what << ": output " << i;
  }
  for (size_t i = 0; i < got.gradients.size(); ++i) {
    ASSERT_EQ(got.gradients[i].defined(), want.gradients[i].defined())
        << what << ": gradient " << i;
    if (!got.gradients[i].defined()) continue;
    EXPECT_EQ(got.gradients[i].scalar_type(), want.gradients[i].scalar_type())
        << what << ": gradient " << i;
    EXPECT_LE(rel_l2(got.gradients[i], want.gradients[i]), gradient_bound)
        << what << ": gradient " << i;
  }
}

/// Byte equality of everything.
inline void expect_same(const Evaluated& a, const Evaluated& b, const std::string& what) {
  for (size_t i = 0; i < a.outputs.size(); ++i) {
    EXPECT_TRUE(same_bytes(a.outputs[i], b.outputs[i])) << what << ": output " << i;
  }
  for (size_t i = 0; i < a.gradients.size(); ++i) {
    EXPECT_TRUE(same_bytes(a.gradients[i], b.gradients[i])) << what << ": gradient " << i;
  }
}

/// Runs f with one thread, then restores.
template <typename F>
auto on_one_thread(F&& f) {
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  auto result = f();
  at::set_num_threads(before);
  return result;
}

/// The policy with switches set, e.g. with("hf-bf16", {{"D09", "1"}}).
inline Numerics with(std::string_view policy,
                     const std::vector<std::pair<std::string, std::string>>& switches) {
  Numerics num = Numerics::policy(policy);
  for (const auto& [id, value] : switches) num.set(id, value);
  return num;
}

}  // namespace lockstep::model::test
