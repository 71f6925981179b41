// Bytes of a unit's forward and backward pass from the sizes of its tensors alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lockstep::model {

/// What one unit needs at its worst moments, and what it leaves.
struct UnitMemory {
  int64_t forward = 0;  ///< most that is alive in a forward pass that keeps what backward needs
  int64_t forward_only = 0;    ///< most in one that keeps nothing
  int64_t kept = 0;            ///< from forward to backward, the unit's output with it
  int64_t backward = 0;        ///< most in backward, what was kept and parameter gradients with it
  int64_t gradients = 0;       ///< of parameters, whole, when backward ends
  int64_t output = 0;          ///< of `kept`, the unit's output
  int64_t input_gradient = 0;  ///< of `backward`, the gradient of the unit's input
  int64_t kept_after = 0;      ///< stays until the whole pass is over; in none of the others
};

/// Operators in the order in which they run, as the bytes of the tensors between them. Backward
/// runs them in the opposite order, as autograd does: an operator frees what it kept, the gradients
/// of its outputs are freed, and those of its inputs appear or are added to.
class MemoryTape {
 public:
  using Id = size_t;
  struct Op {
    std::vector<Id> inputs = {};        ///< tensors that get gradients of their own size
    std::vector<int64_t> outputs = {};  ///< bytes of each
    std::vector<Id> saved = {};         ///< tensors of earlier operators that backward reads
    int64_t kept = 0;                   ///< further bytes until this operator's backward is done
    int64_t kept_to_end = 0;            ///< ... until the unit's
    int64_t kept_after = 0;             ///< ... until the whole pass is over
    int64_t forward_work = 0;           ///< further bytes while it runs
    int64_t backward_work = 0;
    int64_t gradients = 0;  ///< of its parameters; stay to the unit's end
  };

  /// The unit's input, which others count. bytes: of its gradient.
  Id given(int64_t bytes);
  /// Ids of the outputs.
  std::vector<Id> add(const Op& op);
  /// An operator with one output that saves its inputs.
  Id add_saving(std::vector<Id> inputs, int64_t output, Op rest);
  Id add_saving(std::vector<Id> inputs, int64_t output) {
    return add_saving(std::move(inputs), output, Op());
  }

  /// The last operator's first output is the unit's.
  [[nodiscard]] UnitMemory use() const;

 private:
  struct Item {
    int64_t bytes;
    bool given;
  };
  struct Step {
    Op op;
    std::vector<Id> outputs;
  };
  [[nodiscard]] std::vector<size_t> savers() const;
  [[nodiscard]] int64_t forward_peak(bool keeps) const;

  std::vector<Item> items_;
  std::vector<Step> steps_;
};

}  // namespace lockstep::model
