// Parts shared by the absorbed and the expanded form: runs of queries, their key lists, groups.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "model/ops/chain_gemm.hpp"
#include "model/ops/dynamic_tasks.hpp"
#include "model/ops/sparse_mla_kernel.hpp"

namespace lockstep::model::mla {

/// Rows of a product computed by one task.
inline constexpr int64_t kRowBlock = 64;
/// Rows (queries times heads that share keys) worth computing together.
inline constexpr int64_t kGroupRows = 64;

/// Key lists of a run of consecutive queries, without the -1 entries: the selection's own row where
/// those come last, a copy elsewhere.
struct KeyRun {
  int64_t begin = 0, end = 0;
  std::vector<const int32_t*> lists;
  const int64_t* counts = nullptr;  ///< of the run's first query

  [[nodiscard]] int64_t size() const { return end - begin; }
  [[nodiscard]] int64_t total() const {
    return std::accumulate(counts, counts + size(), int64_t{0});
  }

  template <typename T>
  void reset(const Problem<T>& p, int64_t first, int64_t last) {
    begin = first;
    end = last;
    counts = p.counts + first;
    lists.clear();
    int64_t copied = 0;
    for (int64_t i = 0; i < size(); ++i) {
      const int32_t* row = p.selection + (first + i) * p.width;
      int32_t signs = 0;
      for (int64_t j = 0; j < counts[i]; ++j) signs |= row[j];
      lists.push_back(signs >= 0 ? row : nullptr);
      copied += signs >= 0 ? 0 : counts[i];
    }
    copies_.resize(static_cast<size_t>(copied));
    int32_t* at = copies_.data();
    for (int64_t i = 0; i < size(); ++i) {
      const int32_t*& list = lists[static_cast<size_t>(i)];
      if (list != nullptr) continue;
      list = at;
      const int32_t* row = p.selection + (first + i) * p.width;
      for (const int32_t* const list_end = at + counts[i]; at != list_end; ++row) {
        if (*row >= 0) *at++ = *row;
      }
    }
  }

  /// End of the group that starts at query i of the run: lists that are prefixes of the next one,
  /// of similar length.
  [[nodiscard]] int64_t group_end(int64_t i, int64_t last, int64_t max_queries) const {
    int64_t e = i + 1;
    for (; e < last && e - i < max_queries; ++e) {
      const int64_t n = counts[e - 1];
      if (counts[e] < n || counts[e] > counts[i] + counts[i] / 4 + 16) break;
      const int32_t *a = lists[static_cast<size_t>(e - 1)], *b = lists[static_cast<size_t>(e)];
      if (n == 0) continue;
      if (a[n - 1] != b[n - 1]) break;
      if (std::memcmp(a, b, static_cast<size_t>(n) * sizeof(int32_t)) != 0) break;
    }
    return e;
  }

 private:
  std::vector<int32_t> copies_;
};

/// body(h, first, rows) over heads and blocks of rows.
template <typename Body>
void over_heads(int64_t heads, int64_t rows, Body body) {
  const int64_t blocks = (rows + kRowBlock - 1) / kRowBlock;
  dynamic_tasks(heads * blocks, [&](int64_t) {
    return [&](int64_t task) {
      const int64_t first = task % blocks * kRowBlock;
      body(task / blocks, first, std::min(kRowBlock, rows - first));
    };
  });
}

/// chain_gemm in parallel over blocks of C.
template <typename T>
void parallel_chain(int64_t m,
                    int64_t n,
                    int64_t k,
                    const ChainA<T>& a,
                    const ChainB<T>& b,
                    T* c,
                    int64_t ldc,
                    bool accumulate) {
  constexpr int64_t kColumns = 192;
  const int64_t column_blocks = (n + kColumns - 1) / kColumns;
  dynamic_tasks((m + kRowBlock - 1) / kRowBlock * column_blocks, [&](int64_t) {
    return [&](int64_t task) {
      const int64_t i = task / column_blocks * kRowBlock, j = task % column_blocks * kColumns;
      chain_gemm<T>(std::min(kRowBlock, m - i),
                    std::min(kColumns, n - j),
                    k,
                    {a.data + i * a.row_stride, a.row_stride, a.k_stride},
                    {b.data + j, b.row_stride, b.rows},
                    c + i * ldc + j,
                    ldc,
                    accumulate);
    };
  });
}

/// rows [first, first + count) of each head's part of kv_b as columns: out [heads][rank][count].
template <typename T>
std::vector<T> transposed_heads(const Problem<T>& p, int64_t first, int64_t count) {
  std::vector<T> out(static_cast<size_t>(p.heads * p.rank * count));
  dynamic_tasks(p.heads, [&](int64_t) {
    return [&](int64_t h) {
      gather_transposed<T>(p.kv_b + (h * (p.d_n + p.d_v) + first) * p.rank,
                           p.rank,
                           nullptr,
                           count,
                           p.rank,
                           out.data() + h * p.rank * count,
                           count);
    };
  });
  return out;
}

}  // namespace lockstep::model::mla
