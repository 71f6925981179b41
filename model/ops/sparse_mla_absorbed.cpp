// Absorbed form: q_h Wk_h is scored against the latent rows themselves, the weighted latent rows
// go through Wv_h. Queries are taken in runs, so that only a run's rows exist in the latent space.
// Every element is a chain that no run, block or thread boundary interrupts: results do not depend
// on any of them.
#include <type_traits>

#include "model/base/exact_add.hpp"
#include "model/ops/sparse_mla_merge.hpp"
#include "model/ops/sparse_mla_run.hpp"

namespace lockstep::model::mla {
namespace {

/// Columns of the latent that the merge of key gradients handles at a time: a run's rows of so many
/// columns should stay in the second-level cache.
constexpr int64_t kMergeColumns = 64;
constexpr int64_t kMergeBytes = 1 << 20;
constexpr int64_t kRunBytes = 16 << 20;
constexpr int64_t kMergeUses = 2048;
constexpr int64_t kExactKeys = 64;

template <typename T>
class Absorbed {
 public:
  explicit Absorbed(const Problem<T>& problem)
      : p_(problem),
        row_(p_.heads * p_.rank),
        head_rows_(p_.values_t != nullptr ? p_.d_n : p_.d_n + p_.d_v) {}

  void forward(T* o) {
    const std::vector<T> transposed =
        p_.values_t != nullptr ? std::vector<T>() : transposed_heads(p_, p_.d_n, p_.d_v);
    const T* wv_t = p_.values_t != nullptr ? p_.values_t : transposed.data();
    const int64_t step = run_length(kRunBytes / (2 * row_ * bytes()));
    std::vector<T> qa(static_cast<size_t>(step * row_)), a(qa.size());
    KeyRun run;
    for (int64_t begin = 0; begin < p_.queries; begin += step) {
      run.reset(p_, begin, std::min(p_.queries, begin + step));
      absorb_queries(run, qa.data());
      over_groups(run, [&](const Group<T>& g, int64_t first, AttendScratch<T>& scratch) {
        attend(g, qa.data() + first * row_, p_.rank, a.data() + first * row_, p_.rank, scratch);
      });
      over_heads(p_.heads, run.size(), [&](int64_t h, int64_t first, int64_t rows) {
        T* out = o + ((begin + first) * p_.heads + h) * p_.d_v;
        chain_gemm<T>(rows,
                      p_.d_v,
                      p_.rank,
                      {a.data() + first * row_ + h * p_.rank, row_},
                      {wv_t + h * p_.rank * p_.d_v, p_.d_v},
                      out,
                      p_.heads * p_.d_v,
                      false);
        round_if(out, rows, p_.d_v, p_.heads * p_.d_v);
      });
    }
  }

