// The chunked KDA form on raw pointers: what is computed, and the data of one chunk. Notation of a
// chunk of C tokens (per key channel): b_i = g_1 + ... + g_i, and
//   Gm_ij = k_i k_j exp(b_i - b_j) (i > j), M_ij = s q_i k_j exp(b_i - b_j) (i >= j), L =
//   diag(beta) Gm, Tm = (I + L)^-1, W = Tm diag(beta) (k exp(b)), U = Tm diag(beta) v, N = U - W S,
//   O = s (q exp(b)) S + M N, S' = diag(exp b_C) S + (k exp(b_C - b))^T N.
// Decays exp(b_i - b_j) are products of factors <= 1: between blocks of kBlock rows, from j to its
// block's end, over whole blocks, from i's block's start to i; inside a block, token by token.
// Nothing can overflow for any gate, and no difference of large cumulative sums is ever formed. S
// is the activation type in memory, R the computing type.
#pragma once

#include <cstdint>
#include <vector>

#include "model/ops/kda_simd.hpp"

namespace lockstep::model {

/// The policy's switches as the KDA forms read them.
struct KdaMode {
  enum class Gate { kSigmoid, kQuotient, kTanh, kSoftplus };
  int64_t chunk = 64;             ///< D21; 0 is the recurrence
  Gate gate = Gate::kSigmoid;     ///< D18, or softplus without a lower bound
  double lower_bound = 0;         ///< 0 for softplus
  bool round_decay = false;       ///< D03
  bool beta_tanh = false;         ///< D17
  bool round_beta = false;        ///< D17
  bool l2_divides = true;         ///< D20
  bool round_normalised = false;  ///< D19
  bool round_scores = false;      ///< D22
  bool round_inverse = false;     ///< D23
  bool half_inverse = false;      ///< D23
  bool round_operands = false;    ///< D24
  bool round_exp = false;         ///< D25
  bool round_state = false;       ///< D26
  bool base2 = false;             ///< D71
};

inline constexpr int64_t kBlock = 16;       ///< rows of a sub-block
inline constexpr int64_t kMaxBlocks = 4;    ///< sub-blocks of the largest chunk
inline constexpr int64_t kWindow = 8;       ///< chunks between saved states
inline constexpr int64_t kHeads = 16;       ///< heads whose chunk data exist at the same time
inline constexpr int64_t kValueBlock = 32;  ///< columns of the state that one chain task carries
inline constexpr double kL2Eps = 1e-6;

struct KdaChunk {
  int64_t row, length, segment;
  bool first, last;  ///< of its segment
};

/// Chunks of `size` tokens counted from each segment's start; empty segments have none.
std::vector<KdaChunk> kda_chunks(const std::vector<int64_t>& cu, int64_t size);
inline int64_t kda_windows(int64_t chunks) { return (chunks + kWindow - 1) / kWindow; }

template <typename S>
struct TokenRows {
  const S* data;
  int64_t stride;  ///< elements between tokens; heads and channels are adjacent
};

template <typename S, typename R>
struct KdaCall {
  int64_t tokens, heads, dim;
  TokenRows<S> q, k, v, f, beta_logit;
  const R* rate;           ///< [H] exp(A_log), as used
  const R* dt_bias;        ///< [H, D], as used
  const R* initial_state;  ///< [segments, H, D, D] or null
  KdaMode mode;
  std::vector<KdaChunk> chunks;
};

template <typename S, typename R>
struct KdaGradients {
  S *dq, *dk, *dv, *df;  ///< [T, H, D]
  S* dbeta_logit;        ///< [T, H]
  R* dinitial_state;     ///< [segments, H, D, D] or null; empty segments are the caller's
  R* ddt_partial;        ///< [chunks, H, D]
  R* drate_partial;      ///< [chunks, H]: d A_log of each chunk
};

/// o [T, H, D]; final_state [segments, H, D, D] (empty segments are the caller's); saved_states
/// [windows, H, D, D], the state that enters each window of kWindow chunks, or null.
template <typename S, typename R>
void kda_forward(const KdaCall<S, R>& call, S* o, R* final_state, R* saved_states);

/// dout [T, H, D] and dfinal [segments, H, D, D] may be null: zeros.
template <typename S, typename R>
void kda_backward(const KdaCall<S, R>& call,
                  const R* saved_states,
                  const S* dout,
                  const R* dfinal,
                  const KdaGradients<S, R>& grads);

/// Everything about one (chunk, head). Matrices have row stride `width` (D padded to whole product
/// tiles) or `chunk` for [C, C]; rows beyond the chunk's length up to a multiple of kBlock are
/// tokens with q = k = v = beta = 0 and decay 1.
template <typename R>
struct KdaData {
  int64_t rows, width, chunk;
  R *q, *k;       ///< [C, D] normalised
  R* beta;        ///< [C]
  R* decay;       ///< [C, D] exp(g)
  R* from_start;  ///< [C, D] exp(b_i - b before the block)
  R* to_end;      ///< [C, D] exp(b at the block's end - b_j)
  R *total, *before,
      *after;  ///< [C/kBlock, D] decay over a block, over all blocks before, after it
  R *q_start, *k_start, *k_end;  ///< [C, D] q, k times from_start; k times to_end
  R *gm, *l, *tm, *m;            ///< [C, C]; l is -L
  R* work;                       ///< [4 * kBlock * kBlock]
  R *bkt, *bv;                   ///< [C, D] -beta k exp(b), beta v
  R *qe, *ke;                    ///< [C, D] q exp(b), k exp(b_C - b)
  R* chunk_decay;                ///< [D] exp(b_C)
  R *w, *n;                      ///< [C, D] -W; U, and N once the chain has run
  R *s, *s_used;                 ///< [D, D] state entering the chunk, and as matrix operand (D24)
  R *y, *dn, *dout, *ds;         ///< backward: [C, D], [C, D], [C, D] s dO, [D, D]
};

/// Room for the data of one (chunk, head). Forward: what the chain and the output need is in
/// `slot`, the rest in a worker's scratch; backward: everything is in `slot`.
template <typename R>
class KdaLayout {
 public:
  KdaLayout(int64_t dim, int64_t chunk, bool rounds_state_operand, bool backward);
  [[nodiscard]] int64_t slot_size() const { return slot_size_; }
  [[nodiscard]] int64_t scratch_size() const { return scratch_size_; }
  [[nodiscard]] int64_t width() const { return width_; }
  [[nodiscard]] KdaData<R> carve(R* slot, R* scratch) const;

