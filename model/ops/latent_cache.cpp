#include "model/ops/latent_cache.hpp"

#include <algorithm>

#include "model/ops/fp8.hpp"

namespace lockstep::model {
namespace {

int64_t tiles_of(int64_t dim) { return (dim + kLatentTile - 1) / kLatentTile; }

/// Calls body(first value, number of values, first byte of the scale) for every tile of a row.
template <typename F>
void for_each_tile(int64_t dim, F&& body) {
  for (int64_t tile = 0; tile < tiles_of(dim); ++tile) {
    const int64_t first = tile * kLatentTile;
    body(first, std::min(kLatentTile, dim - first), dim + 4 * tile);
  }
}

}  // namespace

int64_t fp8_latent_bytes(int64_t dim) { return dim + 4 * tiles_of(dim); }

void write_fp8_latents(const Tensor& cache, const Tensor& slots, const Tensor& rows) {
  check_shape(rows, {slots.size(0), -1}, "latent cache: rows [n, dim]");
  const int64_t dim = rows.size(1);
  check_dtype(cache, at::kByte, "latent cache");
  check_shape(cache, {-1, fp8_latent_bytes(dim)}, "latent cache [slots, bytes]");
  if (slots.size(0) == 0) return;
  const Tensor values = rows.to(at::kFloat),
               packed = at::empty({rows.size(0), cache.size(1)}, at::kByte);
  for_each_tile(dim, [&](int64_t first, int64_t count, int64_t scale_at) {
    const Fp8Rows tile =
        quantise_rows(values.narrow(1, first, count).contiguous(), Fp8Scale::kExact);
    packed.narrow(1, first, count).copy_(tile.bytes);
    packed.narrow(1, scale_at, 4).copy_(tile.scale.contiguous().unsqueeze(1).view(at::kByte));
  });
  cache.index_copy_(0, slots, packed);
}

Tensor read_fp8_latents(const Tensor& cache, const Tensor& slots, int64_t dim) {
  check_dtype(cache, at::kByte, "latent cache");
  check_shape(cache, {-1, fp8_latent_bytes(dim)}, "latent cache [slots, bytes]");
  Tensor rows = at::empty({slots.size(0), dim}, at::kFloat);
  if (slots.size(0) == 0) return rows;
  const Tensor packed = cache.index_select(0, slots);
  for_each_tile(dim, [&](int64_t first, int64_t count, int64_t scale_at) {
    const Tensor scale = packed.narrow(1, scale_at, 4).contiguous().view(at::kFloat).flatten();
    rows.narrow(1, first, count)
        .copy_(dequantise_rows({packed.narrow(1, first, count).contiguous(), scale}));
  });
  return rows;
}

}  // namespace lockstep::model
