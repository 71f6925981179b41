// Muon: momentum of matrices, made nearly orthogonal.
#pragma once

#include "parallel/fsdp/sharded_parameters.hpp"

namespace lockstep::parallel {

/// What Muon takes a parameter for.
enum class MuonMatrices : uint8_t {
  kNone,   ///< vectors, embedding and head: AdamW's
  kRows,   ///< one row each: convolutions, a channel each
  kStack,  ///< one matrix for each of dim 0: experts, gate and up together
  kWhole,  ///< one matrix, of which a rank has some rows
};
MuonMatrices muon_matrices(const ParamSpec& spec);

/// x [..., rows, cols] with every singular value s of x / (|x| + 1e-8) moved towards 1: five steps
/// s <- a s + b s^3 + c s^5, by products of matrices alone. In float64 for float64, else in
/// bfloat16; returns that dtype.
Tensor orthogonalised(const Tensor& x);
/// Most bytes of tensors that it holds at a time beside x, which has `elements` in matrices
/// [rows, cols] of `dtype`.
int64_t orthogonalised_bytes(int64_t elements, int64_t rows, int64_t cols, at::ScalarType dtype);

}  // namespace lockstep::parallel
