// Latents in FP8 with a scale for each 128 values, alone and in the engine.
#include <gtest/gtest.h>

#include "harness/inference/inference.hpp"
#include "model/ops/fp8.hpp"
#include "model/ops/latent_cache.hpp"
#include "tests/support/compare.hpp"
#include "tests/support/tiny_model.hpp"
#include "tests/unit/ops_test_support.hpp"

namespace lockstep::model {
namespace {

using namespace test;

TEST(LatentCache, EachTileComesBackByItsOwnScale) {
  EXPECT_EQ(fp8_latent_bytes(512), 512 + 16);
  EXPECT_EQ(fp8_latent_bytes(24), 24 + 4);
  for (const int64_t dim : {24, 128, 300}) {
    Tensor rows = random("latents", {5, dim}).to(at::kBFloat16);
    rows.narrow(1, 0, 20).mul_(100);  // the first tile alone has large values
    const Tensor cache = at::full({9, fp8_latent_bytes(dim)}, 0x7f, at::kByte);
    const Tensor slots = at::tensor({7, 0, 3, 8, 2}, at::kLong);
    write_fp8_latents(cache, slots, rows);
    const Tensor got = read_fp8_latents(cache, slots, dim);
    for (int64_t first = 0; first < dim; first += kLatentTile) {
      const int64_t count = std::min(kLatentTile, dim - first);
      const Tensor tile = rows.narrow(1, first, count).to(at::kFloat).contiguous();
      EXPECT_TRUE(same_bytes(got.narrow(1, first, count),
                             dequantise_rows(quantise_rows_reference(tile, Fp8Scale::kExact))))
          << dim << ' ' << first;
    }
    EXPECT_TRUE(
        same_bytes(read_fp8_latents(cache, slots.narrow(0, 2, 1), dim), got.narrow(0, 2, 1)));
    EXPECT_TRUE(cache[1].eq(0x7f).all().item<bool>()) << "a row that nobody wrote";
  }
  EXPECT_THROW(
      write_fp8_latents(
          at::zeros({4, 24}, at::kByte), at::zeros({1}, at::kLong), at::zeros({1, 24}, at::kFloat)),
      Error);
}

TEST(LatentCache, TheEngineServesFromFp8) {
  const harness::Documents docs = tests::tiny_documents({75, 1, 7, 130});
  const auto served = [&](const char* latents, int64_t chunk, int64_t decode, int64_t page) {
    harness::InferenceOptions options;
    options.numerics = with("vllm-bf16", {{"D45", latents}});
    options.prefill_chunk = chunk;
    options.decode = decode;
    options.page_size = page;
    options.shuffle_pages = 3;
    return harness::Inference(tests::tiny(), options, parallel::Mesh::single()).run(docs);
  };
  const harness::InferenceResult wide = served("bf16", 0, 0, 64), fp8 = served("fp8", 0, 0, 64);
  EXPECT_LT(fp8.cache_bytes, wide.cache_bytes);
  EXPECT_FALSE(same_bytes(fp8.logits, wide.logits));
  EXPECT_LE(tests::rel_l2(fp8.logits, wide.logits), 0.5);
  // Where rows lie and which rows of a request are computed together changes nothing.
  EXPECT_TRUE(same_bytes(served("fp8", 0, 0, 3).logits, fp8.logits));
  EXPECT_TRUE(served("fp8", 8, 20, 16).logits.isfinite().all().item<bool>());
}

}  // namespace
}  // namespace lockstep::model
