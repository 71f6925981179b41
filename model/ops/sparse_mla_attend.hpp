// Attention of a few query rows over one list of keys, forward and backward, on raw pointers. T is
// float or double; float may carry bfloat16 roundings.
#pragma once

#include <cstdint>
#include <vector>

namespace lockstep::model::mla {

/// How probabilities enter the product with the values.
enum class Probabilities : uint8_t {
  kPlain,         ///< exp(s - max), divided by the row's sum afterwards
  kUnnormalised,  ///< bfloat16 of exp(s - max), divided by the unrounded sum afterwards
  kNormalised,    ///< bfloat16 of exp(s - max) / sum
};

struct Rounding {
  bool act = false;     ///< results and gradients are rounded to bfloat16
  bool scores = false;  ///< the score product and its scaling are rounded to bfloat16
  Probabilities probabilities = Probabilities::kPlain;
};

/// Rows of keys or values: row j at data + j * stride.
template <typename T>
struct RowTable {
  const T* data;
  int64_t stride, dim;
};

/// Consecutive queries whose key lists are prefixes of the last one's, each with `heads` rows that
/// share keys and values. Row (i, h) of a matrix is at base + (i * heads + h) * stride.
template <typename T>
struct Group {
  int64_t num_queries, heads;
  const int32_t* keys;    ///< the longest list
  const int64_t* counts;  ///< valid entries of each query, not decreasing
  RowTable<T> key_rows, value_rows;
  T scale;
  Rounding rounding;

  [[nodiscard]] int64_t rows() const { return num_queries * heads; }
  [[nodiscard]] int64_t longest() const { return counts[num_queries - 1]; }
};

/// Buffers of one thread.
template <typename T>
struct AttendScratch {
  std::vector<T> tile, exponentials, probabilities, gradients, sums;
};

/// out[row] = sum_j P_j v_j, rounded if act; 0 for a row without keys. The softmax subtracts the
/// row's maximum. Sums over keys run in list order, dots over the dimension in order, so that a
/// row's bits depend on its own list alone.
template <typename T>
void attend(const Group<T>& group,
            const T* q,
            int64_t q_stride,
            T* out,
            int64_t out_stride,
            AttendScratch<T>& scratch);

/// Where the backward pass takes sum_j P_j dP_j from.
enum class Delta : uint8_t {
  kOutput,  ///< d_out . out, with out recomputed (and returned)
  kSum,     ///< the sum itself, dP rounded to bfloat16 first if act
};

/// Gradients of one group; the probabilities are recomputed. d_q[row] = sum_j dS_j k_j (rounded if
/// act); coefficients of query i: [count][2 * heads], entry (j, h) = dS, (j, heads + h) = P,
/// rounded to bfloat16 if act. With kOutput, out receives the forward's rows.
template <typename T>
void attend_backward(const Group<T>& group,
                     const T* q,
                     int64_t q_stride,
                     const T* d_out,
                     int64_t d_out_stride,
                     Delta delta,
                     T* out,
                     int64_t out_stride,
                     T* d_q,
                     int64_t d_q_stride,
                     T* const* coefficients,
                     AttendScratch<T>& scratch);

/// In place: nearest bfloat16 of every element (float only).
void round_rows(float* x, int64_t rows, int64_t width, int64_t stride);
void round_rows(double* x, int64_t rows, int64_t width, int64_t stride);

}  // namespace lockstep::model::mla
