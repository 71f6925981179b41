// Where a scheme that splits the sequence may cut a layer. The model calls these; the one-rank
// version does nothing.
#pragma once

#include <functional>
#include <string_view>
#include <utility>
#include <vector>

#include "model/base/exact_sum.hpp"
#include "model/base/packing.hpp"
#include "model/base/torch.hpp"

namespace lockstep::model {

/// What a recurrence over the local segments of a row can do. State is [S, sizes...], one per
/// segment.
struct Recurrence {
  struct Result {
    Tensor o;            ///< [T_local, ...]
    Tensor final_state;  ///< [S, sizes...], differentiable
  };
  std::vector<int64_t> sizes;  ///< of one state
  at::ScalarType dtype;        ///< of states
  Tensor anchor;  ///< a local tensor the recurrence is computed from: where a received state's
                  ///< gradient finds its place in the graph
  /// Undefined state: zeros. Differentiable, also with respect to the state.
  std::function<Result(const Tensor& initial_state)> run;
  /// The last segment as an affine map of its entry state, (A, B): S -> A S + B. No gradients.
  std::function<std::pair<Tensor, Tensor>()> last_segment_map;
  /// Gradient of the first segment's entry state, [sizes...], from that of the outputs alone.
  std::function<Tensor(const Tensor& initial_state, const Tensor& dout)> entry_gradient;
};

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

  /// The same rows. Their gradient is not what arrives but the sum over ranks of `sum`, which has
  /// the shape of the result, rounded once to the rows' dtype.
  virtual Tensor gather_rows_exact(const Tensor& local,
                                   const ExactSum& sum,
                                   std::string_view what) = 0;

  /// The width - 1 rows before each local segment, [S, width - 1, C], oldest first; zeros before a
  /// document's start. Undefined when no local segment continues a document. x [T_local, C].
  /// Differentiable.
  virtual Tensor conv_halo(const Tensor& x,
                           int64_t width,
                           const Packing& packing,
                           std::string_view what) = 0;

  /// Runs a recurrence over the local segments, whose documents may have begun on earlier ranks and
  /// go on on later ones. Returns its outputs; gradients reach everything the recurrence was
  /// computed from.
  virtual Tensor recur(const Recurrence& recurrence,
                       const Packing& packing,
                       std::string_view what) = 0;
};

/// One process holds the whole row.
class LocalSequence final : public SequenceSeam {
 public:
  [[nodiscard]] bool is_local() const override { return true; }
  Tensor gather_rows(const Tensor& local, std::string_view) override { return local; }
  Tensor gather_rows_exact(const Tensor& local, const ExactSum& sum, std::string_view) override {
    return with_exact_gradient(local, sum);
  }
  Tensor conv_halo(const Tensor&, int64_t, const Packing&, std::string_view) override { return {}; }
  Tensor recur(const Recurrence& recurrence, const Packing&, std::string_view) override {
    return recurrence.run({}).o;
  }
};

}  // namespace lockstep::model
