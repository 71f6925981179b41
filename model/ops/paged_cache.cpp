#include "model/ops/paged_cache.hpp"

#include <cstring>
#include <limits>

namespace lockstep::model {
namespace {

struct Entry {
  uint8_t* bytes;
  uint8_t* scale;
};

/// Where the parts of an entry lie.
Entry entry_at(const Tensor& cache, int64_t page_size, int64_t dim, int64_t slot) {
  const int64_t page_bytes = page_size * (dim + 4);
  LOCKSTEP_CHECK(slot >= 0 && slot < cache.size(0) * page_size,
                 kInternal,
                 "fp8 pages: slot {} is not one of {} pages of {} entries",
                 slot,
                 cache.size(0),
                 page_size);
  auto* page = static_cast<uint8_t*>(cache.data_ptr()) + slot / page_size * page_bytes;
  const int64_t entry = slot % page_size;
  return {page + entry * dim, page + page_size * dim + 4 * entry};
}

void check_pages(const Tensor& cache, int64_t page_size, int64_t dim, const Tensor& slots) {
  check_shape(cache, {-1, page_size * (dim + 4)}, "fp8 pages: cache [pages, page * (dim + 4)]");
  check_dtype(cache, at::kByte, "fp8 pages: cache");
  check_shape(slots, {-1}, "fp8 pages: slots [n]");
  check_dtype(slots, at::kLong, "fp8 pages: slots");
}

}  // namespace

int64_t PageTable::slot(int64_t entry) const {
  LOCKSTEP_CHECK(entry >= 0 && entry < capacity(),
                 kInternal,
                 "page table: entry {} is beyond {} pages of {} entries",
                 entry,
                 pages.size(),
                 page_size);
  return pages[static_cast<size_t>(entry / page_size)] * page_size + entry % page_size;
}

Tensor PageTable::slots(int64_t begin, int64_t end) const {
  Tensor result = at::empty({end - begin}, at::kLong);
  auto* out = result.mutable_data_ptr<int64_t>();
  for (int64_t entry = begin; entry < end; ++entry) *out++ = slot(entry);
  return result;
}

Tensor to_slots(const Tensor& entries, const PageTable& table) {
  check_dtype(entries, at::kInt, "page table: entries");
  const Tensor in = entries.contiguous();
  Tensor result = at::empty_like(in);
  const auto* from = in.const_data_ptr<int32_t>();
  auto* to = result.mutable_data_ptr<int32_t>();
  for (int64_t i = 0; i < in.numel(); ++i) {
    if (from[i] == -1) {
      to[i] = -1;
      continue;
    }
    const int64_t slot = table.slot(from[i]);
    LOCKSTEP_CHECK(slot <= std::numeric_limits<int32_t>::max(),
                   kShape,
                   "page table: slot {} does not fit int32; use fewer pages",
                   slot);
    to[i] = static_cast<int32_t>(slot);
  }
  return result;
}

Tensor empty_fp8_pages(int64_t pages, int64_t page_size, int64_t dim) {
  return at::zeros({pages, page_size * (dim + 4)}, at::kByte);
}

void write_fp8(const Tensor& cache, int64_t page_size, const Tensor& slots, const Fp8Rows& rows) {
  check_shape(rows.bytes, {slots.size(0), -1}, "fp8 pages: bytes [n, dim]");
  check_shape(rows.scale, {slots.size(0)}, "fp8 pages: scale [n]");
  const int64_t dim = rows.bytes.size(1);
  check_pages(cache, page_size, dim, slots);
  const Tensor bytes = rows.bytes.contiguous(), scale = rows.scale.contiguous();
  for (int64_t i = 0; i < slots.size(0); ++i) {
    const Entry entry = entry_at(cache, page_size, dim, slots.const_data_ptr<int64_t>()[i]);
    std::memcpy(entry.bytes, bytes.const_data_ptr<uint8_t>() + i * dim, static_cast<size_t>(dim));
    std::memcpy(entry.scale, scale.const_data_ptr<float>() + i, 4);
  }
}

Fp8Rows read_fp8(const Tensor& cache, int64_t page_size, int64_t dim, const Tensor& slots) {
  check_pages(cache, page_size, dim, slots);
  Fp8Rows rows{at::empty({slots.size(0), dim}, at::kByte), at::empty({slots.size(0)}, at::kFloat)};
  for (int64_t i = 0; i < slots.size(0); ++i) {
    const Entry entry = entry_at(cache, page_size, dim, slots.const_data_ptr<int64_t>()[i]);
    std::memcpy(
        rows.bytes.mutable_data_ptr<uint8_t>() + i * dim, entry.bytes, static_cast<size_t>(dim));
    std::memcpy(rows.scale.mutable_data_ptr<float>() + i, entry.scale, 4);
  }
  return rows;
}

}  // namespace lockstep::model
