// Numbered things that are handed out and come back: pages, slots.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::harness {

/// Ids 1 ... count; 0 is nobody's. An id may have several holders and is free again when the last
/// one gave it back.
class IdPool {
 public:
  /// Ascending, or in a random order that `shuffle` (not 0) seeds. `what` names the pool in errors.
  IdPool(std::string what, int64_t count, uint64_t shuffle = 0);

  /// Empty when none is free.
  std::optional<int64_t> take();
  /// One more holder. Throws kInternal for an id that is free.
  void hold(int64_t id);
  /// One holder less. Throws kInternal for an id that is free.
  void give(int64_t id);

  [[nodiscard]] int64_t free() const { return static_cast<int64_t>(free_.size()); }
  [[nodiscard]] int64_t count() const { return static_cast<int64_t>(holders_.size()) - 1; }
  [[nodiscard]] int64_t holders(int64_t id) const;

 private:
  std::string what_;
  std::vector<int64_t> free_;  ///< next one last
  std::vector<int64_t> holders_;
};

}  // namespace lockstep::harness