  void backward(const T* d_o, const Gradients<T>& gradients) {
    const std::vector<T> wk_t = transposed_heads(p_, 0, p_.d_n);
    const int64_t step =
        run_length(kMergeBytes / (2 * p_.heads * std::min(kMergeColumns, p_.rank) * bytes()));
    // Runs of whole blocks of queries may be longer than a step, by the first block.
    ExactGradients* exact = gradients.exact;
    int64_t longest = step;
    for (size_t b = 0; exact != nullptr && b + 1 < exact->bounds.size(); ++b)
      longest = std::max(longest, exact->bounds[b + 1] - exact->bounds[b]);
    std::vector<T> qa(static_cast<size_t>(longest * row_)), a(qa.size()), da(qa.size()),
        dqa(qa.size()), rows_by_column(2 * qa.size()), coefficients;
    std::vector<T*> coefficient_rows;
    KeyRun run;
    for (int64_t begin = 0, end; begin < p_.queries; begin = end) {
      end = exact != nullptr ? block_run_end(exact->bounds, begin, step)
                             : std::min(p_.queries, begin + step);
      run.reset(p_, begin, end);
      absorb_queries(run, qa.data());
      pull_back_outputs(run, d_o, da.data());
      coefficients.resize(static_cast<size_t>(run.total() * 2 * p_.heads));
      coefficient_rows.clear();
      for (int64_t i = 0, at = 0; i < run.size(); at += run.counts[i++] * 2 * p_.heads) {
        coefficient_rows.push_back(coefficients.data() + at);
      }
      over_groups(run, [&](const Group<T>& g, int64_t first, AttendScratch<T>& scratch) {
        const int64_t at = first * row_;
        attend_backward(g,
                        qa.data() + at,
                        p_.rank,
                        da.data() + at,
                        p_.rank,
                        Delta::kOutput,
                        a.data() + at,
                        p_.rank,
                        dqa.data() + at,
                        p_.rank,
                        coefficient_rows.data() + first,
                        scratch);
      });
      if (gradients.latent != nullptr || exact != nullptr)
        by_column(run, qa.data(), da.data(), rows_by_column.data());
      if (exact != nullptr) {
        const std::vector<int64_t> blocks = blocks_between(exact->bounds, begin, end);
        for (size_t b = 0; b + 1 < blocks.size(); ++b) {
          merge_block(run,
                      blocks[b],
                      blocks[b + 1],
                      coefficient_rows.data(),
                      rows_by_column.data(),
                      *exact);
        }
        exact_weight_gradients(run, blocks, d_o, a.data(), dqa.data(), *exact);
      }
      if (gradients.latent != nullptr) {
        merge(run, coefficient_rows.data(), rows_by_column.data(), gradients.latent);
      }
      over_heads(p_.heads, run.size(), [&](int64_t h, int64_t first, int64_t rows) {
        T* out = gradients.q + ((begin + first) * p_.heads + h) * p_.d_n;
        chain_gemm<T>(rows,
                      p_.d_n,
                      p_.rank,
                      {dqa.data() + first * row_ + h * p_.rank, row_},
                      {wk_t.data() + h * p_.rank * p_.d_n, p_.d_n},
                      out,
                      p_.heads * p_.d_n,
                      false);
        round_if(out, rows, p_.d_n, p_.heads * p_.d_n);
      });
      if (gradients.kv_b != nullptr) {
        weight_gradients(run, d_o, a.data(), dqa.data(), gradients.kv_b);
      }
    }
  }

 private:
  static constexpr int64_t bytes() { return static_cast<int64_t>(sizeof(T)); }

  [[nodiscard]] int64_t run_length(int64_t fitting) const {
    return std::clamp<int64_t>(
        fitting, 16, std::max<int64_t>(16, std::min<int64_t>(1024, p_.queries)));
  }

  void round_if(T* x, int64_t rows, int64_t width, int64_t stride) const {
    if (p_.rounding.act) round_rows(x, rows, width, stride);
  }

  /// qa_h = q_h Wk_h, rounded.
  void absorb_queries(const KeyRun& run, T* qa) const {
    over_heads(p_.heads, run.size(), [&](int64_t h, int64_t first, int64_t rows) {
      T* out = qa + first * row_ + h * p_.rank;
      chain_gemm<T>(rows,
                    p_.rank,
                    p_.d_n,
                    {p_.q + ((run.begin + first) * p_.heads + h) * p_.d_n, p_.heads * p_.d_n},
                    {p_.kv_b + h * head_rows_ * p_.rank, p_.rank},
                    out,
                    row_,
                    false);
      round_if(out, rows, p_.rank, row_);
    });
  }

  /// da_h = do_h Wv_h, rounded.
  void pull_back_outputs(const KeyRun& run, const T* d_o, T* da) const {
    over_heads(p_.heads, run.size(), [&](int64_t h, int64_t first, int64_t rows) {
      T* out = da + first * row_ + h * p_.rank;
      chain_gemm<T>(rows,
                    p_.rank,
                    p_.d_v,
                    {d_o + ((run.begin + first) * p_.heads + h) * p_.d_v, p_.heads * p_.d_v},
                    {p_.kv_b + (h * head_rows_ + p_.d_n) * p_.rank, p_.rank},
                    out,
                    row_,
                    false);
      round_if(out, rows, p_.rank, row_);
    });
  }

