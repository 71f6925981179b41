#include "parallel/optim/muon.hpp"

#include <algorithm>
#include <array>

namespace lockstep::parallel {
namespace {

constexpr std::array<std::array<double, 3>, 5> kSteps = {{{4.0848, -6.8946, 2.9270},
                                                          {3.9505, -6.3029, 2.6377},
                                                          {3.7418, -5.5913, 2.3037},
                                                          {2.8769, -3.1427, 1.2046},
                                                          {2.8366, -3.0525, 1.2012}}};

}  // namespace

MuonMatrices muon_matrices(const ParamSpec& spec) {
  if (spec.shape.size() < 2 || spec.name.starts_with("embed_tokens.") ||
      spec.name.starts_with("lm_head."))
    return MuonMatrices::kNone;
  if (spec.name.ends_with("conv1d.weight")) return MuonMatrices::kRows;
  return spec.shape.size() == 2 ? MuonMatrices::kWhole : MuonMatrices::kStack;
}

Tensor orthogonalised(const Tensor& x) {
  Tensor s = x.scalar_type() == at::kDouble ? x : x.to(at::kBFloat16);
  const bool tall = s.size(-2) > s.size(-1);
  if (tall) s = s.transpose(-2, -1);
  s = s / (at::linalg_vector_norm(s, 2, {-2, -1}, /*keepdim=*/true) + 1e-8);
  for (const auto& [a, b, c] : kSteps) {
    const Tensor square = s.matmul(s.transpose(-2, -1));
    s = s * a + (square * b + square.matmul(square) * c).matmul(s);
  }
  return tall ? s.transpose(-2, -1) : s;
}

int64_t orthogonalised_bytes(int64_t elements, int64_t rows, int64_t cols, at::ScalarType dtype) {
  if (elements == 0) return 0;
  const int64_t side = std::min(rows, cols), squares = elements / (rows * cols) * side * side,
                width = dtype == at::kDouble ? 8 : 2;
  // The terms of one step: s, a s, the product and their sum; A, b A, A A, c A A and their sum.
  return width * (4 * elements + 5 * squares);
}

}  // namespace lockstep::parallel
