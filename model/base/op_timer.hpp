// Where the time of a pass goes, by operator. Layers open an OpScope around each operator; nothing
// is measured, and a scope is one branch, unless the thread has an OpTimer. Backward needs no
// scopes of its own: autograd numbers its nodes in the order they are made, so the timer knows in
// which scope a node was made when backward runs it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

/// Time of one name, without that of scopes opened inside it.
struct OpTime {
  std::string name;
  int64_t calls = 0;  ///< times the scope was opened
  double forward_s = 0, backward_s = 0;
};

struct OpRecord;
extern constinit thread_local OpRecord* op_record;  ///< of this thread's timer; null: none

/// Measures scopes, and backward passes, of the thread that made it for as long as it lives. Every
/// moment counts for one name at most, so the times sum to no more than the wall time; what no
/// scope covers (sums of gradients from several users, parameters, bookkeeping) is the difference.
/// Throws kInternal if the thread has a timer already.
class OpTimer {
 public:
  OpTimer();
  ~OpTimer();
  OpTimer(const OpTimer&) = delete;
  OpTimer& operator=(const OpTimer&) = delete;

  /// In the order in which the names were first opened.
  [[nodiscard]] std::vector<OpTime> times() const;

 private:
  std::unique_ptr<OpRecord> record_;
  uint64_t callback_ = 0;
};

/// Whether this thread measures now.
inline bool op_timing() { return op_record != nullptr; }

/// Counts the time of its life, and of the backward of what is made in it, for `name`, a string
/// that outlives the timer.
class OpScope {
 public:
  explicit OpScope(const char* name) : record_(op_record) {
    if (record_ != nullptr) begin(name);
  }
  ~OpScope() {
    if (record_ != nullptr && record_ == op_record) end();
  }
  OpScope(const OpScope&) = delete;
  OpScope& operator=(const OpScope&) = delete;

  /// Counts `part` (0 to 1) of this scope's time up to now for another name: for a loop that does
  /// two things by turns on several threads. Call it in the innermost open scope.
  void give(const char* name, double part) {
    if (record_ != nullptr && record_ == op_record) give_part(name, part);
  }

 private:
  static void begin(const char* name);
  static void end();
  static void give_part(const char* name, double part);

  OpRecord* record_;  ///< of the timer that it began under; null: none
};

/// body() in a scope.
template <typename Body>
auto timed(const char* name, Body&& body) {
  const OpScope time(name);
  return std::forward<Body>(body)();
}

}  // namespace lockstep
