#include "model/base/op_timer.hpp"

#include <algorithm>
#include <chrono>
#include <string_view>

#include "model/base/torch.hpp"

namespace lockstep {

constinit thread_local OpRecord* op_record = nullptr;

/// One stack of open scopes and running backward nodes; time goes to the one on top.
struct OpRecord {
  using Clock = std::chrono::steady_clock;
  static constexpr size_t kNobody = SIZE_MAX;

  struct Frame {
    size_t op = kNobody;
    bool backward = false;
    double seconds = 0;  ///< counted for this frame so far
  };
  /// Autograd nodes numbered from `sequence` on were made in scope `op`.
  struct Mark {
    uint64_t sequence;
    size_t op;
  };

  std::vector<OpTime> ops;
  std::vector<Frame> open;
  std::vector<Mark> marks;
  Clock::time_point since = Clock::now();

  size_t find(std::string_view name) {
    const auto at =
        std::find_if(ops.begin(), ops.end(), [name](const OpTime& op) { return op.name == name; });
    if (at != ops.end()) return static_cast<size_t>(at - ops.begin());
    ops.push_back({.name = std::string(name)});
    return ops.size() - 1;
  }

  static double& slot(OpTime& op, bool backward) { return backward ? op.backward_s : op.forward_s; }

  /// Counts the time since the last call for the frame on top.
  void charge() {
    const auto now = Clock::now();
    if (!open.empty() && open.back().op != kNobody) {
      const double seconds = std::chrono::duration<double>(now - since).count();
      open.back().seconds += seconds;
      slot(ops[open.back().op], open.back().backward) += seconds;
    }
    since = now;
  }

  void push(size_t op, bool backward) {
    charge();
    open.push_back({op, backward, 0});
  }
  void pop() {
    charge();
    open.pop_back();
  }

  void mark() {
    size_t op = kNobody;
    if (!open.empty() && !open.back().backward) op = open.back().op;
    marks.push_back({at::sequence_number::peek(), op});
  }
  /// The scope in which the node was made.
  [[nodiscard]] size_t maker(uint64_t sequence) const {
    const auto after = std::upper_bound(
        marks.begin(), marks.end(), sequence, [](uint64_t value, const Mark& mark) {
          return value < mark.sequence;
        });
    return after == marks.begin() ? kNobody : (after - 1)->op;
  }
};

OpTimer::OpTimer() : record_(std::make_unique<OpRecord>()) {
  LOCKSTEP_CHECK(op_record == nullptr,
                 kInternal,
                 "operator timer: this thread has one that measures {} names already; end it first",
                 op_record->ops.size());
  const auto before = [](const at::RecordFunction& node) -> std::unique_ptr<at::ObserverContext> {
    // Leaves count from the end of the range and were made by nobody.
    if (op_record != nullptr) {
      op_record->push(op_record->maker(static_cast<uint64_t>(node.seqNr())), true);
    }
    return nullptr;
  };
  const auto after = [](const at::RecordFunction&, at::ObserverContext*) {
    if (op_record != nullptr) op_record->pop();
  };
  callback_ = at::addThreadLocalCallback(
      at::RecordFunctionCallback(before, after).scopes({at::RecordScope::BACKWARD_FUNCTION}));
  op_record = record_.get();
}

OpTimer::~OpTimer() {
  op_record = nullptr;
  at::removeCallback(callback_);
}

std::vector<OpTime> OpTimer::times() const { return record_->ops; }

void OpScope::begin(const char* name) {
  const size_t op = op_record->find(name);
  ++op_record->ops[op].calls;
  op_record->push(op, false);
  op_record->mark();
}

void OpScope::end() {
  // Scopes close in reverse order: one that meets an empty stack began under an earlier timer.
  if (op_record->open.empty()) return;
  op_record->pop();
  op_record->mark();
}

void OpScope::give_part(const char* name, double part) {
  if (op_record->open.empty()) return;
  op_record->charge();
  const size_t other = op_record->find(name);
  ++op_record->ops[other].calls;
  OpRecord::Frame& frame = op_record->open.back();
  const double seconds = frame.seconds * std::clamp(part, 0.0, 1.0);
  frame.seconds -= seconds;
  OpRecord::slot(op_record->ops[frame.op], frame.backward) -= seconds;
  OpRecord::slot(op_record->ops[other], frame.backward) += seconds;
}

}  // namespace lockstep
