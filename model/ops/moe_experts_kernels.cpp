// Grouped products over experts. Work is cut into (expert, tile of rows, block of columns), one
// BLAS call on one thread each; the cut depends on the row counts only, never on the threads.
#include <algorithm>
#include <array>
#include <type_traits>
#include <vector>

#include "model/base/parallel.hpp"
#include "model/ops/moe_kernels.hpp"

namespace lockstep::model {
namespace {

constexpr int64_t kTileRows = 256;
constexpr int64_t kBlockColumns = 1024;     // where there are row tiles enough
constexpr int64_t kFineBlockColumns = 256;  // for few rows: decoding, small experts
constexpr int64_t kEnoughTiles = 8;
constexpr int64_t kGradientRows = 128;  // rows of a weight gradient per task

struct Task {
  int64_t expert, row, rows, column, columns;
};

/// Tiles of all rows of the slice's experts, times blocks of `columns`.
std::vector<Task> cut(const ExpertsForm& form, int64_t first, int64_t last, int64_t columns) {
  const bool fixed = form.tiles == RowTiles::kFixed;
  const int64_t tile = fixed ? kFixedTileRows : kTileRows;
  int64_t row_tiles = 0;
  for (int64_t e = first; e < last; ++e) {
    row_tiles += (form.offsets[e + 1] - form.offsets[e] + tile - 1) / tile;
  }
  const int64_t block =
      std::min(columns, fixed || row_tiles < kEnoughTiles ? kFineBlockColumns : kBlockColumns);
  std::vector<Task> tasks;
  for (int64_t e = first; e < last; ++e) {
    for (int64_t r = form.offsets[e]; r < form.offsets[e + 1]; r += tile) {
      for (int64_t c = 0; c < columns; c += block) {
        tasks.push_back(
            {e, r, std::min(tile, form.offsets[e + 1] - r), c, std::min(block, columns - c)});
      }
    }
  }
  return tasks;
}

/// Largest tile of any task, and scratch for padded tiles.
struct Buffers {
  int64_t tile, padding;
  Buffers(const std::vector<Task>& tasks, int64_t k, RowTiles tiles) : tile(0), padding(0) {
    int64_t columns = 0;
    for (const Task& t : tasks) {
      tile = std::max(tile, t.rows * t.columns);
      columns = std::max(columns, t.columns);
    }
    if (tiles == RowTiles::kFixed) padding = kFixedTileRows * (k + columns);
  }
};

template <typename F>
void run(const std::vector<Task>& tasks, F&& body) {
  parallel_for(0, static_cast<int64_t>(tasks.size()), 1, std::forward<F>(body));
}

template <typename A>
std::vector<A> buffer(int64_t count) {
  return std::vector<A>(static_cast<size_t>(count));
}

/// rows_product into stored activations: directly where nothing is rounded, else through `tile`.
template <typename W>
void rows_product_into(Op op_b,
                       const Task& t,
                       int64_t k,
                       const typename W::Acc* a,
                       int64_t lda,
                       const typename W::Acc* b,
                       int64_t ldb,
                       typename W::Act* to,
                       int64_t ld,
                       RowTiles tiles,
                       std::vector<typename W::Acc>& tile,
                       std::vector<typename W::Acc>& padding) {
  if constexpr (std::is_same_v<W, WidthBf16>) {
    rows_product(
        op_b, t.rows, t.columns, k, a, lda, b, ldb, tile.data(), t.columns, tiles, padding.data());
    for (int64_t r = 0; r < t.rows; ++r) {
      const typename W::Acc* from = tile.data() + r * t.columns;
      for (int64_t c = 0; c < t.columns; ++c) store(to + r * ld + c, from[c]);
    }
  } else {
    rows_product(op_b, t.rows, t.columns, k, a, lda, b, ldb, to, ld, tiles, padding.data());
  }
}

}  // namespace

template <typename W>
void experts_forward(const ExpertsForm& form,
                     const ExpertSlice<typename W::Acc>& slice,
                     const typename W::Acc* x,
                     typename W::Act* gate_up,
                     typename W::Acc* h,
                     typename W::Act* out) {
  using A = typename W::Acc;
  const int64_t D = form.width, I = form.inner;
  const std::vector<Task> inner = cut(form, slice.first, slice.last, I);
  const Buffers inner_size(inner, D, form.tiles);
  run(inner, [&](int64_t begin, int64_t end) {
    auto gate = buffer<A>(inner_size.tile), up = buffer<A>(inner_size.tile),
         padding = buffer<A>(inner_size.padding);
    for (int64_t i = begin; i < end; ++i) {
      const Task& t = inner[static_cast<size_t>(i)];
      const int64_t weights = (t.expert - slice.first) * slice.gate_stride + t.column * D;
      // Gate and up go straight to where they are kept, unless they are rounded on the way.
      typename W::Act* kept = gate_up == nullptr ? nullptr : gate_up + t.row * 2 * I + t.column;
      A *g = gate.data(), *u = up.data();
      int64_t ld = t.columns;
      if constexpr (!std::is_same_v<W, WidthBf16>) {
        if (kept != nullptr) {
          g = kept;
          u = kept + I;
          ld = 2 * I;
        }
      }
      const auto product = [&](const A* weight, A* to) {
        rows_product(Op::kTranspose,
                     t.rows,
                     t.columns,
                     D,
                     x + t.row * D,
                     D,
                     weight + weights,
                     D,
                     to,
                     ld,
                     form.tiles,
                     padding.data());
      };
      product(slice.gate, g);
      product(slice.up, u);
      for (int64_t r = 0; r < t.rows; ++r, g += ld, u += ld) {
        if constexpr (std::is_same_v<W, WidthBf16>) {
          for (int64_t c = 0; c < t.columns; ++c) g[c] = W::round(g[c]);
          for (int64_t c = 0; c < t.columns; ++c) u[c] = W::round(u[c]);
          if (kept != nullptr) {
            for (int64_t c = 0; c < t.columns; ++c) store(kept + r * 2 * I + c, g[c]);
            for (int64_t c = 0; c < t.columns; ++c) store(kept + r * 2 * I + I + c, u[c]);
          }
        }
        swiglu_forward<W>(form.swiglu, t.columns, g, u, h + (t.row + r) * I + t.column);
      }
    }
  });
  const std::vector<Task> outer = cut(form, slice.first, slice.last, D);
  const Buffers outer_size(outer, I, form.tiles);
  run(outer, [&](int64_t begin, int64_t end) {
    auto tile = buffer<A>(outer_size.tile), padding = buffer<A>(outer_size.padding);
    for (int64_t i = begin; i < end; ++i) {
      const Task& t = outer[static_cast<size_t>(i)];
      const A* down = slice.down + (t.expert - slice.first) * D * I + t.column * I;
      rows_product_into<W>(Op::kTranspose,
                           t,
                           I,
                           h + t.row * I,
                           I,
                           down,
                           I,
                           out + t.row * D + t.column,
                           D,
                           form.tiles,
                           tile,
                           padding);
    }
  });
}

namespace {

/// dgate_up and h of the slice's rows.
template <typename W>
void undo_activation(const ExpertsForm& form,
                     const ExpertSlice<typename W::Acc>& slice,
                     const typename W::Act* gate_up,
                     const typename W::Acc* dout,
                     typename W::Acc* h,
                     typename W::Acc* dgate_up) {
  using A = typename W::Acc;
  const int64_t D = form.width, I = form.inner;
  const std::vector<Task> tasks = cut(form, slice.first, slice.last, I);
  const Buffers size(tasks, D, form.tiles);
  run(tasks, [&](int64_t begin, int64_t end) {
    auto dh = buffer<A>(size.tile), padding = buffer<A>(size.padding), gate = buffer<A>(I),
         up = buffer<A>(I);
    for (int64_t i = begin; i < end; ++i) {
      const Task& t = tasks[static_cast<size_t>(i)];
      const A* down = slice.down + (t.expert - slice.first) * D * I + t.column;
      rows_product(Op::kNone,
                   t.rows,
                   t.columns,
                   D,
                   dout + t.row * D,
                   D,
                   down,
                   I,
                   dh.data(),
                   t.columns,
                   form.tiles,
                   padding.data());
      for (int64_t r = 0; r < t.rows; ++r) {
        A* d = dh.data() + r * t.columns;
        for (int64_t c = 0; c < t.columns; ++c) d[c] = W::round(d[c]);
        const typename W::Act* kept = gate_up + (t.row + r) * 2 * I + t.column;
        const A* g = widen(kept, gate.data(), t.columns);
        const A* u = widen(kept + I, up.data(), t.columns);
        A* dg = dgate_up + (t.row + r) * 2 * I + t.column;
        swiglu_backward<W>(
            form.swiglu, t.columns, g, u, d, h + (t.row + r) * I + t.column, dg, dg + I);
        for (int64_t c = 0; c < t.columns; ++c) dg[c] = W::round(dg[c]);
        for (int64_t c = 0; c < t.columns; ++c) dg[I + c] = W::round(dg[I + c]);
      }
    }
  });
}

/// dx = dgate gate + dup up, one sum.
template <typename W>
void input_gradient(const ExpertsForm& form,
                    const ExpertSlice<typename W::Acc>& slice,
                    const typename W::Acc* dgate_up,
                    typename W::Act* dx) {
  using A = typename W::Acc;
  const int64_t D = form.width, I = form.inner;
  const bool adjacent = slice.up == slice.gate + I * D;
  const std::vector<Task> tasks = cut(form, slice.first, slice.last, D);
  const Buffers size(tasks, 2 * I, form.tiles);
  run(tasks, [&](int64_t begin, int64_t end) {
    auto tile = buffer<A>(size.tile), second = buffer<A>(adjacent ? 0 : size.tile),
         padding = buffer<A>(size.padding);
    for (int64_t i = begin; i < end; ++i) {
      const Task& t = tasks[static_cast<size_t>(i)];
      const int64_t weights = (t.expert - slice.first) * slice.gate_stride + t.column;
      const A* d = dgate_up + t.row * 2 * I;
      typename W::Act* to = dx + t.row * D + t.column;
      if (adjacent) {
        rows_product_into<W>(Op::kNone,
                             t,
                             2 * I,
                             d,
                             2 * I,
                             slice.gate + weights,
                             D,
                             to,
                             D,
                             form.tiles,
                             tile,
                             padding);
        continue;
      }
      const auto product = [&](const A* from, const A* weight, A* part) {
        rows_product(Op::kNone,
                     t.rows,
                     t.columns,
                     I,
                     from,
                     2 * I,
                     weight + weights,
                     D,
                     part,
                     t.columns,
                     form.tiles,
                     padding.data());
      };
      product(d, slice.gate, tile.data());
      product(d + I, slice.up, second.data());
      for (int64_t r = 0; r < t.rows; ++r) {
        const A *first = tile.data() + r * t.columns, *other = second.data() + r * t.columns;
        for (int64_t c = 0; c < t.columns; ++c) store(to + r * D + c, first[c] + other[c]);
      }
    }
  });
}

/// A run of rows of one expert's gradient of gate (0), up (1) or down (2).
struct GradientTask {
  int64_t expert, row, rows;
  int which;
};

/// Runs that cover the wanted gradients of experts [first, last).
std::vector<GradientTask> cut_gradients(const ExpertsForm& form,
                                        int64_t first,
                                        int64_t last,
                                        const std::array<bool, 3>& wanted) {
  std::vector<GradientTask> tasks;
  for (int64_t e = first; e < last; ++e) {
    for (int which = 0; which < 3; ++which) {
      if (!wanted[static_cast<size_t>(which)]) continue;
      const int64_t rows = which == 2 ? form.width : form.inner;
      for (int64_t r = 0; r < rows; r += kGradientRows)
        tasks.push_back({e, r, std::min(kGradientRows, rows - r), which});
    }
  }
  return tasks;
}

/// The product over an expert's rows that a task is: left [count, task.rows]^T right [count,
/// columns].
template <typename A>
struct GradientProduct {
  int64_t columns, left_stride;
  const A *left, *right;

