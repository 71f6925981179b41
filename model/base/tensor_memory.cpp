#include "model/base/tensor_memory.hpp"

#include <c10/core/Allocator.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>

namespace lockstep {
namespace {

thread_local MemoryKind t_kind = MemoryKind::kOther;

/// Ahead of every block; as long as the alignment that vector loads want.
struct alignas(64) Header {
  size_t bytes;
  MemoryKind kind;
};

class Ledger {
 public:
  void add(MemoryKind kind, int64_t bytes) {
    const std::lock_guard lock(mutex_);
    const auto k = static_cast<size_t>(kind);
    use_.now[k] += bytes;
    total_ += bytes;
    use_.peak[k] = std::max(use_.peak[k], use_.now[k]);
    if (total_ > use_.peak_total) {
      use_.peak_total = total_;
      use_.at_peak = use_.now;
    }
  }
  MemoryUse read() {
    const std::lock_guard lock(mutex_);
    return use_;
  }
  void reset_peak() {
    const std::lock_guard lock(mutex_);
    use_.peak = use_.at_peak = use_.now;
    use_.peak_total = total_;
  }

 private:
  std::mutex mutex_;
  MemoryUse use_;
  int64_t total_ = 0;
};

/// Never destroyed: tensors with static lifetime are freed after everything else.
Ledger& ledger() {
  static auto* const instance = new Ledger;
  return *instance;
}

std::atomic<int> g_fill{-1};

void give_back(void* data) {
  if (data == nullptr) return;
  Header* header = static_cast<Header*>(data) - 1;
  ledger().add(header->kind, -static_cast<int64_t>(header->bytes));
  std::free(header);
}

class Watched final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &give_back, device};
    const size_t whole = (sizeof(Header) + bytes + alignof(Header) - 1) & ~(alignof(Header) - 1);
    auto* header = static_cast<Header*>(std::aligned_alloc(alignof(Header), whole));
    if (header == nullptr) throw std::bad_alloc();
    *header = {bytes, t_kind};
    void* data = header + 1;
    const int fill = g_fill.load(std::memory_order_relaxed);
    if (fill >= 0) std::memset(data, fill, bytes);
    ledger().add(t_kind, static_cast<int64_t>(bytes));
    return {data, data, &give_back, device};
  }
  [[nodiscard]] c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

}  // namespace

std::string_view to_string(MemoryKind kind) {
  switch (kind) {
    case MemoryKind::kWeights:
      return "weights";
    case MemoryKind::kMasters:
      return "masters";
    case MemoryKind::kGathered:
      return "gathered";
    case MemoryKind::kGatheredExperts:
      return "gathered experts";
    case MemoryKind::kGradients:
      return "gradients";
    case MemoryKind::kMoments:
      return "moments";
    case MemoryKind::kActivations:
      return "activations";
    case MemoryKind::kExchange:
      return "exchange";
    default:
      return "other";
  }
}

MemoryScope::MemoryScope(MemoryKind kind) : before_(t_kind) { t_kind = kind; }
MemoryScope::~MemoryScope() { t_kind = before_; }

void watch_tensor_memory() {
  static const bool done = [] {
    // As long-lived as the tensors it made.
    c10::SetAllocator(c10::DeviceType::CPU, new Watched, /*priority=*/100);
    return true;
  }();
  static_cast<void>(done);
}

MemoryUse tensor_memory() { return ledger().read(); }
void reset_tensor_memory_peak() { ledger().reset_peak(); }
void fill_new_tensors(std::optional<uint8_t> pattern) {
  g_fill = pattern ? static_cast<int>(*pattern) : -1;
}

}  // namespace lockstep
