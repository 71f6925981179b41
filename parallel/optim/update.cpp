#include "parallel/optim/update.hpp"

#include <atomic>
#include <cmath>

#include "model/base/parallel.hpp"

namespace lockstep::parallel {
namespace {

constexpr int64_t kGrain = 1 << 14;

}  // namespace

template <typename T>
int64_t adamw_step(const AdamWStep& step, int64_t count, const T* grad, T* value, T* m, T* v) {
  std::atomic<int64_t> unchanged{0};
  parallel_for(0, count, kGrain, [&](int64_t begin, int64_t end) {
    int64_t same = 0;
    for (int64_t i = begin; i < end; ++i) {
      const double g = grad == nullptr ? 0.0 : static_cast<double>(grad[i]) * step.clip;
      m[i] = static_cast<T>(static_cast<double>(m[i]) * step.beta1 + g * (1 - step.beta1));
      v[i] = static_cast<T>(static_cast<double>(v[i]) * step.beta2 + g * g * (1 - step.beta2));
      const double size = std::sqrt(static_cast<double>(v[i]) / step.correct2) + step.eps;
      const T moved = static_cast<T>(static_cast<double>(value[i]) * step.shrink +
                                     step.scale * (static_cast<double>(m[i]) / size));
      same += moved == value[i] ? 1 : 0;
      value[i] = moved;
    }
    unchanged += same;
  });
  return unchanged;
}

template <typename T>
int64_t sgd_step(double shrink, double scale, int64_t count, const T* grad, T* value) {
  std::atomic<int64_t> unchanged{0};
  parallel_for(0, count, kGrain, [&](int64_t begin, int64_t end) {
    int64_t same = 0;
    for (int64_t i = begin; i < end; ++i) {
      const double g = grad == nullptr ? 0.0 : static_cast<double>(grad[i]);
      const T moved = static_cast<T>(static_cast<double>(value[i]) * shrink + scale * g);
      same += moved == value[i] ? 1 : 0;
      value[i] = moved;
    }
    unchanged += same;
  });
  return unchanged;
}

template <typename T>
double sum_of_squares(int64_t count, const T* values) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i)
    sum += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  return sum;
}

#define LOCKSTEP_UPDATE(T)                                                         \
  template int64_t adamw_step<T>(const AdamWStep&, int64_t, const T*, T*, T*, T*); \
  template int64_t sgd_step<T>(double, double, int64_t, const T*, T*);             \
  template double sum_of_squares<T>(int64_t, const T*);
LOCKSTEP_UPDATE(float)
LOCKSTEP_UPDATE(double)
#undef LOCKSTEP_UPDATE

}  // namespace lockstep::parallel
