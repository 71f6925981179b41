#include "harness/inference/id_pool.hpp"

#include <algorithm>
#include <random>

#include "model/base/error.hpp"

namespace lockstep::harness {

IdPool::IdPool(std::string what, int64_t count, uint64_t shuffle)
    : what_(std::move(what)), holders_(static_cast<size_t>(count) + 1, 0) {
  for (int64_t id = count; id >= 1; --id) free_.push_back(id);
  if (shuffle == 0) return;
  std::mt19937_64 random(shuffle);
  for (size_t i = free_.size(); i > 1; --i) std::swap(free_[i - 1], free_[random() % i]);
}

std::optional<int64_t> IdPool::take() {
  if (free_.empty()) return std::nullopt;
  const int64_t id = free_.back();
  free_.pop_back();
  holders_[static_cast<size_t>(id)] = 1;
  return id;
}

int64_t IdPool::holders(int64_t id) const {
  LOCKSTEP_CHECK(id >= 1 && id <= count(), kInternal, "{}: {} of {}", what_, id, count());
  return holders_[static_cast<size_t>(id)];
}

void IdPool::hold(int64_t id) {
  LOCKSTEP_CHECK(holders(id) > 0, kInternal, "{}: {} is free and cannot be shared", what_, id);
  ++holders_[static_cast<size_t>(id)];
}

void IdPool::give(int64_t id) {
  LOCKSTEP_CHECK(holders(id) > 0, kInternal, "{}: {} was given back twice", what_, id);
  if (--holders_[static_cast<size_t>(id)] == 0) free_.push_back(id);
}

}  // namespace lockstep::harness
