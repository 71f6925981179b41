// Driver of the chunked form: windows of chunks and blocks of heads, so that the memory for
// intermediates does not grow with the number of tokens. In a window (1) preparation runs over
// (chunk, head), (2) the chain over chunks runs per (head, columns of the state), which never
// interact, (3) outputs or gradients run over (chunk, head).
#include <algorithm>
#include <cmath>
#include <new>

#include "model/base/parallel.hpp"
#include "model/ops/kda_core.hpp"
#include "model/ops/kda_tile.hpp"

namespace lockstep::model {
namespace {

using simd::load;
using simd::splat;
using simd::store;

/// Uninitialised, aligned for vectors.
template <typename R>
class Buffer {
 public:
  explicit Buffer(int64_t count)
      : data_(static_cast<R*>(::operator new(
            static_cast<size_t>(std::max<int64_t>(count, 1)) * sizeof(R), std::align_val_t(64)))) {}
  ~Buffer() { ::operator delete(data_, std::align_val_t(64)); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  [[nodiscard]] R* data() const { return data_; }

 private:
  R* data_;
};

/// Columns [first, first + count) of a padded state, one chain task.
struct Columns {
  int64_t first, count;
};
int64_t column_blocks(int64_t width) { return (width + kValueBlock - 1) / kValueBlock; }
Columns columns(int64_t block, int64_t width) {
  const int64_t first = block * kValueBlock;
  return {first, std::min(kValueBlock, width - first)};
}

/// Copies between columns of a [dim, dim] matrix in memory (null: zeros) and a padded block.
template <typename R>
void read_columns(const R* matrix, int64_t dim, int64_t width, Columns cols, R* out) {
  for (int64_t i = 0; i < width; ++i) {
    R* row = out + i * cols.count;
    const int64_t n = matrix && i < dim ? std::clamp<int64_t>(dim - cols.first, 0, cols.count) : 0;
    std::copy(matrix + (n > 0 ? i * dim + cols.first : 0),
              matrix + (n > 0 ? i * dim + cols.first : 0) + n,
              row);
    std::fill(row + n, row + cols.count, R(0));
  }
}
template <typename R>
void write_columns(const R* block, int64_t dim, Columns cols, R* matrix) {
  const int64_t n = std::clamp<int64_t>(dim - cols.first, 0, cols.count);
  for (int64_t i = 0; i < dim; ++i) {
    std::copy(block + i * cols.count, block + i * cols.count + n, matrix + i * dim + cols.first);
  }
}

/// Copies a block into columns of a padded [width, width] matrix, rounded or not.
template <typename R>
void put_columns(const R* block, int64_t width, Columns cols, bool round, R* matrix) {
  for (int64_t i = 0; i < width; ++i) {
    for (int64_t c = 0; c < cols.count; c += simd::kLanes<R>) {
      const auto v = load(block + i * cols.count + c);
      store(matrix + i * width + cols.first + c, round ? simd::round_bf16(v) : v);
    }
  }
}

/// One window of chunks for one block of heads.
template <typename S, typename R>
class Window {
 public:
  Window(const KdaCall<S, R>& call, const KdaLayout<R>& layout, R* slots, R* carry)
      : call_(call), layout_(layout), slots_(slots), carry_(carry) {}

  void select(int64_t first_chunk, int64_t num_chunks, int64_t first_head, int64_t num_heads) {
    first_ = first_chunk;
    count_ = num_chunks;
    head0_ = first_head;
    heads_ = num_heads;
  }

  [[nodiscard]] const KdaChunk& chunk(int64_t i) const {
    return call_.chunks[static_cast<size_t>(first_ + i)];
  }
  [[nodiscard]] R* slot(int64_t i, int64_t head) const {
    return slots_ + (i * heads_ + head) * layout_.slot_size();
  }
  /// Data of a prepared chunk; only arrays that live in the slot may be used.
  [[nodiscard]] KdaData<R> data(int64_t i, int64_t head) const {
    KdaData<R> d = layout_.carve(slot(i, head), nullptr);
    d.rows = kda_padded_rows(chunk(i).length);
    return d;
  }
  [[nodiscard]] R* carry(int64_t head, Columns cols) const {
    return carry_ + head * layout_.width() * layout_.width() + cols.first * layout_.width();
  }

