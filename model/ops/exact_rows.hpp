// Sums over rows, exact across blocks of rows (model/base/exact_add.hpp).
#pragma once

#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

namespace lockstep::model {

/// Two parts of an exact sum, rows `stride` apart.
struct ExactTarget {
  double *high, *low;
  int64_t stride;

  [[nodiscard]] ExactTarget at(int64_t row, int64_t column = 0) const {
    return {high + row * stride + column, low + row * stride + column, stride};
  }
};

/// to[m, n] += sum over blocks of A[rows, m]^T B[rows, n], where block i has rows [bounds[i],
/// bounds[i + 1]): one chain of fused multiply-adds per block and element, rows ascending, added
/// exactly. On the calling thread; scratch grows as needed. Returns the largest magnitude added.
float exact_product(int64_t m,
                    int64_t n,
                    std::span<const int64_t> bounds,
                    const float* a,
                    int64_t lda,
                    const float* b,
                    int64_t ldb,
                    const ExactTarget& to,
                    std::vector<float>& scratch);

/// The same on all threads, over tiles of the result.
float exact_product_parallel(int64_t m,
                             int64_t n,
                             std::span<const int64_t> bounds,
                             const float* a,
                             int64_t lda,
                             const float* b,
                             int64_t ldb,
                             const ExactTarget& to);

/// high, low [n] += rows of partial [count, n], on all threads.
float exact_merge(int64_t count, int64_t n, const float* partial, double* high, double* low);

/// End of the longest run of whole blocks from row `begin` (a bound) with at most `rows` rows; one
/// block at least.
int64_t block_run_end(std::span<const int64_t> bounds, int64_t begin, int64_t rows);

/// The bounds in [begin, end], counted from `begin`; both must be bounds.
std::vector<int64_t> blocks_between(std::span<const int64_t> bounds, int64_t begin, int64_t end);

/// Largest of magnitudes from several threads; NaN stays.
class Peak {
 public:
  void add(float magnitude);
  [[nodiscard]] float value() const;

 private:
  uint32_t bits_ = 0;
};

/// A short exact sum that many threads add to: each collects its part, then merges it.
class ExactRow {
 public:
  struct Part {
    explicit Part(int64_t count)
        : high(static_cast<size_t>(count)), low(static_cast<size_t>(count)) {}
    /// Adds the numbers at p to those from `first` on; all of them if `count` is negative.
    void add(const float* p, int64_t first = 0, int64_t count = -1);
    std::vector<double> high, low;
    Peak peak;
  };

  /// Adds go to high, low [count].
  ExactRow(double* high, double* low) : high_(high), low_(low) {}
  void merge(const Part& part);
  [[nodiscard]] float peak() const { return peak_.value(); }

 private:
  double *high_, *low_;
  std::mutex mutex_;
  Peak peak_;
};

}  // namespace lockstep::model
