// Where a scheme that splits the sequence may cut a layer. The model calls these; the one-rank
// version does nothing.
#pragma once

#include <string_view>

#include "model/base/packing.hpp"
#include "model/base/torch.hpp"

namespace lockstep::model {

/// All functions are collective over the ranks that share the row, called in the same order by all
/// of them, and differentiable where stated. `what` names the call in errors.
class SequenceSeam {
 public:
  virtual ~SequenceSeam() = default;

  /// True: every row is local and the functions below are identities.
  [[nodiscard]] virtual bool is_local() const = 0;

  /// Rows of all ranks in row order: [T_local, ...] -> [T_global, ...]. Differentiable: the
  /// gradient is summed over ranks.
  virtual Tensor gather_rows(const Tensor& local, std::string_view what) = 0;

  /// The width - 1 rows before each local segment, [S, width - 1, C], oldest first; zeros before a
  /// document's start. Undefined when no local segment continues a document. x [T_local, C].
  /// Differentiable.
  virtual Tensor conv_halo(const Tensor& x,
                           int64_t width,
                           const Packing& packing,
                           std::string_view what) = 0;

  /// Recurrent state at the start of each local segment, [S, sizes...]: from the rank that holds
  /// the tokens before, zeros for documents that start here. Undefined when none continues.
  /// `anchor` is a local tensor the state's gradient hangs on: its gradient is not changed, but if
  /// it needs none, none is sent back.
  virtual Tensor initial_state(const Tensor& anchor,
                               at::IntArrayRef sizes,
                               at::ScalarType dtype,
                               const Packing& packing,
                               std::string_view what) = 0;

  /// Hands the state after the last local segment to the rank that goes on with its document.
  /// Returns `o` unchanged; backward takes the state's gradient from that rank. final_state [S,
  /// ...].
  virtual Tensor hand_over(const Tensor& o,
                           const Tensor& final_state,
                           const Packing& packing,
                           std::string_view what) = 0;
};

/// One process holds the whole row.
class LocalSequence final : public SequenceSeam {
 public:
  [[nodiscard]] bool is_local() const override { return true; }
  Tensor gather_rows(const Tensor& local, std::string_view) override { return local; }
  Tensor conv_halo(const Tensor&, int64_t, const Packing&, std::string_view) override { return {}; }
  Tensor initial_state(
      const Tensor&, at::IntArrayRef, at::ScalarType, const Packing&, std::string_view) override {
    return {};
  }
  Tensor hand_over(const Tensor& o, const Tensor&, const Packing&, std::string_view) override {
    return o;
  }
};

}  // namespace lockstep::model
