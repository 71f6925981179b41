// Gradients of shared keys: the transpose of a selection, and the sum over it in query order.
#pragma once

#include <cstdint>
#include <vector>

namespace lockstep::model::mla {

/// For each key that some query of a run selected, its (query, position in the query's list)
/// pairs, queries ascending. Keys ascending.
struct KeyLists {
  struct Use {
    int32_t query, position;
  };
  std::vector<int32_t> keys;
  std::vector<int64_t> begin;  ///< uses of keys[i] are [begin[i], begin[i + 1])
  std::vector<Use> uses;

  [[nodiscard]] int64_t num_keys() const { return static_cast<int64_t>(keys.size()); }
};

/// lists[i] holds counts[i] keys in [0, num_keys). A key named twice by a query has two uses.
KeyLists invert(const int32_t* const* lists,
                const int64_t* counts,
                int64_t num_queries,
                int64_t num_keys);

/// One term of the sum for a key: coefficient rows times query rows.
template <typename T>
struct MergeSource {
  /// Coefficients of query i: coefficients[i] + position * stride, `width` of them.
  const T* const* coefficients;
  int64_t stride, width;
  /// Row (i, w) at rows + (i * width + w) * row_stride, `columns` wide.
  const T* rows;
  int64_t row_stride, columns;
};

/// d_keys[key] (row stride ld) += sum over uses, queries ascending, and w ascending, of coefficient
/// (w) times row (query, w): one chain per element that continues the value found there. Splitting
/// a row of queries into runs, keys [first, last) of `lists` into calls, or columns into calls
/// therefore changes no bit.
template <typename T>
void merge_keys(const KeyLists& lists,
                int64_t first,
                int64_t last,
                const MergeSource<T>& source,
                T* d_keys,
                int64_t ld,
                std::vector<T>& packed,
                std::vector<int32_t>& row_index);

}  // namespace lockstep::model::mla
