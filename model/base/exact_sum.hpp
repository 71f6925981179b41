// An exact sum of float32 tensors (exact_add.hpp): the same bytes whatever order, grouping or
// process its addends come in.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "model/base/exact_add.hpp"
#include "model/base/torch.hpp"

namespace lockstep {

/// A handle: copies share the sum. The default-constructed handle is undefined. Memory (16 bytes an
/// element) is taken at the first addend. Operators add from their own loops through high(), low()
/// and note(); nothing here is safe to call from two threads at once.
class ExactSum {
 public:
  ExactSum() = default;
  /// Zero. `name` is for errors.
  ExactSum(at::IntArrayRef sizes, std::string name);

  [[nodiscard]] bool defined() const { return state_ != nullptr; }
  /// Nothing was added yet.
  [[nodiscard]] bool empty() const { return state_ == nullptr || !state_->pairs.defined(); }
  [[nodiscard]] const std::vector<int64_t>& sizes() const { return sizes_; }
  /// Contiguous parts of this sum, to be added to in place.
  [[nodiscard]] double* high() const;
  [[nodiscard]] double* low() const;
  /// Tells that each element got at most `addends` numbers of at most `peak` in magnitude. Throws
  /// kConfig naming the sum when it could leave the range in which it is exact: 2^16 a process, so
  /// that 32 processes fit.
  void note(int64_t addends, float peak) const;
  /// Adds a float32 tensor of this shape.
  void add(const Tensor& partial) const;

  /// Rows [first, first + count) of dim 0, sharing the memory.
  [[nodiscard]] ExactSum rows(int64_t first, int64_t count) const;
  /// [2, sizes...] float64, high then low, to be added to those of other processes. Shares memory
  /// for a whole sum; not for parts.
  [[nodiscard]] Tensor pairs() const;
  /// The sum rounded once to float32.
  [[nodiscard]] Tensor value() const;

  /// The same for pairs that were added up elsewhere. Throws kConfig naming `what` for a sum of
  /// 2^20 or more.
  static Tensor value_of(const Tensor& pairs, std::string_view what);
  /// exact_carry on pairs, in place.
  static void carry(const Tensor& pairs);

 private:
  struct State {
    std::string name;
    std::vector<int64_t> sizes;
    Tensor pairs;
    double bound = 0;  ///< on the magnitude of every element and partial sum
    int64_t addends = 0;
  };
  const Tensor& filled() const;

  std::shared_ptr<State> state_;
  std::vector<int64_t> sizes_;  ///< of this part
  int64_t offset_ = 0;          ///< elements before it
};

/// x, whose gradient is `sum` rounded to x's dtype instead of what arrives: for tensors that share
/// rows among the tokens whose operators add to the sum.
Tensor with_exact_gradient(const Tensor& x, const ExactSum& sum);

}  // namespace lockstep