  GradientProduct(const ExpertsForm& form,
                  const GradientTask& t,
                  const A* x,
                  const A* dout,
                  const A* h,
                  const A* dgate_up) {
    const int64_t D = form.width, I = form.inner, r0 = form.offsets[t.expert];
    const bool is_down = t.which == 2;
    columns = is_down ? I : D;
    left_stride = is_down ? D : 2 * I;
    left = is_down ? dout + r0 * D + t.row : dgate_up + r0 * 2 * I + t.which * I + t.row;
    right = is_down ? h + r0 * I : x + r0 * D;
  }
};

/// One sum per weight over the expert's rows in their order; an expert without rows gets zeros.
template <typename A>
void weight_gradients(const ExpertsForm& form,
                      const ExpertSlice<A>& slice,
                      const A* x,
                      const A* dout,
                      const A* h,
                      const A* dgate_up,
                      const ExpertGradients<A>& grads) {
  const std::array<A*, 3> to{grads.gate, grads.up, grads.down};
  const std::vector<GradientTask> tasks = cut_gradients(
      form, slice.first, slice.last, {to[0] != nullptr, to[1] != nullptr, to[2] != nullptr});
  parallel_for(0, static_cast<int64_t>(tasks.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const GradientTask& t = tasks[static_cast<size_t>(i)];
      const GradientProduct<A> product(form, t, x, dout, h, dgate_up);
      const int64_t count = form.offsets[t.expert + 1] - form.offsets[t.expert];
      const int64_t stride = t.which == 2 ? form.width * form.inner : slice.gate_stride;
      sum_over_rows(t.rows,
                    product.columns,
                    count,
                    product.left,
                    product.left_stride,
                    product.right,
                    product.columns,
                    false,
                    to[static_cast<size_t>(t.which)] + (t.expert - slice.first) * stride +
                        t.row * product.columns,
                    product.columns);
    }
  });
}

}  // namespace

