// The allocator of CPU tensors, watched: bytes alive by what they are for, and fresh memory filled
// with a pattern for tests. Memory of files (mappings) and of C++ containers is not seen.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

namespace lockstep {

/// What tensor memory is for. An allocation belongs to the scope it was made in, until it is freed.
enum class MemoryKind : uint8_t {
  kOther,            ///< outside of any scope
  kWeights,          ///< this rank's shards in the dtype they are computed with
  kMasters,          ///< this rank's shards as the optimizer keeps them
  kGathered,         ///< whole parameters of the units at work, arriving ones too
  kGatheredExperts,  ///< the same of experts
  kGradients,        ///< this rank's shards of gradients
  kMoments,          ///< of the optimizer
  kActivations,      ///< of units: kept for backward, or made and freed inside
  kExchange,         ///< buffers of collectives
};
inline constexpr size_t kNumMemoryKinds = 9;
inline constexpr std::array<MemoryKind, kNumMemoryKinds> kMemoryKinds = {
    MemoryKind::kOther,
    MemoryKind::kWeights,
    MemoryKind::kMasters,
    MemoryKind::kGathered,
    MemoryKind::kGatheredExperts,
    MemoryKind::kGradients,
    MemoryKind::kMoments,
    MemoryKind::kActivations,
    MemoryKind::kExchange};
std::string_view to_string(MemoryKind kind);

/// Allocations of this thread are of this kind while it lives; scopes nest.
class MemoryScope {
 public:
  explicit MemoryScope(MemoryKind kind);
  MemoryScope(const MemoryScope&) = delete;
  MemoryScope& operator=(const MemoryScope&) = delete;
  ~MemoryScope();

 private:
  MemoryKind before_;
};

using MemoryBytes = std::array<int64_t, kNumMemoryKinds>;

struct MemoryUse {
  [[nodiscard]] int64_t peak_of(MemoryKind kind) const { return peak[static_cast<size_t>(kind)]; }

  MemoryBytes now{};      ///< alive
  MemoryBytes peak{};     ///< of each kind by itself
  MemoryBytes at_peak{};  ///< of each kind when the sum was largest
  int64_t peak_total = 0;
};

/// Puts the watching allocator before torch's. Call before the first tensor that is to be counted;
/// tensors made before stay uncounted. Calling it again does nothing. Costs a lock and
/// an addition for each tensor.
void watch_tensor_memory();

/// Since the start or the last reset; zeros without watch_tensor_memory().
MemoryUse tensor_memory();
/// Peaks start anew from what is alive.
void reset_tensor_memory_peak();

/// For tests, after watch_tensor_memory(): every byte of new tensor memory gets this value before
/// it is handed out (0xff makes NaN of every floating dtype and -1 of integers), nothing: left as
/// it is. Results must not depend on it.
void fill_new_tensors(std::optional<uint8_t> pattern);

}  // namespace lockstep
