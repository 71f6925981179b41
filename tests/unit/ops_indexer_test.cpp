// The indexer: normalisation, pooling, scoring and selection, plain and fast.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "model/base/seeded.hpp"
#include "model/ops/indexer.hpp"
#include "model/ops/indexer_kernel.hpp"

namespace lockstep::model {
namespace {

Tensor seeded(std::string_view name, at::IntArrayRef sizes, const Numerics& num) {
  const int64_t n = std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  return at::tensor(seeded_uniform(11, name, n)).reshape(sizes).to(num.act());
}

Numerics policy(std::string_view name) { return Numerics::policy(name); }

struct Case {
  Packing packing;
  IndexerParams params;
  Tensor q, weight, pooled;

  [[nodiscard]] Tensor fast(const Numerics& num) const {
    return select_keys(q, weight, pooled, packing, params, num);
  }
  [[nodiscard]] Tensor plain(const Numerics& num) const {
    return select_keys_reference(q, weight, pooled, packing, params, num);
  }
};

Case make_case(const std::vector<int64_t>& lengths, IndexerParams params, const Numerics& num) {
  Packing packing = Packing::of_lengths(lengths);
  const int64_t tokens = packing.global_tokens();
  const int64_t pools = indexer::pool_offsets(packing.cu_seqlens(), params.kpool).back();
  const auto weight_dtype = num.is<Switch::kIndexerHeadWeights>("bf16") ? num.act() : num.acc();
  return {packing,
          params,
          seeded("q", {tokens, params.num_heads, params.head_dim}, num),
          seeded("w", {tokens, params.num_heads}, num).to(weight_dtype),
          seeded("pk", {pools, params.head_dim}, num)};
}

/// Sets of selected keys, row by row.
std::vector<std::vector<int32_t>> sets(const Tensor& selection) {
  std::vector<std::vector<int32_t>> rows;
  const auto* p = selection.const_data_ptr<int32_t>();
  for (int64_t t = 0; t < selection.size(0); ++t) {
    std::vector<int32_t> row;
    for (int64_t i = 0; i < selection.size(1); ++i, ++p) {
      if (*p >= 0) row.push_back(*p);
    }
    std::sort(row.begin(), row.end());
    rows.push_back(row);
  }
  return rows;
}

/// Fraction of selected keys that two selections share.
double overlap(const Tensor& a, const Tensor& b) {
  const auto x = sets(a), y = sets(b);
  size_t shared = 0, total = 0;
  for (size_t t = 0; t < x.size(); ++t) {
    std::vector<int32_t> both;
    std::set_intersection(
        x[t].begin(), x[t].end(), y[t].begin(), y[t].end(), std::back_inserter(both));
    shared += both.size();
    total += std::max(x[t].size(), y[t].size());
  }
  return total == 0 ? 1.0 : static_cast<double>(shared) / static_cast<double>(total);
}

Tensor sine(int64_t n, double a, at::IntArrayRef sizes) {
  std::vector<double> x;
  for (int64_t i = 0; i < n; ++i) x.push_back(std::sin(a * static_cast<double>(i + 1)));
  return at::tensor(x).reshape(sizes);
}

TEST(IndexerPool, GivesTheRecordedNumbers) {
  const Numerics num = policy("float64");
  const Tensor k = sine(8, 0.7, {4, 2}), gate = sine(8, 1.9, {4, 2}), ape = sine(8, 0.2, {4, 2});
  for (const Tensor& pk : {pool_keys(k, gate, ape, {0, 4}, 4, num),
                           pool_keys_reference(k, gate, ape, {0, 4}, 4, num)}) {
    EXPECT_NEAR(pk[0][0].item<double>(), -0.2596288388, 2e-10);
    EXPECT_NEAR(pk[0][1].item<double>(), -0.0926014603, 2e-10);
  }
}

TEST(IndexerPool, FastEqualsPlainForEveryPoolSizeAndAwkwardDocuments) {
  for (const int64_t kpool : {1, 3, 4, 16}) {
    const Packing packing = Packing::of_lengths({0, 1, kpool - 1, kpool, 37, 0, 2 * kpool + 1});
    const int64_t tokens = packing.global_tokens();
    for (const std::string_view name : {"float64", "float32", "hf-bf16", "fsdp-bf16"}) {
      const Numerics num = policy(name);
      const Tensor k = seeded("k", {tokens, 24}, num), gate = seeded("g", {tokens, 24}, num) * 3;
      const Tensor ape = seeded("ape", {kpool, 24}, num);
      const Tensor fast = pool_keys(k, gate, ape, packing.cu_seqlens(), kpool, num);
      const Tensor plain = pool_keys_reference(k, gate, ape, packing.cu_seqlens(), kpool, num);
      ASSERT_EQ(fast.sizes(), plain.sizes());
      ASSERT_EQ(fast.scalar_type(), num.act());
      const double bound = name == "float64" ? 1e-15 : name == "float32" ? 1e-6 : 0.0079;
      const Tensor difference = (fast.to(at::kDouble) - plain.to(at::kDouble)).abs();
      EXPECT_LE(difference.max().item<double>(), bound) << name << " kpool " << kpool;
      // In bf16 only a value next to a rounding boundary may move, so nearly all are equal.
      EXPECT_LE(difference.count_nonzero().item<int64_t>(),
                num.is_bf16() ? fast.numel() / 50 : fast.numel());
    }
  }
}

TEST(IndexerPool, RoundingsOfTheTwoFormsDiffer) {
  const Numerics hf = policy("hf-bf16"), trainer = policy("fsdp-bf16");
  const Tensor k = seeded("k", {64, 16}, hf), gate = seeded("g", {64, 16}, hf),
               ape = seeded("ape", {4, 16}, hf);
  EXPECT_FALSE(at::equal(pool_keys(k, gate, ape, {0, 64}, 4, hf),
                         pool_keys(k, gate, ape, {0, 64}, 4, trainer)));
}

TEST(IndexerPool, PackedDocumentsPoolAsIfAlone) {
  const Numerics num = policy("float32");
  const std::vector<int64_t> lengths = {5, 0, 1, 19, 8};
  const Packing packing = Packing::of_lengths(lengths);
  const Tensor k = seeded("k", {33, 24}, num), gate = seeded("g", {33, 24}, num),
               ape = seeded("ape", {4, 24}, num);
  std::vector<Tensor> alone;
  for (size_t d = 0; d < lengths.size(); ++d) {
    const int64_t b = packing.cu_seqlens()[d], e = packing.cu_seqlens()[d + 1];
    alone.push_back(pool_keys(k.slice(0, b, e), gate.slice(0, b, e), ape, {0, e - b}, 4, num));
  }
  EXPECT_TRUE(at::equal(pool_keys(k, gate, ape, packing.cu_seqlens(), 4, num), at::cat(alone)));
}

TEST(IndexerLayerNorm, FastEqualsPlainAndTheLibrary) {
  for (const std::string_view name : {"float64", "float32", "hf-bf16", "fsdp-bf16"}) {
    const Numerics num = policy(name);
    for (const int64_t rows : {0, 1, 37}) {
      const Tensor x = seeded("x", {rows, 67}, num) * 5, w = seeded("w", {67}, num).to(num.acc()),
                   b = seeded("b", {67}, num);
      const Tensor fast = indexer_layer_norm(x, w, b, num),
                   plain = indexer_layer_norm_reference(x, w, b, num);
      ASSERT_EQ(fast.scalar_type(), num.act());
      const double bound = name == "float64" ? 2e-15 : name == "float32" ? 2e-6 : 0.016;
      if (rows == 0) continue;
      EXPECT_LE((fast - plain).abs().max().item<double>(), bound) << name;
      if (num.is_bf16()) continue;
      const Tensor library = at::layer_norm(x, {67}, w, b, 1e-6);
      EXPECT_LE((fast - library).abs().max().item<double>(), bound) << name;
    }
  }
}

TEST(IndexerSelect, FastEqualsPlainInFloat64ForEveryPoolSizeAndAwkwardDocuments) {
  const Numerics num = policy("float64");
  for (const int64_t kpool : {1, 3, 4, 16}) {
    for (const bool tail : {true, false}) {
      const IndexerParams params{5, 16, kpool, 4 * kpool, tail};
      const Case c =
          make_case({0, 1, kpool - 1, kpool, 203, 0, 8 * kpool + 1, 5 * kpool}, params, num);
      EXPECT_TRUE(at::equal(c.fast(num), c.plain(num))) << "kpool " << kpool << " tail " << tail;
    }
  }
}

TEST(IndexerSelect, FastEqualsPlainWhenPoolsFillSeveralPanels) {
  const Numerics num = policy("float64");
  const Case c = make_case({450, 3}, {3, 8, 1, 20}, num);
  EXPECT_TRUE(at::equal(c.fast(num), c.plain(num)));
}

TEST(IndexerSelect, FastAndPlainAgreeInEveryPolicyUpToNearTies) {
  for (const std::string_view name : {"float32", "hf-bf16", "fsdp-bf16", "fsdp-fp32-islands"}) {
    const Numerics num = policy(name);
    const Case c = make_case({300, 41, 7}, {24, 64, 4, 64}, num);
    EXPECT_GE(overlap(c.fast(num), c.plain(num)), 0.999) << name;
  }
}

TEST(IndexerSelect, ScoringPrecisionsDifferButOverlap) {
  Numerics fp8 = policy("fsdp-bf16"), plain = fp8, bf16 = fp8, exact_scale = fp8, no_rotation = fp8;
  plain.set("D30", "unquantised");
  bf16.set("D30", "bf16");
  exact_scale.set("D32", "exact");
  no_rotation.set("D31", "off");
  const Case c = make_case({600}, {24, 64, 4, 64}, fp8);
  const Tensor full = c.fast(plain);
  for (const Numerics* num : {&fp8, &bf16, &exact_scale, &no_rotation}) {
    const double shared = overlap(full, c.fast(*num));
    EXPECT_LT(shared, 1.0) << num->name();
    EXPECT_GT(shared, 0.9) << num->name();
    EXPECT_GE(overlap(c.plain(*num), c.fast(*num)), 0.999) << num->name();
  }
}

TEST(IndexerSelect, B25CountsFollowCompletedPoolsAndTheTailComesRightAfter) {
  const Numerics num = policy("float64");
  const Case c = make_case({40}, {4, 16, 4, 24}, num);
  const Tensor selection = c.fast(num);
  const auto rows = sets(selection);
  const std::vector<std::pair<size_t, size_t>> counts = {
      {1, 1}, {3, 3}, {4, 4}, {5, 5}, {24, 24}, {27, 27}, {28, 24}, {29, 25}, {32, 24}};
  for (const auto& [visible, count] : counts) EXPECT_EQ(rows[visible - 1].size(), count) << visible;
  for (size_t visible = 1; visible <= 40; ++visible) {
    const auto* row = selection.const_data_ptr<int32_t>() + (visible - 1) * 27;
    const size_t count = rows[visible - 1].size();
    // First the selection, then only -1; the own unfinished pool is always visible.
    for (size_t i = 0; i < 27; ++i) EXPECT_EQ(row[i] >= 0, i < count);
    for (size_t t = visible / 4 * 4; t < visible; ++t) {
      EXPECT_TRUE(std::binary_search(
          rows[visible - 1].begin(), rows[visible - 1].end(), static_cast<int32_t>(t)));
    }
    if (visible > 27) continue;
    std::vector<int32_t> all(visible);
    std::iota(all.begin(), all.end(), 0);
    EXPECT_EQ(rows[visible - 1], all);
  }
}

TEST(IndexerSelect, B24UnusedEntriesAreMinusOneAndIdsStayInTheDocument) {
  const Numerics num = policy("float32");
  const std::vector<int64_t> lengths = {1, 3, 4, 5, 200};
  const Case c = make_case(lengths, {4, 16, 4, 24}, num);
  const Tensor first = c.fast(num);
  const auto* p = first.const_data_ptr<int32_t>();
  for (size_t d = 0, t = 0; d < lengths.size(); ++d) {
    const auto begin = static_cast<int32_t>(c.packing.cu_seqlens()[d]);
    for (int64_t i = 0; i < lengths[d]; ++i, ++t) {
      for (int64_t s = 0; s < 27; ++s, ++p) {
        EXPECT_TRUE(*p == -1 || (*p >= begin && *p <= begin + static_cast<int32_t>(i))) << *p;
      }
    }
  }
  // Whatever freed memory holds, the result is the same.
  for (const double fill : {1e30, std::nan("")}) {
    for (int i = 0; i < 20; ++i) at::full({first.size(0), 27}, fill, at::kFloat);
    EXPECT_TRUE(at::equal(first, c.fast(num)));
  }
}

TEST(IndexerSelect, B32TiesGoToTheLowestPools) {
  for (const std::string_view name : {"float64", "float32", "hf-bf16", "fsdp-bf16"}) {
    const Numerics num = policy(name);
    Case c = make_case({100, 60}, {4, 16, 4, 24}, num);
    // Every head's product is negative, so every score is exactly zero.
    c.q = at::ones_like(c.q);
    c.pooled = -at::ones_like(c.pooled);
    const Tensor first = c.fast(num);
    EXPECT_TRUE(at::equal(first, c.plain(num))) << name;
    const auto rows = sets(first);
    for (size_t i = 0; i < 6 * 4; ++i) EXPECT_EQ(rows[99][i], static_cast<int32_t>(i));
    for (int i = 0; i < 10; ++i) EXPECT_TRUE(at::equal(first, c.fast(num)));
    // The same document at another place of another row.
    Case moved = c;
    moved.packing = Packing::of_lengths({60, 100});
    moved.q = at::ones_like(c.q);
    const Tensor other = moved.fast(num).slice(0, 60) - 60;
    EXPECT_TRUE(at::equal(at::where(other < 0, -1, other), first.slice(0, 0, 100))) << name;
  }
}

TEST(IndexerSelect, TiesWithLargerScoresAboveFillByLowIndex) {
  const Numerics num = policy("float32");
  Case c = make_case({40}, {1, 1, 1, 4}, num);
  c.q = at::ones_like(c.q);
  c.weight = at::ones_like(c.weight);
  std::vector<float> keys(40, 0.5F);
  keys[7] = 0.75F;
  keys[20] = 0.9F;
  keys[0] = 0.25F;
  c.pooled = at::tensor(keys).reshape({40, 1});
  EXPECT_EQ(sets(c.fast(num))[39], (std::vector<int32_t>{1, 2, 7, 20}));
  EXPECT_TRUE(at::equal(c.fast(num), c.plain(num)));
}

/// The k largest by a stable sort: ties to the lower index, NaN and the forced pool above all.
std::vector<int32_t> sorted_top(const std::vector<float>& scores, int64_t k, int64_t forced) {
  std::vector<int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  const auto rank = [&](int32_t i) {
    const float score = scores[static_cast<size_t>(i)];
    return std::isnan(score) || i == forced ? std::pair(1, 0.0F) : std::pair(0, score);
  };
  std::stable_sort(
      order.begin(), order.end(), [&](int32_t a, int32_t b) { return rank(a) > rank(b); });
  order.resize(static_cast<size_t>(k));
  std::sort(order.begin(), order.end());
  return order;
}

TEST(IndexerSelect, ARunningSelectionEqualsASortOfTheWholeRowInEveryOrder) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const std::vector<std::pair<const char*, std::function<float(int64_t, float)>>> shapes = {
      {"random", [](int64_t, float u) { return u; }},
      {"few values", [](int64_t, float u) { return std::floor(4 * u); }},
      {"ascending", [](int64_t i, float) { return static_cast<float>(i); }},
      {"descending", [](int64_t i, float) { return -static_cast<float>(i); }},
      {"constant", [](int64_t, float) { return -0.0F; }},
      {"signed zeros", [](int64_t, float u) { return u < 0 ? -0.0F : 0.0F; }},
      {"NaN and infinities",
       [](int64_t i, float u) {
         return i % 97 == 5 ? NAN : i % 31 == 0 ? kInf : u < 0 ? -kInf : u;
       }},
      {"all NaN", [](int64_t, float) { return NAN; }}};
  indexer::TopPools<float> top;
  for (const auto& [name, shape] : shapes) {
    for (const int64_t m : {2, 17, 191, 193, 1000, 5000}) {
      const std::vector<float> u = seeded_uniform(9, name, m);
      std::vector<float> scores;
      for (int64_t i = 0; i < m; ++i) scores.push_back(shape(i, u[static_cast<size_t>(i)]));
      for (const int64_t k : {1, 16, 150, 512}) {
        if (k >= m) continue;
        for (const int64_t forced : {int64_t{-1}, m - 1}) {
          top.begin(k, forced);
          for (int64_t first = 0; first < m; first += indexer::kPanel) {
            top.offer(scores.data() + first, first, std::min(indexer::kPanel, m - first));
          }
          std::vector<int32_t> got(static_cast<size_t>(k));
          top.finish(got.data());
          EXPECT_EQ(got, sorted_top(scores, k, forced)) << name << " m " << m << " k " << k;
        }
      }
    }
  }
}

TEST(IndexerSelect, B47TwoPoolsThatDifferByTwoToTheMinusTwelveAreToldApart) {
  for (const std::string_view name : {"float64", "float32"}) {
    const Numerics num = policy(name);
    for (const int64_t larger : {3, 8}) {
      Case c = make_case({12}, {1, 1, 1, 1}, num);
      c.q = at::ones_like(c.q);
      c.weight = at::ones_like(c.weight);
      c.pooled = at::zeros_like(c.pooled);
      c.pooled[3] = 1.0;
      c.pooled[8] = 1.0;
      c.pooled[larger] = 1.0 + std::ldexp(1.0, -12);
      EXPECT_EQ(sets(c.fast(num))[11][0], larger) << name;
      EXPECT_EQ(sets(c.plain(num))[11][0], larger) << name;
    }
  }
}

TEST(IndexerSelect, B48ReluIsAppliedPerHeadBeforeTheWeightedSum) {
  const Numerics num = policy("float64");
  Case c = make_case({3}, {2, 2, 1, 1}, num);
  // Head 0 likes pool 0 by 2 and hates pool 1 by -1; head 1 hates pool 0 by -3 and likes pool 1 by
  // 1. Without the ReLU pool 1 wins (0 against -1); with it pool 0 does (2 against 1). With head 1
  // weighted negatively, pool 2, which head 0 likes by 1.5 and head 1 by 0, wins over pool 1.
  c.q = at::tensor(std::vector<double>{1, 0, 0, 1}).reshape({1, 2, 2}).repeat({3, 1, 1});
  c.weight = at::ones_like(c.weight);
  c.pooled = at::tensor(std::vector<double>{2, -3, -1, 1, 1.5, 0}).reshape({3, 2});
  EXPECT_EQ(sets(c.fast(num))[2][0], 0);
  EXPECT_EQ(sets(c.plain(num))[2][0], 0);
  c.weight = at::tensor(std::vector<double>{0.5, 2}).repeat({3, 1});
  EXPECT_EQ(sets(c.fast(num))[2][0], 1);
  c.weight = at::tensor(std::vector<double>{-1, -1}).repeat({3, 1});
  EXPECT_EQ(sets(c.fast(num))[2][0], 1);
  EXPECT_TRUE(at::equal(c.fast(num), c.plain(num)));
}

TEST(IndexerSelect, B48QueriesInPiecesOfTwentySelectTheSame) {
  const Numerics num = policy("float32");
  const Case c = make_case({60}, {4, 16, 4, 24}, num);
  std::vector<Tensor> pieces;
  for (int64_t b = 0; b < 60; b += 20) {
    pieces.push_back(select_keys(c.q.slice(0, b, b + 20),
                                 c.weight.slice(0, b, b + 20),
                                 c.pooled,
                                 c.packing.shard(b, b + 20),
                                 c.params,
                                 num));
  }
  EXPECT_TRUE(at::equal(at::cat(pieces), c.fast(num)));
}

TEST(IndexerSelect, ShardedQueriesEqualTheWholeRowBitForBitInEveryPolicy) {
  for (const std::string_view name : {"float64", "float32", "hf-bf16", "fsdp-bf16"}) {
    const Numerics num = policy(name);
    const Case c = make_case({33, 0, 150, 1, 90}, {24, 64, 4, 24}, num);
    for (const std::vector<int64_t>& cuts :
         {std::vector<int64_t>{0, 137, 274}, std::vector<int64_t>{0, 7, 7, 34, 183, 274}}) {
      std::vector<Tensor> pieces;
      for (size_t r = 0; r + 1 < cuts.size(); ++r) {
        pieces.push_back(select_keys(c.q.slice(0, cuts[r], cuts[r + 1]),
                                     c.weight.slice(0, cuts[r], cuts[r + 1]),
                                     c.pooled,
                                     c.packing.shard(cuts[r], cuts[r + 1]),
                                     c.params,
                                     num));
      }
      EXPECT_TRUE(at::equal(at::cat(pieces), c.fast(num))) << name;
    }
  }
}

TEST(IndexerSelect, PackedDocumentsSelectAsIfAlone) {
  const Numerics num = policy("float32");
  const Case c = make_case({33, 0, 150, 1, 90}, {24, 64, 4, 24}, num);
  const Tensor whole = c.fast(num);
  const auto offsets = indexer::pool_offsets(c.packing.cu_seqlens(), 4);
  for (size_t d = 0; d < 5; ++d) {
    const int64_t b = c.packing.cu_seqlens()[d], e = c.packing.cu_seqlens()[d + 1];
    const Tensor alone = select_keys(c.q.slice(0, b, e),
                                     c.weight.slice(0, b, e),
                                     c.pooled.slice(0, offsets[d], offsets[d + 1]),
                                     Packing::of_lengths({e - b}),
                                     c.params,
                                     num);
    const Tensor shifted = at::where(alone < 0, alone, alone + b);
    EXPECT_TRUE(at::equal(whole.slice(0, b, e), shifted.to(at::kInt)));
  }
}

TEST(IndexerSelect, ThreadCountDoesNotChangeABit) {
  const Numerics num = policy("fsdp-bf16");
  const Case c = make_case({500, 90}, {24, 64, 4, 24}, num);
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  const Tensor one = c.fast(num);
  for (const int threads : {2, 3, 5}) {
    at::set_num_threads(threads);
    EXPECT_TRUE(at::equal(one, c.fast(num)));
  }
  at::set_num_threads(before);
}

TEST(IndexerSelect, OwnCompletedPoolCompetesUnlessTheSwitchSaysOtherwise) {
  Numerics compete = policy("float64"), always = compete;
  always.set("D36", "always");
  const Case c = make_case({200}, {4, 16, 4, 24}, compete);
  const auto competing = sets(c.fast(compete)), forced = sets(c.fast(always));
  int64_t absent = 0;
  for (size_t t = 3; t < 200; t += 4) {
    const auto own = static_cast<int32_t>(t);
    absent += std::binary_search(competing[t].begin(), competing[t].end(), own) ? 0 : 1;
    EXPECT_TRUE(std::binary_search(forced[t].begin(), forced[t].end(), own));
    EXPECT_EQ(forced[t].size(), competing[t].size());
  }
  EXPECT_GT(absent, 0);
  EXPECT_TRUE(at::equal(c.fast(always), c.plain(always)));
}

TEST(IndexerSelect, B53WrongArgumentsAreRefusedAndInputsStayUntouched) {
  const Numerics num = policy("float32");
  const Case c = make_case({60}, {4, 16, 4, 24}, num);
  const Tensor q = c.q.clone(), weight = c.weight.clone(), pooled = c.pooled.clone();
  const Tensor first = c.fast(num);
  EXPECT_TRUE(at::equal(first, c.fast(num)));
  EXPECT_TRUE(at::equal(q, c.q) && at::equal(weight, c.weight) && at::equal(pooled, c.pooled));
  EXPECT_THROW(select_keys(c.q.slice(1, 1), c.weight, c.pooled, c.packing, c.params, num), Error);
  EXPECT_THROW(select_keys(c.q, c.weight.t(), c.pooled, c.packing, c.params, num), Error);
  EXPECT_THROW(select_keys(c.q, c.weight, c.pooled.slice(0, 1), c.packing, c.params, num), Error);
  EXPECT_THROW(select_keys(c.q.to(at::kDouble), c.weight, c.pooled, c.packing, c.params, num),
               Error);
  const Tensor k = seeded("k", {60, 16}, num);
  EXPECT_THROW(pool_keys(k, k, k.slice(0, 0, 3), {0, 60}, 4, num), Error);
  EXPECT_THROW(pool_keys(k, k, k.slice(0, 0, 4), {0, 59}, 4, num), Error);
  EXPECT_THROW(pool_keys(k, k, k.slice(0, 0, 4), {0, 60}, 0, num), Error);
  EXPECT_THROW(indexer_layer_norm(k, k[0].slice(0, 1), k[0], num), Error);
}

}  // namespace
}  // namespace lockstep::model
