// Sparse MLA on raw pointers, without torch headers. T is float (which may carry bfloat16
// roundings) or double.
#pragma once

#include <cstdint>

#include "model/ops/exact_rows.hpp"
#include "model/ops/sparse_mla_attend.hpp"

namespace lockstep::model::mla {

template <typename T>
struct Problem {
  int64_t queries, keys, width, heads, d_n, d_v, rank;
  const T* q;                ///< [queries, heads, d_n]
  const T* latent;           ///< [keys, rank]
  const T* kv_b;             ///< [heads, d_n + d_v, rank]
  const int32_t* selection;  ///< [queries, width], -1 unused; checked by the caller
  const int64_t* counts;     ///< [queries] entries that are not -1
  T scale;
  Rounding rounding;
  /// Absorbed forward only: [heads, rank, d_v] when the value rows are kept apart and transposed;
  /// kv_b is then [heads, d_n, rank].
  const T* values_t = nullptr;
};

/// Where gradients of latent and kv_b go exactly, one chain per block of queries.
struct ExactGradients {
  std::span<const int64_t> bounds;
  ExactTarget latent, kv_b;
  Peak latent_peak, kv_b_peak;
};

template <typename T>
struct Gradients {
  T* q;       ///< like Problem::q, rounded if act
  T* latent;  ///< [keys, rank], zero on entry, not rounded; null: not wanted
  T* kv_b;    ///< like Problem::kv_b, zero on entry, not rounded; null: not wanted
  ExactGradients* exact = nullptr;  ///< instead of latent and kv_b (absorbed form, float)
};

/// Queries are brought into the latent space, which serves as keys and values. o [queries, heads,
/// d_v].
template <typename T>
void forward_absorbed(const Problem<T>& problem, T* o);
template <typename T>
void backward_absorbed(const Problem<T>& problem, const T* d_o, const Gradients<T>& gradients);

/// Keys and values of every head are made from the latent first.
template <typename T>
void forward_expanded(const Problem<T>& problem, T* o);
template <typename T>
void backward_expanded(const Problem<T>& problem, const T* d_o, const Gradients<T>& gradients);

}  // namespace lockstep::model::mla
