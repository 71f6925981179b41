// Expanded form: every head's keys and values are made from the latent first, [keys, heads, d_n +
// d_v], rounded; a head's queries then attend to that head's rows.
#include "model/ops/sparse_mla_merge.hpp"
#include "model/ops/sparse_mla_run.hpp"

namespace lockstep::model::mla {
namespace {

constexpr int64_t kRunQueries = 256;
constexpr int64_t kGroupQueries = 16;
constexpr int64_t kMergeKeys = 64;

template <typename T>
class Expanded {
 public:
  explicit Expanded(const Problem<T>& problem)
      : p_(problem), head_rows_(p_.d_n + p_.d_v), row_(p_.heads * head_rows_) {
    kv_.resize(static_cast<size_t>(p_.keys * row_));
    std::vector<T> kv_b_t(static_cast<size_t>(p_.rank * row_));
    gather_transposed<T>(p_.kv_b, p_.rank, nullptr, row_, p_.rank, kv_b_t.data(), row_);
    parallel_chain<T>(p_.keys,
                      row_,
                      p_.rank,
                      {p_.latent, p_.rank},
                      {kv_b_t.data(), row_},
                      kv_.data(),
                      row_,
                      false);
    if (p_.rounding.act) round_rows(kv_.data(), p_.keys, row_, row_);
  }

  void forward(T* o) {
    KeyRun run;
    for (int64_t begin = 0; begin < p_.queries; begin += kRunQueries) {
      run.reset(p_, begin, std::min(p_.queries, begin + kRunQueries));
      over_groups(run, [&](const Group<T>& g, int64_t h, int64_t first, AttendScratch<T>& scratch) {
        const int64_t at = (begin + first) * p_.heads + h;
        attend(
            g, p_.q + at * p_.d_n, p_.heads * p_.d_n, o + at * p_.d_v, p_.heads * p_.d_v, scratch);
      });
    }
  }

  void backward(const T* d_o, const Gradients<T>& gradients) {
    std::vector<T> d_kv(kv_.size(), T(0)), coefficients;
    std::vector<T*> coefficient_rows;
    KeyRun run;
    for (int64_t begin = 0; begin < p_.queries; begin += kRunQueries) {
      run.reset(p_, begin, std::min(p_.queries, begin + kRunQueries));
      // [head][query][position][dS, P]
      const auto head_size = run.total() * 2;
      coefficients.resize(static_cast<size_t>(p_.heads * head_size));
      coefficient_rows.clear();
      for (int64_t h = 0; h < p_.heads; ++h) {
        for (int64_t i = 0, at = h * head_size; i < run.size(); at += 2 * run.counts[i++]) {
          coefficient_rows.push_back(coefficients.data() + at);
        }
      }
      over_groups(run, [&](const Group<T>& g, int64_t h, int64_t first, AttendScratch<T>& scratch) {
        const int64_t at = (begin + first) * p_.heads + h;
        attend_backward(g,
                        p_.q + at * p_.d_n,
                        p_.heads * p_.d_n,
                        d_o + at * p_.d_v,
                        p_.heads * p_.d_v,
                        Delta::kSum,
                        static_cast<T*>(nullptr),
                        0,
                        gradients.q + at * p_.d_n,
                        p_.heads * p_.d_n,
                        coefficient_rows.data() + h * run.size() + first,
                        scratch);
      });
      if (gradients.latent != nullptr || gradients.kv_b != nullptr) {
        merge(run, d_o, coefficient_rows.data(), d_kv.data());
      }
    }
    if (p_.rounding.act) round_rows(d_kv.data(), p_.keys, row_, row_);
    if (gradients.latent != nullptr) {
      parallel_chain<T>(p_.keys,
                        p_.rank,
                        row_,
                        {d_kv.data(), row_},
                        {p_.kv_b, p_.rank},
                        gradients.latent,
                        p_.rank,
                        false);
    }
    if (gradients.kv_b != nullptr) {
      parallel_chain<T>(row_,
                        p_.rank,
                        p_.keys,
                        {d_kv.data(), 1, row_},
                        {p_.latent, p_.rank},
                        gradients.kv_b,
                        p_.rank,
                        false);
    }
  }