  template <typename Body>
  void over_groups(const KeyRun& run, Body body) const {
    const int64_t per_group = std::max<int64_t>(1, kGroupRows / p_.heads);
    dynamic_tasks((run.size() + per_group - 1) / per_group, [&](int64_t worker) {
      return [&, &scratch = scratch_[static_cast<size_t>(worker)]](int64_t task) {
        const int64_t last = std::min(run.size(), (task + 1) * per_group);
        for (int64_t i = task * per_group; i < last;) {
          const int64_t e = run.group_end(i, last, per_group);
          const RowTable<T> rows{p_.latent, p_.rank, p_.rank};
          body(Group<T>{e - i,
                        p_.heads,
                        run.lists[static_cast<size_t>(e - 1)],
                        run.counts + i,
                        rows,
                        rows,
                        p_.scale,
                        p_.rounding},
               i,
               scratch);
          i = e;
        }
      };
    });
  }

  /// [column block][query][qa of all heads, da of all heads][columns of the block].
  void by_column(const KeyRun& run, const T* qa, const T* da, T* out) const {
    dynamic_tasks(run.size(), [&](int64_t) {
      return [&](int64_t i) {
        for (int64_t c = 0; c < p_.rank; c += kMergeColumns) {
          const int64_t columns = std::min(kMergeColumns, p_.rank - c);
          T* at = out + c * run.size() * 2 * p_.heads + i * 2 * p_.heads * columns;
          for (const T* rows : {qa + i * row_, da + i * row_}) {
            for (int64_t h = 0; h < p_.heads; ++h, at += columns) {
              std::copy_n(rows + h * p_.rank + c, columns, at);
            }
          }
        }
      };
    });
  }

  void merge(const KeyRun& run, const T* const* coefficients, const T* rows, T* d_latent) const {
    const KeyLists lists = invert(run.lists.data(), run.counts, run.size(), p_.keys);
    // Pieces of keys with similar numbers of uses.
    std::vector<int64_t> pieces{0};
    for (int64_t k = 1; k <= lists.num_keys(); ++k) {
      const auto uses = [&](int64_t i) { return lists.begin[static_cast<size_t>(i)]; };
      if (k == lists.num_keys() || uses(k) - uses(pieces.back()) >= kMergeUses) pieces.push_back(k);
    }
    const auto num_pieces = static_cast<int64_t>(pieces.size()) - 1;
    const int64_t blocks = (p_.rank + kMergeColumns - 1) / kMergeColumns;
    dynamic_tasks(num_pieces * blocks, [&](int64_t) {
      return
          [&, packed = std::vector<T>(), row_index = std::vector<int32_t>()](int64_t task) mutable {
            const int64_t c = task / num_pieces * kMergeColumns;
            const int64_t columns = std::min(kMergeColumns, p_.rank - c);
            const auto piece = static_cast<size_t>(task % num_pieces);
            const MergeSource<T> source{coefficients,
                                        2 * p_.heads,
                                        2 * p_.heads,
                                        rows + c * run.size() * 2 * p_.heads,
                                        columns,
                                        columns};
            merge_keys(lists,
                       pieces[piece],
                       pieces[piece + 1],
                       source,
                       d_latent + c,
                       p_.rank,
                       packed,
                       row_index);
          };
    });
  }

  /// merge() over queries [first, last) of the run alone, added exactly to the keys' rows.
  void merge_block(const KeyRun& run,
                   int64_t first,
                   int64_t last,
                   T* const* coefficients,
                   const T* rows,
                   ExactGradients& exact) const {
    KeyLists lists = invert(run.lists.data() + first, run.counts + first, last - first, p_.keys);
    // Keys by their place in the list: the partial sums lie close together.
    std::vector<int32_t> keys(lists.keys.size());
    std::iota(keys.begin(), keys.end(), 0);
    keys.swap(lists.keys);
    const int64_t pieces = (lists.num_keys() + kExactKeys - 1) / kExactKeys;
    const int64_t blocks = (p_.rank + kMergeColumns - 1) / kMergeColumns;
    dynamic_tasks(pieces * blocks, [&](int64_t) {
      return [&,
              packed = std::vector<T>(),
              row_index = std::vector<int32_t>(),
              partial = std::vector<T>(static_cast<size_t>(kExactKeys * kMergeColumns))](
                 int64_t task) mutable {
        const int64_t c = task / pieces * kMergeColumns, from = task % pieces * kExactKeys;
        const int64_t columns = std::min(kMergeColumns, p_.rank - c);
        const int64_t to = std::min(lists.num_keys(), from + kExactKeys);
        const MergeSource<T> source{
            coefficients + first,
            2 * p_.heads,
            2 * p_.heads,
            rows + c * run.size() * 2 * p_.heads + first * 2 * p_.heads * columns,
            columns,
            columns};
        std::fill_n(partial.begin(), (to - from) * columns, T(0));
        merge_keys(
            lists, from, to, source, partial.data() - from * columns, columns, packed, row_index);
        if constexpr (std::is_same_v<T, float>) {
          for (int64_t i = from; i < to; ++i) {
            const ExactTarget row = exact.latent.at(keys[static_cast<size_t>(i)], c);
            exact.latent_peak.add(
                exact_add(columns, partial.data() + (i - from) * columns, row.high, row.low));
          }
        }
      };
    });
  }

