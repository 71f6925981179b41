// Loops of the indexer on raw pointers, without torch headers. T is float or double.
#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

#include "model/ops/fp8_kernel.hpp"

namespace lockstep::model::indexer {

/// Roundings of pooling and normalisation. Only float rounds.
enum class PoolForm : uint8_t {
  kPlain,        ///< no rounding
  kOneRounding,  ///< num / den rounded to bfloat16
  kBf16Weights,  ///< softmax weights, products and their sum rounded to bfloat16
};

/// out [rows, d] = (x - mean) / sqrt(var + eps) * weight + bias.
template <typename T>
void layer_norm(
    const T* x, const T* weight, const T* bias, int64_t rows, int64_t d, T eps, bool round, T* out);

/// One pool: k, gate [kpool, d] rows of a document, ape [kpool, d]; out [d]; scratch [2 d].
template <typename T>
void pool(const T* k,
          const T* gate,
          const T* ape,
          int64_t kpool,
          int64_t d,
          PoolForm form,
          T* scratch,
          T* out);

/// Rows of activations: either T, or bfloat16 as its 16 bits.
template <typename T>
struct Rows {
  const T* values = nullptr;
  const uint16_t* bf16 = nullptr;
};

/// How a dot product of a query head with a pool key enters the score.
enum class DotForm : uint8_t {
  kPlain,
  kRounded,  ///< rounded to bfloat16 before scaling, as a bfloat16 matrix product stores it
  kFp8,      ///< queries rotated (optional) and quantised here, keys already
};

template <typename T>
struct Scorer {
  Rows<T> q;             ///< [T_local, heads, d]
  const T* head_weight;  ///< [T_local, heads], with heads^-1/2 (kFp8: raw)
  int64_t heads, d;
  DotForm form = DotForm::kPlain;
  T dot_scale = 1;        ///< d^-1/2 (kFp8: applied through weight_scale)
  T weight_scale = 1;     ///< kFp8: fp32(d^-1/2 heads^-1/2)
  bool hadamard = false;  ///< kFp8
  Fp8Scale scale_mode = Fp8Scale::kPow2;
};

/// Pool keys of one document as panels of kPanel columns, [panels][d][kPanel], zero padded.
inline constexpr int64_t kPanel = 192;
template <typename T>
std::vector<T> pack_pools(const T* pooled, int64_t num_pools, int64_t d);

/// Integers that sort like scores.
template <typename T>
using SortKey = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;

/// The k largest of a row's scores, taken while they are made: ties to the lower index, NaN
/// largest, as of the whole row at once. Only scores above the k-th largest so far are kept, a few
/// of a long row, so that what is left to do after scoring hardly grows with the row.
template <typename T>
class TopPools {
 public:
  /// Forgets everything. k >= 1. forced >= 0 counts as large as a NaN, whatever its score.
  void begin(int64_t k, int64_t forced);
  /// Scores of pools [first, first + n), n <= kPanel; first ascends from call to call.
  void offer(const T* scores, int64_t first, int64_t n);
  /// Writes the k largest indices, ascending. At least k scores were offered.
  void finish(int32_t* out);

 private:
  void drop_all_but_k();

  std::vector<SortKey<T>> keys_;
  std::vector<int32_t> pools_;  ///< of keys_, ascending
  int64_t k_ = 0, forced_ = -1, count_ = 0;
  SortKey<T> bound_ = 0;  ///< later scores must exceed it
};

/// Queries of one task: consecutive rows of one document. Scratch of one thread.
inline constexpr int64_t kQueryBlock = 16;
template <typename T>
struct Scratch {
  std::vector<T> q, weight, dots;
  TopPools<T> tops[kQueryBlock];
};

/// Offers the scores of pools [0, visible[i]) to scratch.tops[i], begun by the caller, for n <=
/// kQueryBlock rows from `row`. panels as pack_pools; pool_scale [pools] or null. A score is
/// pool_scale * sum over heads, in ascending order, of fma(w, max(dot * dot_scale, 0), sum); a dot
/// is one chain over d. Nothing depends on the block or on other rows.
template <typename T>
void score_block(const Scorer<T>& scorer,
                 int64_t row,
                 int64_t n,
                 const int64_t* visible,
                 const T* panels,
                 const T* pool_scale,
                 Scratch<T>& scratch);

}  // namespace lockstep::model::indexer
