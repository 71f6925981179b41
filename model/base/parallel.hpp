// Threads of one process, without torch headers, for files with hot loops.
#pragma once

#include <cstdint>
#include <type_traits>

namespace lockstep {

/// Non-owning reference to a callable void(int64_t begin, int64_t end).
class RangeBody {
 public:
  template <typename F, typename = std::enable_if_t<!std::is_same_v<std::decay_t<F>, RangeBody>>>
  RangeBody(F&& f)  // NOLINT(google-explicit-constructor): meant to bind a lambda at the call
      : object_(const_cast<void*>(static_cast<const void*>(&f))),
        call_([](void* o, int64_t b, int64_t e) {
          (*static_cast<std::remove_reference_t<F>*>(o))(b, e);
        }) {}
  void operator()(int64_t begin, int64_t end) const { call_(object_, begin, end); }

 private:
  void* object_;
  void (*call_)(void*, int64_t, int64_t);
};

/// Runs body over [begin, end) in pieces of at least `grain`, on torch's threads. Inside, BLAS runs
/// on one thread. Which thread gets which piece is not fixed: the body must write disjoint results,
/// and every sum whose order matters must be formed inside one iteration or merged by index
/// afterwards. Exceptions leave after all pieces ended.
void parallel_for(int64_t begin, int64_t end, int64_t grain, RangeBody body);

/// Threads that parallel_for may use.
int num_threads();

}  // namespace lockstep
