// The operators of the FP8 indexer against a plain implementation written in another language.
#include <gtest/gtest.h>

#include <filesystem>

#include "golden/compare/metrics.hpp"
#include "golden/store/hdf5.hpp"
#include "golden/store/manifest.hpp"
#include "model/base/seeded.hpp"
#include "model/ops/fp8.hpp"
#include "model/ops/indexer.hpp"

namespace lockstep::golden {
namespace {

/// Inputs are seeded by the names and amplitudes of golden/make/indexer_fp8.py.
class GoldenIndexerFp8 : public testing::Test {
 protected:
  static Hdf5Reader open() {
    const auto dir = std::filesystem::path(LOCKSTEP_SOURCE_DIR) / "golden" / "data";
    const auto entry = find_entry(dir, "indexer_fp8");
    verify_entry(dir, entry);
    return Hdf5Reader(dir / entry.file, ErrorKind::kGolden);
  }

  [[nodiscard]] Tensor input(std::string_view name,
                             std::vector<int64_t> shape,
                             double amplitude) const {
    const auto seed = static_cast<uint64_t>(file_.attribute_int("", "seed"));
    const auto u =
        seeded_uniform(seed, fmt::format("indexer_fp8/{}", name), c10::multiply_integers(shape));
    return (at::tensor(u, at::kFloat).to(at::kDouble) * amplitude).to(at::kFloat).reshape(shape);
  }
  [[nodiscard]] int64_t number(std::string_view name) const {
    return file_.attribute_int("", name);
  }

  const Hdf5Reader file_ = open();
  const int64_t heads_ = number("heads"), dim_ = number("head_dim"), kpool_ = number("kpool");
  const Tensor cu_ = file_.read("documents/cu_seqlens");
  const std::vector<int64_t> cu_seqlens_{cu_.data_ptr<int64_t>(),
                                         cu_.data_ptr<int64_t>() + cu_.numel()};
  const int64_t tokens_ = cu_seqlens_.back();
  const Tensor q_ = input("q", {tokens_, heads_, dim_}, 2.0).to(at::kBFloat16);
  const Tensor k_ = input("k", {tokens_, dim_}, 2.0).to(at::kBFloat16);
  const Tensor gate_ = input("gate", {tokens_, dim_}, 3.0).to(at::kBFloat16);
  const Tensor ape_ = input("ape", {kpool_, dim_}, 0.5);
  const Tensor head_weight_ = input("head_weight", {tokens_, heads_}, 1.0);
  const model::Numerics num_ = model::Numerics::policy("fsdp-bf16");
};

TEST_F(GoldenIndexerFp8, PooledKeysAreTheSameBfloat16Values) {
  for (const Tensor& pooled :
       {model::pool_keys(k_, gate_, ape_, cu_seqlens_, kpool_, num_),
        model::pool_keys_reference(k_, gate_, ape_, cu_seqlens_, kpool_, num_)}) {
    const auto c = compare(pooled, file_.read("pooled"), "pooled");
    EXPECT_TRUE(c.same_values()) << c.num_different << " of " << c.num_elements << " differ; "
                                 << (c.first ? describe_divergence(*c.first, "pooled") : "");
  }
}

TEST_F(GoldenIndexerFp8, RotationBytesAndScalesAreTheSame) {
  const Tensor pooled = file_.read("pooled").to(at::kBFloat16);
  const auto mode = model::fp8_scale_mode(num_);
  const Tensor rotated = model::hadamard(pooled);
  EXPECT_TRUE(compare(rotated, file_.read("rotated"), "rotated").same_values());
  const auto k = model::quantise_rows(rotated, mode);
  EXPECT_TRUE(compare(k.bytes, file_.read("k_bytes"), "k_bytes").same_values());
  EXPECT_TRUE(compare(k.scale, file_.read("k_scale"), "k_scale").same_values());

  const auto q = model::quantise_rows(model::hadamard(q_), mode);
  EXPECT_TRUE(compare(q.scale, file_.read("q_scale"), "q_scale").same_values());
  const Tensor place = at::arange(1, dim_ + 1, at::kLong);
  const Tensor checksum = (q.bytes.to(at::kLong) * place).sum(-1);
  EXPECT_TRUE(compare(checksum, file_.read("q_checksum"), "q_checksum").same_values());
  const Tensor sampled = q.bytes.index_select(0, file_.read("q_sampled_tokens"));
  EXPECT_TRUE(compare(sampled, file_.read("q_sampled_bytes"), "q_sampled_bytes").same_values());
}

TEST_F(GoldenIndexerFp8, TheSameKeysAreSelected) {
  const Tensor pooled = file_.read("pooled").to(at::kBFloat16);
  const auto packing = Packing::whole(cu_seqlens_);
  const model::IndexerParams params{heads_, dim_, kpool_, number("topk")};
  const Tensor want = file_.read("selection");
  for (const Tensor& got :
       {model::select_keys(q_, head_weight_, pooled, packing, params, num_),
        model::select_keys_reference(q_, head_weight_, pooled, packing, params, num_)}) {
    const auto c = compare(got, want, "selection");
    EXPECT_TRUE(c.same_values()) << compare_sets(got, want, "selection").first;
  }
}

}  // namespace
}  // namespace lockstep::golden