  /// Runs body(i, head) for every (chunk, head), with scratch of `scratch` elements per worker.
  template <typename F>
  void over_chunks(int64_t scratch, F&& body) const {
    parallel_for(0, count_ * heads_, grain(), [&](int64_t begin, int64_t end) {
      const simd::FlushDenormals flush;
      const Buffer<R> room(scratch);
      for (int64_t task = begin; task < end; ++task) {
        body(task / heads_, task % heads_, room.data());
      }
    });
  }
  /// Runs body(head, columns, state block, scratch as large as a chunk's or state's columns).
  template <typename F>
  void over_chains(F&& body) const {
    const int64_t width = layout_.width(), blocks = column_blocks(width);
    parallel_for(0, heads_ * blocks, grain(), [&](int64_t begin, int64_t end) {
      const simd::FlushDenormals flush;
      const Buffer<R> state(width * kValueBlock);
      const Buffer<R> scratch(std::max(width, call_.mode.chunk) * kValueBlock);
      for (int64_t task = begin; task < end; ++task) {
        body(task / blocks, columns(task % blocks, width), state.data(), scratch.data());
      }
    });
  }

  void prepare() const {
    over_chunks(layout_.scratch_size(), [&](int64_t i, int64_t head, R* scratch) {
      KdaData<R> d = layout_.carve(slot(i, head), scratch);
      kda_prepare(call_, chunk(i), head0_ + head, d);
    });
  }

  /// S and N of every chunk. Forward: the state enters from the carry, leaves to it and, at segment
  /// ends, to final_state. Replay in backward: it enters from `entry` [H, D, D] and leaves nowhere;
  /// the carry is the reverse chain's.
  void chain(const R* entry, R* final_state) const {
    const int64_t width = layout_.width(), dim = call_.dim, dd = dim * dim;
    over_chains([&](int64_t head, Columns cols, R* state, R* scratch) {
      const int64_t h = head0_ + head;
      for (int64_t i = 0; i < count_; ++i) {
        const KdaChunk& c = chunk(i);
        const int64_t seg = (c.segment * call_.heads + h) * dd;
        if (c.first) {
          const R* initial = call_.initial_state ? call_.initial_state + seg : nullptr;
          read_columns(initial, dim, width, cols, state);
        } else if (i == 0 && entry) {
          read_columns(entry + h * dd, dim, width, cols, state);
        } else if (i == 0) {
          const R* from = carry(head, cols);
          std::copy(from, from + width * cols.count, state);
        }
        kda_round(call_.mode.round_state, width, cols.count, state, cols.count);
        const KdaData<R> d = data(i, head);
        advance(d, cols, state, scratch);
        if (c.last && final_state) write_columns(state, dim, cols, final_state + seg);
      }
      if (!entry) std::copy(state, state + width * cols.count, carry(head, cols));
    });
  }

  /// Saves the state that enters the window.
  void save(R* saved) const {
    if (chunk(0).first) return;  // never read: the segment's initial state is there already
    const int64_t width = layout_.width(), dim = call_.dim;
    for (int64_t head = 0; head < heads_; ++head) {
      for (int64_t b = 0; b < column_blocks(width); ++b) {
        const Columns cols = columns(b, width);
        write_columns(carry(head, cols), dim, cols, saved + (head0_ + head) * dim * dim);
      }
    }
  }

  void outputs(S* o) const {
    const int64_t width = layout_.width();
    const R scale = 1 / std::sqrt(static_cast<R>(call_.dim));
    over_chunks(call_.mode.chunk * width, [&](int64_t i, int64_t head, R* out) {
      const KdaData<R> d = data(i, head);
      set_product(d.rows, width, width, plain<R>(d.qe, width), d.s_used, width, out, width);
      for (int64_t at = 0; at < d.rows * width; at += simd::kLanes<R>) {
        store(out + at, load(out + at) * splat(scale));
      }
      for (int64_t b = 0; b < d.rows; b += kBlock) {
        const ChainA<R> m = plain<R>(d.m + b * d.chunk, d.chunk);
        add_product(kBlock, width, b + kBlock, m, d.n, width, out + b * width, width);
      }
      const KdaChunk& c = chunk(i);
      for (int64_t t = 0; t < c.length; ++t) {
        simd::store_row(out + t * width,
                        call_.dim,
                        o + ((c.row + t) * call_.heads + head0_ + head) * call_.dim);
      }
    });
  }

