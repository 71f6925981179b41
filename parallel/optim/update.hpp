// One optimizer step on contiguous elements, in float64 and without torch headers: no memory beside
// the state. T: float or double.
#pragma once

#include <cstdint>

namespace lockstep::parallel {

/// value *= shrink, then m and v move by beta1 and beta2 and are stored, and value += scale * m /
/// (sqrt(v / correct2) + eps) from what was stored.
struct AdamWStep {
  double beta1, beta2, eps;
  double clip;  ///< the gradient's factor
  double shrink, scale, correct2;
};

/// grad null: zeros. Returns how many values stayed the same.
template <typename T>
int64_t adamw_step(const AdamWStep& step, int64_t count, const T* grad, T* value, T* m, T* v);

/// value = value * shrink + scale * grad. grad null: zeros. Returns how many values stayed the
/// same.
template <typename T>
int64_t sgd_step(double shrink, double scale, int64_t count, const T* grad, T* value);

/// In ascending order.
template <typename T>
double sum_of_squares(int64_t count, const T* values);

}  // namespace lockstep::parallel