 private:
  template <typename Body>
  void over_groups(const KeyRun& run, Body body) const {
    const int64_t blocks = (run.size() + kGroupQueries - 1) / kGroupQueries;
    dynamic_tasks(blocks * p_.heads, [&](int64_t worker) {
      return [&, &scratch = scratch_[static_cast<size_t>(worker)]](int64_t task) {
        const int64_t h = task % p_.heads, block = task / p_.heads;
        const int64_t last = std::min(run.size(), (block + 1) * kGroupQueries);
        const T* head = kv_.data() + h * head_rows_;
        for (int64_t i = block * kGroupQueries; i < last;) {
          const int64_t e = run.group_end(i, last, kGroupQueries);
          body(Group<T>{e - i,
                        1,
                        run.lists[static_cast<size_t>(e - 1)],
                        run.counts + i,
                        {head, row_, p_.d_n},
                        {head + p_.d_n, row_, p_.d_v},
                        p_.scale,
                        p_.rounding},
               h,
               i,
               scratch);
          i = e;
        }
      };
    });
  }

  /// dK_h += dS^T q_h and dV_h += P^T do_h over the run's queries in order.
  void merge(const KeyRun& run, const T* d_o, T* const* coefficients, T* d_kv) const {
    const KeyLists lists = invert(run.lists.data(), run.counts, run.size(), p_.keys);
    const int64_t pieces = (lists.num_keys() + kMergeKeys - 1) / kMergeKeys;
    // The values' coefficients lie one further than the keys'.
    std::vector<const T*> of_keys(coefficients, coefficients + p_.heads * run.size()),
        of_values(of_keys);
    for (const T*& c : of_values) ++c;
    dynamic_tasks(pieces * p_.heads, [&](int64_t) {
      return
          [&, packed = std::vector<T>(), row_index = std::vector<int32_t>()](int64_t task) mutable {
            const int64_t h = task % p_.heads, first = task / p_.heads * kMergeKeys;
            const int64_t last = std::min(lists.num_keys(), first + kMergeKeys);
            const int64_t at = run.begin * p_.heads + h;
            T* head = d_kv + h * head_rows_;
            merge_keys(lists,
                       first,
                       last,
                       MergeSource<T>{of_keys.data() + h * run.size(),
                                      2,
                                      1,
                                      p_.q + at * p_.d_n,
                                      p_.heads * p_.d_n,
                                      p_.d_n},
                       head,
                       row_,
                       packed,
                       row_index);
            merge_keys(lists,
                       first,
                       last,
                       MergeSource<T>{of_values.data() + h * run.size(),
                                      2,
                                      1,
                                      d_o + at * p_.d_v,
                                      p_.heads * p_.d_v,
                                      p_.d_v},
                       head + p_.d_n,
                       row_,
                       packed,
                       row_index);
          };
    });
  }

  const Problem<T>& p_;
  mutable std::vector<AttendScratch<T>> scratch_{static_cast<size_t>(num_threads())};
  int64_t head_rows_;  ///< key and value elements of one head
  int64_t row_;        ///< of all heads
  std::vector<T> kv_;  ///< [keys, heads, d_n + d_v]
};

}  // namespace

template <typename T>
void forward_expanded(const Problem<T>& problem, T* o) {
  Expanded<T>(problem).forward(o);
}

template <typename T>
void backward_expanded(const Problem<T>& problem, const T* d_o, const Gradients<T>& gradients) {
  Expanded<T>(problem).backward(d_o, gradients);
}

template void forward_expanded<float>(const Problem<float>&, float*);
template void forward_expanded<double>(const Problem<double>&, double*);
template void backward_expanded<float>(const Problem<float>&,
                                       const float*,
                                       const Gradients<float>&);
template void backward_expanded<double>(const Problem<double>&,
                                        const double*,
                                        const Gradients<double>&);

}  // namespace lockstep::model::mla