  /// dN so far, M^T dO, and s dO.
  void load_output_gradient(const S* dout) const {
    const R scale = 1 / std::sqrt(static_cast<R>(call_.dim));
    over_chunks(0, [&](int64_t i, int64_t head, R*) {
      const KdaData<R> d = data(i, head);
      const KdaChunk& c = chunk(i);
      const int64_t width = d.width, ld = d.chunk;
      for (int64_t t = 0; t < d.rows; ++t) {
        R* row = d.dout + t * width;
        if (dout && t < c.length) {
          const int64_t at = ((c.row + t) * call_.heads + head0_ + head) * call_.dim;
          simd::load_row(dout + at, call_.dim, row, width);
        } else {
          std::fill(row, row + width, R(0));
        }
      }
      for (int64_t b = 0; b < d.rows; b += kBlock) {
        const ChainA<R> m = transposed<R>(d.m + b * ld + b, ld);
        set_product(
            kBlock, width, d.rows - b, m, d.dout + b * width, width, d.dn + b * width, width);
      }
      for (int64_t at = 0; at < d.rows * width; at += simd::kLanes<R>) {
        store(d.dout + at, load(d.dout + at) * splat(scale));
      }
    });
  }

  /// Y and dS of every chunk, last to first.
  void reverse_chain(const R* dfinal, R* dinitial) const {
    const int64_t width = layout_.width(), dim = call_.dim, dd = dim * dim;
    over_chains([&](int64_t head, Columns cols, R* dstate, R* scratch) {
      const int64_t h = head0_ + head;
      for (int64_t i = count_ - 1; i >= 0; --i) {
        const KdaChunk& c = chunk(i);
        const int64_t seg = (c.segment * call_.heads + h) * dd;
        if (c.last) {
          read_columns(dfinal ? dfinal + seg : nullptr, dim, width, cols, dstate);
        } else if (i == count_ - 1) {
          const R* from = carry(head, cols);
          std::copy(from, from + width * cols.count, dstate);
        }
        const KdaData<R> d = data(i, head);
        retreat(d, cols, dstate, scratch);
        if (c.first && dinitial) write_columns(dstate, dim, cols, dinitial + seg);
      }
      std::copy(dstate, dstate + width * cols.count, carry(head, cols));
    });
  }

  void gradients(const KdaGradients<S, R>& grads) const {
    parallel_for(0, count_ * heads_, grain(), [&](int64_t begin, int64_t end) {
      const simd::FlushDenormals flush;
      std::vector<R> scratch;
      for (int64_t task = begin; task < end; ++task) {
        const int64_t i = task / heads_, head = task % heads_;
        kda_chunk_gradients(call_, first_ + i, head0_ + head, data(i, head), grads, scratch);
      }
    });
  }

 private:
  /// Tasks below which a second thread costs more than it saves.
  [[nodiscard]] int64_t grain() const {
    const int64_t width = layout_.width(), chunk = call_.mode.chunk;
    return 1 + 400000 / (chunk * width * (width + chunk));
  }

  // Sums into N, S, dN and dS are formed apart and added once: a chain that starts at a large value
  // would round every step at that value's size.

  /// N = U - W S, S' = diag(exp b_C) S + Ke^T N, for some columns.
  void advance(const KdaData<R>& d, Columns cols, R* state, R* sum) const {
    const int64_t width = d.width, count = cols.count;
    const bool round = call_.mode.round_operands;
    put_columns(state, width, cols, false, d.s);
    if (round) put_columns(state, width, cols, true, d.s_used);
    const R* s_used = d.s_used + cols.first;
    R* n = d.n + cols.first;
    set_product(d.rows, count, width, plain<R>(d.w, width), s_used, width, sum, count);
    add_rows(sum, d.rows, count, n, width);
    kda_round(round, d.rows, count, n, width);
    set_product(width, count, d.rows, transposed<R>(d.ke, width), n, width, sum, count);
    decay_and_add(d.chunk_decay, sum, width, count, state);
  }

  /// dN += Ke dS, Y = Tm^T dN, dS <- diag(exp b_C) dS + s Qe^T dO - (B Kt)^T Y.
  void retreat(const KdaData<R>& d, Columns cols, R* dstate, R* sum) const {
    const int64_t width = d.width, count = cols.count, rows = d.rows, ld = d.chunk;
    put_columns(dstate, width, cols, false, d.ds);
    R *dn = d.dn + cols.first, *y = d.y + cols.first;
    set_product(rows, count, width, plain<R>(d.ke, width), dstate, count, sum, count);
    add_rows(sum, rows, count, dn, width);
    for (int64_t b = 0; b < rows; b += kBlock) {
      const ChainA<R> tm = transposed<R>(d.tm + b * ld + b, ld);
      set_product(kBlock, count, rows - b, tm, dn + b * width, width, y + b * width, width);
    }
    const R* dout = d.dout + cols.first;
    set_product(width, count, rows, transposed<R>(d.qe, width), dout, width, sum, count);
    add_product(width, count, rows, transposed<R>(d.bkt, width), y, width, sum, count);
    decay_and_add(d.chunk_decay, sum, width, count, dstate);
  }