 private:
  template <typename Take>
  KdaData<R> assign(Take&& take) const;
  int64_t width_, chunk_;
  bool separate_operand_, backward_;
  int64_t slot_size_ = 0, scratch_size_ = 0;
};

/// Fills everything of `d` that does not depend on the state.
template <typename S, typename R>
void kda_prepare(const KdaCall<S, R>& call, const KdaChunk& chunk, int64_t head, KdaData<R>& d);

/// All gradients of one (chunk, head) once n, s, y and ds are known.
template <typename S, typename R>
void kda_chunk_gradients(const KdaCall<S, R>& call,
                         int64_t chunk_index,
                         int64_t head,
                         const KdaData<R>& d,
                         const KdaGradients<S, R>& grads,
                         std::vector<R>& scratch);

/// Row count of a chunk's matrices.
inline int64_t kda_padded_rows(int64_t length) { return (length + kBlock - 1) / kBlock * kBlock; }

/// Rounds a [rows, width] matrix to bf16 in place when asked to.
template <typename R>
inline void kda_round(bool on, int64_t rows, int64_t width, R* x, int64_t ld) {
  if (!on) return;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t c = 0; c < width; c += simd::kLanes<R>) {
      simd::store(x + i * ld + c, simd::round_bf16(simd::load(x + i * ld + c)));
    }
  }
}

}  // namespace lockstep::model