template <typename W>
void experts_backward(const ExpertsForm& form,
                      const ExpertSlice<typename W::Acc>& slice,
                      const typename W::Acc* x,
                      const typename W::Act* gate_up,
                      const typename W::Acc* dout,
                      typename W::Acc* h,
                      typename W::Acc* dgate_up,
                      typename W::Act* dx,
                      const ExpertGradients<typename W::Acc>& grads) {
  undo_activation<W>(form, slice, gate_up, dout, h, dgate_up);
  if (dx != nullptr) input_gradient<W>(form, slice, dgate_up, dx);
  weight_gradients(form, slice, x, dout, h, dgate_up, grads);
}

void experts_exact_gradients(const ExpertsForm& form,
                             const float* x,
                             const float* dout,
                             const float* h,
                             const float* dgate_up,
                             ExactExperts& to) {
  const std::vector<GradientTask> tasks =
      cut_gradients(form, 0, to.num_experts, {true, true, true});
  const std::array<ExactTarget, 3> targets{to.gate, to.up, to.down};
  parallel_for(0, static_cast<int64_t>(tasks.size()), 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch;
    for (int64_t i = begin; i < end; ++i) {
      const GradientTask& t = tasks[static_cast<size_t>(i)];
      const std::vector<int64_t> blocks =
          blocks_between(to.bounds, form.offsets[t.expert], form.offsets[t.expert + 1]);
      const GradientProduct<float> product(form, t, x, dout, h, dgate_up);
      ExactTarget target = targets[static_cast<size_t>(t.which)];
      const int64_t at = t.expert * (t.which == 2 ? form.width * form.inner : to.gate_stride);
      target.high += at;
      target.low += at;
      to.peak.add(exact_product(t.rows,
                                product.columns,
                                blocks,
                                product.left,
                                product.left_stride,
                                product.right,
                                product.columns,
                                target.at(t.row),
                                scratch));
    }
  });
}

#define LOCKSTEP_EXPERTS(W, Act, A)                                         \
  template void experts_forward<W>(                                         \
      const ExpertsForm&, const ExpertSlice<A>&, const A*, Act*, A*, Act*); \
  template void experts_backward<W>(const ExpertsForm&,                     \
                                    const ExpertSlice<A>&,                  \
                                    const A*,                               \
                                    const Act*,                             \
                                    const A*,                               \
                                    A*,                                     \
                                    A*,                                     \
                                    Act*,                                   \
                                    const ExpertGradients<A>&)
LOCKSTEP_EXPERTS(WidthF64, double, double);
LOCKSTEP_EXPERTS(WidthF32, float, float);
LOCKSTEP_EXPERTS(WidthBf16, Bf16, float);
#undef LOCKSTEP_EXPERTS

}  // namespace lockstep::model
