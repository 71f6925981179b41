#include "model/ops/sparse_mla_merge.hpp"

#include <algorithm>

#include "model/ops/chain_gemm.hpp"

namespace lockstep::model::mla {
namespace {

/// Neighbouring keys computed together.
constexpr int64_t kMaxKeys = 8;
/// From so many terms per use on, a product per query is long enough that nothing is packed.
constexpr int64_t kDirectWidth = 32;

}  // namespace

KeyLists invert(const int32_t* const* lists,
                const int64_t* counts,
                int64_t num_queries,
                int64_t num_keys) {
  int32_t lowest = static_cast<int32_t>(num_keys), highest = -1;
  for (int64_t i = 0; i < num_queries; ++i) {
    for (int64_t p = 0; p < counts[i]; ++p) {
      lowest = std::min(lowest, lists[i][p]);
      highest = std::max(highest, lists[i][p]);
    }
  }
  KeyLists result;
  result.begin.push_back(0);
  if (highest < lowest) return result;
  std::vector<int64_t> next(static_cast<size_t>(highest - lowest) + 1, 0);
  for (int64_t i = 0; i < num_queries; ++i) {
    for (int64_t p = 0; p < counts[i]; ++p) ++next[static_cast<size_t>(lists[i][p] - lowest)];
  }
  int64_t total = 0;
  for (size_t k = 0; k < next.size(); ++k) {
    const int64_t uses = next[k];
    next[k] = total;
    if (uses == 0) continue;
    total += uses;
    result.keys.push_back(lowest + static_cast<int32_t>(k));
    result.begin.push_back(total);
  }
  result.uses.resize(static_cast<size_t>(total));
  for (int64_t i = 0; i < num_queries; ++i) {
    for (int64_t p = 0; p < counts[i]; ++p) {
      int64_t& at = next[static_cast<size_t>(lists[i][p] - lowest)];
      result.uses[static_cast<size_t>(at++)] = {static_cast<int32_t>(i), static_cast<int32_t>(p)};
    }
  }
  return result;
}

namespace {

/// Queries that use any of a few keys. A query that names a key twice keeps both entries.
void unite(const std::vector<int32_t>& a,
           const KeyLists::Use* b,
           int64_t count,
           std::vector<int32_t>& out) {
  out.clear();
  size_t i = 0;
  for (int64_t j = 0; j < count || i < a.size();) {
    if (j == count || (i < a.size() && a[i] < b[j].query)) {
      out.push_back(a[i++]);
    } else if (i == a.size() || b[j].query < a[i]) {
      out.push_back(b[j++].query);
    } else {
      out.push_back(a[i++]);
      ++j;
    }
  }
}

/// Adds the uses of `keys` neighbouring keys query by query, straight from the coefficients: keys
/// whose positions in a query's list follow each other (a pool) form one product.
template <typename T>
void add_directly(const KeyLists::Use* const* uses,
                  const int64_t* lengths,
                  int64_t keys,
                  const std::vector<int32_t>& queries,
                  const MergeSource<T>& source,
                  T* d_keys,
                  int64_t ld) {
  int64_t next[kMaxKeys] = {};
  for (const int32_t query : queries) {
    const T* rows = source.rows + query * source.width * source.row_stride;
    for (int64_t i = 0; i < keys;) {
      const auto used = [&](int64_t k) {
        return next[k] < lengths[k] && uses[k][next[k]].query == query;
      };
      if (!used(i)) {
        ++i;
        continue;
      }
      const int32_t position = uses[i][next[i]++].position;
      int64_t e = i + 1;
      while (e < keys && used(e) && uses[e][next[e]].position == position + (e - i)) ++next[e++];
      chain_gemm<T>(e - i,
                    source.columns,
                    source.width,
                    {source.coefficients[query] + position * source.stride, source.stride},
                    {rows, source.row_stride},
                    d_keys + i * ld,
                    ld,
                    true);
      i = e;
    }
  }
}

}  // namespace

template <typename T>
void merge_keys(const KeyLists& lists,
                int64_t first,
                int64_t last,
                const MergeSource<T>& source,
                T* d_keys,
                int64_t ld,
                std::vector<T>& packed,
                std::vector<int32_t>& row_index) {
  std::vector<int32_t> queries, wider;
  const auto uses_of = [&](int64_t k) {
    return lists.uses.data() + lists.begin[static_cast<size_t>(k)];
  };
  const auto length_of = [&](int64_t k) {
    return lists.begin[static_cast<size_t>(k) + 1] - lists.begin[static_cast<size_t>(k)];
  };
  for (int64_t k = first; k < last;) {
    // Keys next to each other that mostly the same queries use (a pool) share the loads of those
    // queries' rows; missing uses get the coefficient zero, which leaves a chain as it is.
    const int32_t key = lists.keys[static_cast<size_t>(k)];
    int64_t keys = 1, total = length_of(k);
    queries.clear();
    for (int64_t u = 0; u < total; ++u) queries.push_back(uses_of(k)[u].query);
    while (keys < kMaxKeys && k + keys < last &&
           lists.keys[static_cast<size_t>(k + keys)] == key + keys) {
      unite(queries, uses_of(k + keys), length_of(k + keys), wider);
      const auto padded = static_cast<int64_t>(wider.size()) * (keys + 1);
      if (padded * 10 > (total + length_of(k + keys)) * 13) break;
      total += length_of(k + keys);
      ++keys;
      queries.swap(wider);
    }
    if (source.width >= kDirectWidth) {
      const KeyLists::Use* uses[kMaxKeys];
      int64_t lengths[kMaxKeys];
      for (int64_t i = 0; i < keys; ++i) {
        uses[i] = uses_of(k + i);
        lengths[i] = length_of(k + i);
      }
      add_directly(uses, lengths, keys, queries, source, d_keys + key * ld, ld);
      k += keys;
      continue;
    }
    const int64_t width = source.width, depth = static_cast<int64_t>(queries.size()) * width;
    packed.resize(static_cast<size_t>(keys * depth));
    row_index.resize(static_cast<size_t>(depth));
    for (int64_t i = 0; i < keys; ++i) {
      const KeyLists::Use* use = uses_of(k + i);
      const KeyLists::Use* const end = use + length_of(k + i);
      T* out = packed.data() + i * depth;
      for (const int32_t query : queries) {
        if (use != end && use->query == query) {
          std::copy_n(source.coefficients[query] + use->position * source.stride, width, out);
          ++use;
        } else {
          std::fill_n(out, width, T(0));
        }
        out += width;
      }
    }
    for (size_t u = 0; u < queries.size(); ++u) {
      for (int64_t w = 0; w < width; ++w) {
        row_index[u * static_cast<size_t>(width) + static_cast<size_t>(w)] =
            static_cast<int32_t>(queries[u] * width + w);
      }
    }
    chain_gemm<T>(keys,
                  source.columns,
                  depth,
                  {packed.data(), depth},
                  {source.rows, source.row_stride, row_index.data()},
                  d_keys + key * ld,
                  ld,
                  true);
    k += keys;
  }
}

template void merge_keys<float>(const KeyLists&,
                                int64_t,
                                int64_t,
                                const MergeSource<float>&,
                                float*,
                                int64_t,
                                std::vector<float>&,
                                std::vector<int32_t>&);
template void merge_keys<double>(const KeyLists&,
                                 int64_t,
                                 int64_t,
                                 const MergeSource<double>&,
                                 double*,
                                 int64_t,
                                 std::vector<double>&,
                                 std::vector<int32_t>&);

}  // namespace lockstep::model::mla
