// Small numbers from a seed, the same on every machine and rank.
#pragma once

#include <cstdint>

namespace lockstep::tests {

class Draws {
 public:
  explicit Draws(uint64_t seed) : state_(next(seed)) {}
  /// In [0, below).
  int64_t operator()(uint64_t below) {
    state_ = next(state_);
    return static_cast<int64_t>((state_ >> 33) % below);
  }

 private:
  static uint64_t next(uint64_t s) { return s * 6364136223846793005ULL + 1442695040888963407ULL; }
  uint64_t state_;
};

}  // namespace lockstep::tests
