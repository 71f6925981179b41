// Page tables, rings, FP8 pages, and operators that read a cache instead of a document.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "model/ops/indexer.hpp"
#include "model/ops/paged_cache.hpp"
#include "model/ops/sparse_mla.hpp"
#include "tests/unit/ops_test_support.hpp"

namespace lockstep::model::test {
namespace {

std::string message(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(PageTable, B20FortyPoolsLieInFortySlotsOfTheirOwnPages) {
  // 160 tokens; pages of pools that do and do not divide a block of 40 tokens.
  for (const int64_t kpool : {1, 4, 8}) {
    for (const int64_t page : {2, 3, 5, 7}) {
      const int64_t pools = 160 / kpool, pages = (pools + page - 1) / page;
      PageTable table{.pages = {}, .page_size = page};
      for (int64_t i = 0; i < pages; ++i) table.pages.push_back(1 + (i * 29 + 11) % 1009);
      const Tensor slots = table.slots(0, pools);
      std::set<int64_t> seen;
      for (int64_t p = 0; p < pools; ++p) {
        const auto slot = slots[p].item<int64_t>();
        seen.insert(slot);
        EXPECT_EQ(slot / page, table.pages[static_cast<size_t>(p / page)]);
        EXPECT_EQ(slot % page, p % page);
      }
      EXPECT_EQ(static_cast<int64_t>(seen.size()), pools);
    }
  }
}

TEST(PageTable, ReadsBeyondTheTableAreRefused) {
  const PageTable table{.pages = {3, 9}, .page_size = 4};
  EXPECT_EQ(table.slot(7), 39);
  EXPECT_THAT(message([&] { (void)table.slot(8); }),
              testing::HasSubstr("entry 8 is beyond 2 pages of 4"));
  EXPECT_THAT(message([&] { (void)table.slot(-1); }), testing::HasSubstr("entry -1"));
}

TEST(PageTable, UnusedEntriesStayUnused) {
  const PageTable table{.pages = {3, 9}, .page_size = 4};
  const Tensor entries = at::tensor({0, 5, -1, 7, -1, -1}, at::kInt).view({2, 3});
  EXPECT_TRUE(at::equal(to_slots(entries, table),
                        at::tensor({12, 37, -1, 39, -1, -1}, at::kInt).view({2, 3})));
  EXPECT_THAT(message([&] { to_slots(at::tensor({8}, at::kInt), table); }),
              testing::HasSubstr("entry 8"));
}

TEST(Ring, B22StaysInItsOwnBlockHoweverLongTheRequestIs) {
  for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(ring_slot(13, 188 + i, 4), 52 + i);
  for (int64_t position = 0; position <= 10000; ++position) {
    EXPECT_GE(ring_slot(13, position, 4), 52);
    EXPECT_LE(ring_slot(13, position, 4), 55);
  }
  EXPECT_EQ(ring_slot(13, 1000000, 4), 52);
}

TEST(Fp8Pages, KeepValuesFirstThenScalesAndReadBackTheSameBytes) {
  const int64_t page = 3, dim = 16;
  const Tensor cache = empty_fp8_pages(5, page, dim);
  EXPECT_EQ(cache.size(1), page * (dim + 4));
  const Fp8Rows rows = quantise_rows(random("rows", {4, dim}).to(at::kFloat), Fp8Scale::kPow2);
  const Tensor slots = at::tensor({13, 3, 8, 5}, at::kLong);
  write_fp8(cache, page, slots, rows);
  const Fp8Rows back = read_fp8(cache, page, dim, slots);
  EXPECT_TRUE(same_bytes(back.bytes, rows.bytes));
  EXPECT_TRUE(same_bytes(back.scale, rows.scale));
  // Slot 13 is entry 1 of page 4.
  EXPECT_TRUE(same_bytes(cache[4].narrow(0, dim, dim), rows.bytes[0]));
  EXPECT_TRUE(same_bytes(cache[4].narrow(0, page * dim + 4, 4).view(at::kFloat)[0], rows.scale[0]));
  EXPECT_EQ(cache[0].count_nonzero().item<int64_t>(), 0);
  EXPECT_THAT(message([&] { read_fp8(cache, page, dim, at::tensor({15}, at::kLong)); }),
              testing::HasSubstr("slot 15"));
}

TEST(SelectKeys, QuantisedPoolsFromACacheChooseTheSameKeys) {
  const Numerics num = with("fsdp-bf16", {{"D30", "fp8"}});
  const IndexerParams params{.num_heads = 8, .head_dim = 16, .kpool = 4, .topk = 16};
  const Packing packing = Packing::of_lengths({90}).shard(50, 90);
  const Tensor q = random("q", {40, 8, 16}).to(num.act()),
               weight = random("w", {40, 8}).to(num.acc()),
               pooled = random("pk", {22, 16}).to(num.act());
  const Fp8Rows rows = quantise_pools(pooled, num);
  EXPECT_TRUE(at::equal(select_keys(q, weight, rows, packing, params, num),
                        select_keys(q, weight, pooled, packing, params, num)));
  EXPECT_THAT(message([&] {
                select_keys(
                    q.to(at::kFloat), weight, rows, packing, params, Numerics::policy("float32"));
              }),
              testing::HasSubstr("does not score in fp8"));
}

TEST(SparseMlaAbsorbed, GivesTheBitsOfTheOneMatrixFormFromAnySlots) {
  const int64_t tokens = 9, keys = 30, width = 12, heads = 3, d_n = 8, d_v = 6, rank = 16;
  for (const char* policy : {"float64", "float32", "fsdp-bf16"}) {
    const Numerics num = Numerics::policy(policy);
    const Tensor q = random("q", {tokens, heads, d_n}).to(num.act()),
                 latent = random("c", {keys, rank}).to(num.act()),
                 kv_b = random("kv", {heads * (d_n + d_v), rank}).to(num.act());
    Tensor selection = at::full({tokens, width}, -1, at::kInt);
    for (int64_t t = 1; t < tokens; ++t) {
      for (int64_t i = 0; i < std::min(t + 2, width); ++i)
        selection[t][i] = static_cast<int32_t>((t * 5 + i * 7) % keys);
    }
    const Tensor by_head = kv_b.view({heads, d_n + d_v, rank});
    const Tensor w_k = by_head.narrow(1, 0, d_n).contiguous(),
                 w_v = by_head.narrow(1, d_n, d_v).transpose(1, 2).contiguous();
    const Tensor want = sparse_mla(q, latent, kv_b, selection, d_v, num);
    EXPECT_TRUE(same_bytes(sparse_mla_absorbed(q, latent, w_k, w_v, selection, num), want))
        << policy;
    // The rows in pages, in another order.
    const PageTable table{.pages = {7, 2, 9, 1, 5, 11, 3, 4}, .page_size = 4};
    const Tensor cache =
        at::full({48, rank}, std::numeric_limits<double>::quiet_NaN(), latent.options());
    cache.index_copy_(0, table.slots(0, keys), latent);
    EXPECT_TRUE(
        same_bytes(sparse_mla_absorbed(q, cache, w_k, w_v, to_slots(selection, table), num), want))
        << policy;
  }
}

}  // namespace
}  // namespace lockstep::model::test
