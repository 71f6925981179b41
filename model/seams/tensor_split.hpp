// Where a scheme that splits heads and inner dimensions over ranks meets the layers.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "model/base/torch.hpp"

namespace lockstep::model {

/// A layer computes with the slices of its parameters that ParamView hands out; its activations are
/// whole on every rank of the group outside of the split part. All functions are collective and
/// differentiable.
class TensorSplit {
 public:
  virtual ~TensorSplit() = default;

  [[nodiscard]] virtual bool is_local() const = 0;
  /// Products over a split dimension are added over ranks (rounded partial sums, D61 = tp). False:
  /// the split operand is gathered and the output dimension split instead, so that no sum is cut.
  [[nodiscard]] virtual bool splits_sums() const = 0;

  /// A whole activation that enters a split part: unchanged; its gradient is summed over ranks.
  virtual Tensor enter(const Tensor& x, std::string_view what) = 0;
  /// Partial sums that leave a split part: summed over ranks in rank order, rounded once to the
  /// dtype; the gradient is unchanged.
  virtual Tensor leave(const Tensor& partial, std::string_view what) = 0;
  /// Columns of every rank in rank order: [T, C_local] -> [T, C]. The gradient is this rank's
  /// columns. Followed by replicated work only (replicated = true), or by split work, whose
  /// gradients differ from rank to rank and are summed.
  virtual Tensor gather_columns(const Tensor& x, bool replicated, std::string_view what) = 0;
  /// The same for rows; rows[r] of rank r. Replicated work follows.
  virtual Tensor gather_rows(const Tensor& x, std::string_view what) = 0;

  /// First and one past the last of `count` things that this rank has: near-even, rank order.
  [[nodiscard]] virtual std::pair<int64_t, int64_t> share(int64_t count) const = 0;
};

class WholeTensors final : public TensorSplit {
 public:
  [[nodiscard]] bool is_local() const override { return true; }
  [[nodiscard]] bool splits_sums() const override { return true; }
  Tensor enter(const Tensor& x, std::string_view) override { return x; }
  Tensor leave(const Tensor& partial, std::string_view) override { return partial; }
  Tensor gather_columns(const Tensor& x, bool, std::string_view) override { return x; }
  Tensor gather_rows(const Tensor& x, std::string_view) override { return x; }
  [[nodiscard]] std::pair<int64_t, int64_t> share(int64_t count) const override {
    return {0, count};
  }
};

}  // namespace lockstep::model