  /// weight_gradients() block by block, added exactly.
  void exact_weight_gradients(const KeyRun& run,
                              const std::vector<int64_t>& blocks,
                              const T* d_o,
                              const T* a,
                              const T* dqa,
                              ExactGradients& exact) const {
    if constexpr (std::is_same_v<T, float>) {
      const auto add = [&](const T* left, int64_t dim, const T* right, int64_t row, int64_t n) {
        std::vector<float> scratch;
        exact.kv_b_peak.add(exact_product(
            n, p_.rank, blocks, left, p_.heads * dim, right, row_, exact.kv_b.at(row), scratch));
      };
      over_heads(p_.heads, p_.d_n, [&](int64_t h, int64_t first, int64_t rows) {
        add(p_.q + (run.begin * p_.heads + h) * p_.d_n + first,
            p_.d_n,
            dqa + h * p_.rank,
            h * head_rows_ + first,
            rows);
      });
      over_heads(p_.heads, p_.d_v, [&](int64_t h, int64_t first, int64_t rows) {
        add(d_o + (run.begin * p_.heads + h) * p_.d_v + first,
            p_.d_v,
            a + h * p_.rank,
            h * head_rows_ + p_.d_n + first,
            rows);
      });
    }
  }

  /// dWk_h += q_h^T dqa_h and dWv_h += do_h^T a_h over the run's queries in order.
  void weight_gradients(
      const KeyRun& run, const T* d_o, const T* a, const T* dqa, T* d_kv_b) const {
    const auto add = [&](const T* left, int64_t dim, const T* right, T* out, int64_t r, int64_t n) {
      chain_gemm<T>(n,
                    p_.rank,
                    run.size(),
                    {left + r, 1, p_.heads * dim},
                    {right, row_},
                    out + r * p_.rank,
                    p_.rank,
                    true);
    };
    over_heads(p_.heads, p_.d_n, [&](int64_t h, int64_t first, int64_t rows) {
      add(p_.q + (run.begin * p_.heads + h) * p_.d_n,
          p_.d_n,
          dqa + h * p_.rank,
          d_kv_b + h * head_rows_ * p_.rank,
          first,
          rows);
    });
    over_heads(p_.heads, p_.d_v, [&](int64_t h, int64_t first, int64_t rows) {
      add(d_o + (run.begin * p_.heads + h) * p_.d_v,
          p_.d_v,
          a + h * p_.rank,
          d_kv_b + (h * head_rows_ + p_.d_n) * p_.rank,
          first,
          rows);
    });
  }

  const Problem<T>& p_;
  mutable std::vector<AttendScratch<T>> scratch_{static_cast<size_t>(num_threads())};
  int64_t row_;        ///< elements of one query in the latent space of all heads
  int64_t head_rows_;  ///< rows of kv_b per head
};

}  // namespace

template <typename T>
void forward_absorbed(const Problem<T>& problem, T* o) {
  Absorbed<T>(problem).forward(o);
}

template <typename T>
void backward_absorbed(const Problem<T>& problem, const T* d_o, const Gradients<T>& gradients) {
  Absorbed<T>(problem).backward(d_o, gradients);
}

template void forward_absorbed<float>(const Problem<float>&, float*);
template void forward_absorbed<double>(const Problem<double>&, double*);
template void backward_absorbed<float>(const Problem<float>&,
                                       const float*,
                                       const Gradients<float>&);
template void backward_absorbed<double>(const Problem<double>&,
                                        const double*,
                                        const Gradients<double>&);

}  // namespace lockstep::model::mla