  static void add_rows(const R* sum, int64_t rows, int64_t count, R* x, int64_t ld) {
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t c = 0; c < count; c += simd::kLanes<R>) {
        store(x + i * ld + c, load(x + i * ld + c) + load(sum + i * count + c));
      }
    }
  }
  static void decay_and_add(const R* decay, const R* sum, int64_t rows, int64_t count, R* x) {
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t at = i * count; at < (i + 1) * count; at += simd::kLanes<R>) {
        store(x + at, simd::fma(load(x + at), splat(decay[i]), load(sum + at)));
      }
    }
  }

  const KdaCall<S, R>& call_;
  const KdaLayout<R>& layout_;
  R *slots_, *carry_;
  int64_t first_ = 0, count_ = 0, head0_ = 0, heads_ = 0;
};

/// Heads whose chunk data exist at the same time: enough for two chain tasks per thread, and few,
/// so that they stay in the caches. No result depends on it.
int64_t heads_at_once(int64_t heads, int64_t width) {
  const int64_t blocks = column_blocks(width);
  return std::clamp<int64_t>((2 * num_threads() + blocks - 1) / blocks, 1, std::min(heads, kHeads));
}

/// Buffers for one pass and the loops over head blocks and windows.
template <typename S, typename R, typename F>
void over_windows(const KdaCall<S, R>& call, bool backward, F&& body) {
  const KdaLayout<R> layout(call.dim, call.mode.chunk, call.mode.round_operands, backward);
  const int64_t chunks = static_cast<int64_t>(call.chunks.size());
  const int64_t heads = heads_at_once(call.heads, layout.width());
  const Buffer<R> slots(std::min(chunks, kWindow) * heads * layout.slot_size());
  const Buffer<R> carry(heads * layout.width() * layout.width());
  Window<S, R> window(call, layout, slots.data(), carry.data());
  for (int64_t h = 0; h < call.heads; h += heads) {
    const int64_t windows = kda_windows(chunks);
    for (int64_t i = 0; i < windows; ++i) {
      const int64_t w = backward ? windows - 1 - i : i;
      const int64_t first = w * kWindow;
      window.select(first, std::min(kWindow, chunks - first), h, std::min(heads, call.heads - h));
      body(window, w);
    }
  }
}

}  // namespace

std::vector<KdaChunk> kda_chunks(const std::vector<int64_t>& cu, int64_t size) {
  std::vector<KdaChunk> chunks;
  for (size_t s = 0; s + 1 < cu.size(); ++s) {
    for (int64_t row = cu[s]; row < cu[s + 1]; row += size) {
      const int64_t length = std::min(size, cu[s + 1] - row);
      chunks.push_back(
          {row, length, static_cast<int64_t>(s), row == cu[s], row + length == cu[s + 1]});
    }
  }
  return chunks;
}

template <typename S, typename R>
void kda_forward(const KdaCall<S, R>& call, S* o, R* final_state, R* saved_states) {
  const int64_t state = call.heads * call.dim * call.dim;
  over_windows(call, /*backward=*/false, [&](Window<S, R>& window, int64_t w) {
    if (saved_states) window.save(saved_states + w * state);
    window.prepare();
    window.chain(nullptr, final_state);
    window.outputs(o);
  });
}

template <typename S, typename R>
void kda_backward(const KdaCall<S, R>& call,
                  const R* saved_states,
                  const S* dout,
                  const R* dfinal,
                  const KdaGradients<S, R>& grads) {
  const int64_t state = call.heads * call.dim * call.dim;
  over_windows(call, /*backward=*/true, [&](Window<S, R>& window, int64_t w) {
    window.prepare();
    window.load_output_gradient(dout);
    window.chain(saved_states + w * state, nullptr);
    window.reverse_chain(dfinal, grads.dinitial_state);
    window.gradients(grads);
  });
}

#define LOCKSTEP_KDA(S, R)                                     \
  template void kda_forward(const KdaCall<S, R>&, S*, R*, R*); \
  template void kda_backward(                                  \
      const KdaCall<S, R>&, const R*, const S*, const R*, const KdaGradients<S, R>&);
LOCKSTEP_KDA(double, double)
LOCKSTEP_KDA(float, float)
LOCKSTEP_KDA(simd::Bf16, float)
#undef LOCKSTEP_KDA

}  // namespace lockstep::model
