#include "model/ops/exact_rows.hpp"

#include <algorithm>
#include <atomic>
#include <bit>

#include "model/base/exact_add.hpp"
#include "model/base/parallel.hpp"
#include "model/ops/chain_gemm.hpp"

namespace lockstep::model {
namespace {

// A tile's three copies (float32 partial, both parts) stay in the second-level cache.
constexpr int64_t kTileM = 48, kTileN = 192;
constexpr int64_t kMergeColumns = 256;

}  // namespace

void Peak::add(float magnitude) {
  // Magnitudes order like their bits.
  const auto bits = std::bit_cast<uint32_t>(magnitude);
  std::atomic_ref<uint32_t> shared(bits_);
  uint32_t seen = shared.load(std::memory_order_relaxed);
  while (bits > seen && !shared.compare_exchange_weak(seen, bits)) {
  }
}

float Peak::value() const { return std::bit_cast<float>(bits_); }

float exact_product(int64_t m,
                    int64_t n,
                    std::span<const int64_t> bounds,
                    const float* a,
                    int64_t lda,
                    const float* b,
                    int64_t ldb,
                    const ExactTarget& to,
                    std::vector<float>& scratch) {
  Peak peak;
  scratch.resize(static_cast<size_t>(kTileM * kTileN));
  for (int64_t i = 0; i < m; i += kTileM) {
    const int64_t rows = std::min(kTileM, m - i);
    for (int64_t j = 0; j < n; j += kTileN) {
      const int64_t columns = std::min(kTileN, n - j);
      for (size_t block = 0; block + 1 < bounds.size(); ++block) {
        const int64_t first = bounds[block], count = bounds[block + 1] - first;
        if (count == 0) continue;
        chain_gemm<float>(rows,
                          columns,
                          count,
                          {a + first * lda + i, 1, lda},
                          {b + first * ldb + j, ldb},
                          scratch.data(),
                          columns,
                          false);
        for (int64_t r = 0; r < rows; ++r) {
          const ExactTarget row = to.at(i + r, j);
          peak.add(exact_add(columns, scratch.data() + r * columns, row.high, row.low));
        }
      }
    }
  }
  return peak.value();
}

float exact_product_parallel(int64_t m,
                             int64_t n,
                             std::span<const int64_t> bounds,
                             const float* a,
                             int64_t lda,
                             const float* b,
                             int64_t ldb,
                             const ExactTarget& to) {
  const int64_t tiles_n = (n + kTileN - 1) / kTileN, tiles = (m + kTileM - 1) / kTileM * tiles_n;
  Peak peak;
  parallel_for(0, tiles, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch;
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t i = tile / tiles_n * kTileM, j = tile % tiles_n * kTileN;
      peak.add(exact_product(std::min(kTileM, m - i),
                             std::min(kTileN, n - j),
                             bounds,
                             a + i,
                             lda,
                             b + j,
                             ldb,
                             to.at(i, j),
                             scratch));
    }
  });
  return peak.value();
}

float exact_merge(int64_t count, int64_t n, const float* partial, double* high, double* low) {
  Peak peak;
  parallel_for(0, (n + kMergeColumns - 1) / kMergeColumns, 4, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kMergeColumns, last = std::min(n, end * kMergeColumns);
    for (int64_t i = 0; i < count; ++i)
      peak.add(exact_add(last - first, partial + i * n + first, high + first, low + first));
  });
  return peak.value();
}

int64_t block_run_end(std::span<const int64_t> bounds, int64_t begin, int64_t rows) {
  auto next = std::upper_bound(bounds.begin(), bounds.end(), begin);
  int64_t end = next == bounds.end() ? begin : *next;
  for (; next != bounds.end() && *next <= begin + rows; ++next) end = *next;
  return end;
}

std::vector<int64_t> blocks_between(std::span<const int64_t> bounds, int64_t begin, int64_t end) {
  std::vector<int64_t> result;
  for (auto at = std::lower_bound(bounds.begin(), bounds.end(), begin);
       at != bounds.end() && *at <= end;
       ++at) {
    if (result.empty() || *at - begin > result.back()) result.push_back(*at - begin);
  }
  return result;
}

void ExactRow::Part::add(const float* p, int64_t first, int64_t count) {
  if (count < 0) count = static_cast<int64_t>(high.size()) - first;
  peak.add(exact_add(count, p, high.data() + first, low.data() + first));
}

void ExactRow::merge(const Part& part) {
  peak_.add(part.peak.value());
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < part.high.size(); ++i) high_[i] += part.high[i];
  for (size_t i = 0; i < part.low.size(); ++i) low_[i] += part.low[i];
}

}  // namespace lockstep::model
