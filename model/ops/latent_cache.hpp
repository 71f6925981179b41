// Latents of the attention cache in FP8: a row is its e4m3 codes, then a float32 scale for each 128
// of them.
#pragma once

#include "model/base/torch.hpp"

namespace lockstep::model {

inline constexpr int64_t kLatentTile = 128;  ///< values that share a scale; the last may be fewer

/// Bytes of a row of `dim` values.
int64_t fp8_latent_bytes(int64_t dim);

/// rows [n, dim] floating into slots int64 [n] of cache uint8 [slots, bytes]. A tile's scale is
/// max(amax, 1e-4) / 448.
void write_fp8_latents(const Tensor& cache, const Tensor& slots, const Tensor& rows);

/// float32 [n, dim]: codes times their scale.
Tensor read_fp8_latents(const Tensor& cache, const Tensor& slots, int64_t dim);

}  // namespace lockstep::model
