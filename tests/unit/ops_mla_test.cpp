// Sparse MLA, plain and fast, forward and backward.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

#include "model/base/seeded.hpp"
#include "model/ops/chain_gemm.hpp"
#include "model/ops/indexer.hpp"
#include "model/ops/sparse_mla.hpp"

namespace lockstep::model {
namespace {

using Op = std::function<Tensor(
    const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t, const Numerics&)>;

Tensor seeded(std::string_view name, at::IntArrayRef sizes) {
  const int64_t n = std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  return at::tensor(seeded_uniform(5, name, n)).reshape(sizes).to(at::kDouble);
}

struct Sizes {
  int64_t tokens, keys, width, heads, d_n, d_v, rank;
};

struct Case {
  Tensor q, latent, kv_b, selection, d_o;
  int64_t d_v;

  [[nodiscard]] Case to(at::ScalarType dtype) const {
    return {q.to(dtype), latent.to(dtype), kv_b.to(dtype), selection, d_o.to(dtype), d_v};
  }
};

struct Result {
  Tensor o, d_q, d_latent, d_kv_b;
};

Result run(Op op, const Case& c, const Numerics& num) {
  const Tensor q = c.q.detach().clone().requires_grad_(true),
               latent = c.latent.detach().clone().requires_grad_(true),
               kv_b = c.kv_b.detach().clone().requires_grad_(true);
  const Tensor o = op(q, latent, kv_b, c.selection, c.d_v, num);
  const auto g = torch::autograd::grad({o}, {q, latent, kv_b}, {c.d_o});
  return {o.detach(), g[0], g[1], g[2]};
}

/// Values with seeded selections: any key, -1 anywhere, some rows empty, repeated keys possible.
Case make_case(const Sizes& s) {
  const Tensor random = seeded("selection", {s.tokens, s.width});
  Tensor selection = ((random + 1) * 0.5 * static_cast<double>(s.keys)).floor().to(at::kInt);
  selection.masked_fill_(seeded("unused", {s.tokens, s.width}) > 0.4, -1);
  for (int64_t t = 2; t < s.tokens; t += 7) selection[t].fill_(-1);
  return {seeded("q", {s.tokens, s.heads, s.d_n}) * 2,
          seeded("c", {s.keys, s.rank}) * 2,
          seeded("w", {s.heads * (s.d_n + s.d_v), s.rank}) * 0.7,
          selection,
          seeded("do", {s.tokens, s.heads, s.d_v}),
          s.d_v};
}

/// Selections of the indexer over packed documents.
Case make_causal_case(const std::vector<int64_t>& lengths,
                      int64_t heads,
                      int64_t rank,
                      int64_t topk,
                      const Numerics& num) {
  const Packing packing = Packing::of_lengths(lengths);
  const int64_t tokens = packing.global_tokens();
  Case c = make_case({tokens, tokens, 1, heads, 8, 6, rank});
  const IndexerParams params{3, 8, 4, topk};
  const int64_t pools = indexer::pool_offsets(packing.cu_seqlens(), 4).back();
  c.selection = select_keys(seeded("iq", {tokens, 3, 8}).to(num.act()),
                            seeded("iw", {tokens, 3}).to(num.act()),
                            seeded("ik", {pools, 8}).to(num.act()),
                            packing,
                            params,
                            num);
  return c.to(num.act());
}

double max_abs(const Tensor& a, const Tensor& b) {
  if (a.numel() == 0) return 0;
  return (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
}

/// Distance relative to the size of b.
double rel_l2(const Tensor& a, const Tensor& b) {
  const Tensor x = b.to(at::kDouble);
  const double norm = x.norm().item<double>();
  return (a.to(at::kDouble) - x).norm().item<double>() / (norm > 0 ? norm : 1.0);
}

void expect_close(const Result& a, const Result& b, double bound, std::string_view what) {
  const auto one = [&](const Tensor& x, const Tensor& y, const char* name) {
    ASSERT_EQ(x.sizes(), y.sizes()) << name;
    ASSERT_EQ(x.scalar_type(), y.scalar_type()) << name;
    const double size = y.numel() == 0 ? 1.0 : std::max(1.0, y.abs().max().item<double>());
    EXPECT_LE(max_abs(x, y) / size, bound) << what << " " << name;
  };
  one(a.o, b.o, "o");
  one(a.d_q, b.d_q, "dq");
  one(a.d_latent, b.d_latent, "dlatent");
  one(a.d_kv_b, b.d_kv_b, "dkv_b");
}

void expect_same_bits(const Result& a, const Result& b, std::string_view what) {
  EXPECT_TRUE(at::equal(a.o, b.o)) << what << " o";
  EXPECT_TRUE(at::equal(a.d_q, b.d_q)) << what << " dq";
  EXPECT_TRUE(at::equal(a.d_latent, b.d_latent)) << what << " dlatent";
  EXPECT_TRUE(at::equal(a.d_kv_b, b.d_kv_b)) << what << " dkv_b";
}

std::vector<Numerics> float64_forms() {
  Numerics absorbed = Numerics::policy("float64"), expanded = absorbed;
  expanded.set("D42", "expanded");
  return {absorbed, expanded};
}

TEST(SparseMla, FastEqualsPlainInFloat64ForwardAndBackwardAtAwkwardSizes) {
  const std::vector<Sizes> all = {{0, 4, 3, 2, 4, 3, 5},
                                  {1, 1, 1, 1, 1, 1, 1},
                                  {5, 3, 0, 2, 4, 3, 5},
                                  {9, 20, 7, 3, 5, 7, 13},
                                  {40, 300, 130, 2, 8, 8, 70},
                                  {70, 90, 33, 40, 4, 6, 67},
                                  {33, 50, 20, 65, 3, 2, 9}};
  for (const Numerics& num : float64_forms()) {
    for (const Sizes& s : all) {
      const Case c = make_case(s);
      expect_close(run(sparse_mla, c, num), run(sparse_mla_reference, c, num), 1e-13, num.name());
    }
  }
}

TEST(SparseMla, FastEqualsPlainInFloat64ForTheIndexersSelections) {
  for (const Numerics& num : float64_forms()) {
    for (const int64_t heads : {1, 4}) {
      const Case c = make_causal_case({30, 0, 1, 3, 4, 150}, heads, 66, 24, num);
      expect_close(run(sparse_mla, c, num), run(sparse_mla_reference, c, num), 1e-13, num.name());
    }
  }
}

TEST(SparseMla, Float32StaysNearFloat64) {
  Numerics absorbed = Numerics::policy("float32"), expanded = absorbed;
  expanded.set("D42", "expanded");
  const Numerics truth = Numerics::policy("float64");
  for (const Numerics& num : {absorbed, expanded}) {
    const Case c = make_causal_case({30, 150, 1}, 4, 64, 24, Numerics::policy("float64"));
    const Result want = run(sparse_mla, c, truth), got = run(sparse_mla, c.to(at::kFloat), num),
                 plain = run(sparse_mla_reference, c.to(at::kFloat), num);
    // As close to the truth as twice the plain form, or 1e-6.
    EXPECT_LE(rel_l2(got.o, want.o), std::max(1e-6, 2 * rel_l2(plain.o, want.o)));
    EXPECT_LE(rel_l2(got.d_q, want.d_q), std::max(1e-6, 2 * rel_l2(plain.d_q, want.d_q)));
    EXPECT_LE(rel_l2(got.d_latent, want.d_latent),
              std::max(1e-6, 2 * rel_l2(plain.d_latent, want.d_latent)));
    EXPECT_LE(rel_l2(got.d_kv_b, want.d_kv_b),
              std::max(1e-6, 2 * rel_l2(plain.d_kv_b, want.d_kv_b)));
  }
}

TEST(SparseMla, Bfloat16FormsRoundWhereThePlainFormsDo) {
  const Numerics truth = Numerics::policy("float64");
  for (const std::string_view name : {"hf-bf16", "fsdp-bf16"}) {
    for (const std::string_view probabilities : {"normalised", "unnormalised", "fp32"}) {
      for (const std::string_view scores : {"bf16", "fp32"}) {
        Numerics num = Numerics::policy(name);
        num.set("D43", scores);
        num.set("D44", probabilities);
        const Case c = make_causal_case({30, 150, 1}, 4, 64, 24, num);
        const Result want = run(sparse_mla, c.to(at::kDouble), truth),
                     got = run(sparse_mla, c, num), plain = run(sparse_mla_reference, c, num);
        // Forward: the same roundings, so nearly every element has the same bits.
        const auto differing = (got.o != plain.o).count_nonzero().item<int64_t>();
        EXPECT_LE(differing, got.o.numel() / 50) << num.name();
        // Backward: the fast form takes delta from the rounded output, as kernels do.
        const auto bounded = [&](const Tensor& x, const Tensor& p, const Tensor& w, const char* t) {
          EXPECT_LE(rel_l2(x, w), 1.5 * rel_l2(p, w) + 1e-4) << num.name() << " " << t;
          EXPECT_GT(rel_l2(x, w), 1e-4) << num.name() << " " << t;
        };
        bounded(got.o, plain.o, want.o, "o");
        bounded(got.d_q, plain.d_q, want.d_q, "dq");
        bounded(got.d_latent, plain.d_latent, want.d_latent, "dlatent");
        bounded(got.d_kv_b, plain.d_kv_b, want.d_kv_b, "dkv_b");
      }
    }
  }
}

TEST(SparseMla, SwitchesOfRoundingChangeBits) {
  Numerics base = Numerics::policy("fsdp-bf16");
  const Case c = make_causal_case({150}, 4, 64, 24, base);
  const Tensor o = sparse_mla(c.q, c.latent, c.kv_b, c.selection, c.d_v, base);
  for (const auto& [id, value] : std::vector<std::pair<const char*, const char*>>{
           {"D42", "expanded"}, {"D43", "bf16"}, {"D44", "normalised"}, {"D44", "fp32"}}) {
    Numerics num = base;
    num.set(id, value);
    EXPECT_FALSE(at::equal(o, sparse_mla(c.q, c.latent, c.kv_b, c.selection, c.d_v, num)))
        << id << " " << value;
  }
}

TEST(SparseMla, B28MaskedEntriesInFrontDoNotCount) {
  for (const std::string_view name : {"float64", "float32", "hf-bf16", "fsdp-bf16"}) {
    const Numerics num = Numerics::policy(name);
    Case c = make_case({6, 9, 21, 3, 8, 6, 10}).to(num.act());
    const Tensor five = at::tensor(std::vector<int32_t>{0, 2, 3, 7, 8}).to(at::kInt).repeat({6, 1});
    Case masked = c, bare = c;
    masked.selection = at::cat({at::full({6, 16}, -1, at::kInt), five}, 1);
    bare.selection = five;
    expect_same_bits(run(sparse_mla, masked, num), run(sparse_mla, bare, num), name);
    const Tensor plain = sparse_mla_reference(c.q, c.latent, c.kv_b, masked.selection, c.d_v, num);
    const double bound = num.is_bf16() ? 0.02 : name == "float32" ? 1e-5 : 1e-13;
    EXPECT_LE(max_abs(run(sparse_mla, masked, num).o, plain), bound) << name;
  }
}

TEST(SparseMla, B28RowsWithoutKeysGiveZeroAndNoGradientAndNoNaN) {
  for (const std::string_view name : {"float64", "float32", "hf-bf16", "fsdp-bf16"}) {
    const Numerics num = Numerics::policy(name);
    for (const Op& op : {Op{sparse_mla}, Op{sparse_mla_reference}}) {
      Case c = make_case({6, 9, 21, 3, 8, 6, 10}).to(num.act());
      c.selection.fill_(-1);
      const Result none = run(op, c, num);
      for (const Tensor& x : {none.o, none.d_q, none.d_latent, none.d_kv_b}) {
        EXPECT_EQ(x.abs().max().item<double>(), 0) << name;
      }
      // One row with keys among rows without: only that row has results and gradients.
      c.selection[3].slice(0, 4, 7).fill_(5);
      const Result one = run(op, c, num);
      for (const Tensor& x : {one.o, one.d_q, one.d_latent, one.d_kv_b}) {
        EXPECT_TRUE(at::isfinite(x.to(at::kDouble)).all().item<bool>()) << name;
      }
      EXPECT_EQ(one.o.slice(0, 0, 3).abs().max().item<double>(), 0);
      EXPECT_EQ(one.d_q.slice(0, 4).abs().max().item<double>(), 0);
      EXPECT_GT(one.o[3].abs().max().item<double>(), 0);
      EXPECT_EQ(one.d_latent.slice(0, 6).abs().max().item<double>(), 0);
    }
  }
}

TEST(SparseMla, B25ShortDocumentsEqualDenseCausalAttention) {
  const Numerics num = Numerics::policy("float64");
  for (int64_t length = 1; length <= 40; ++length) {
    const Case c = make_causal_case({length}, 2, 10, 24, num);
    const Tensor kv =
        at::einsum("sr,hdr->hsd", {c.latent, c.kv_b.reshape({2, 8 + c.d_v, c.latent.size(1)})});
    const Tensor scores = at::einsum("thd,hsd->hts", {c.q, kv.slice(2, 0, 8)}) / std::sqrt(8.0);
    const Tensor future = at::ones({length, length}, at::kBool).triu(1);
    const Tensor dense =
        at::matmul(at::softmax(scores.masked_fill(future, -INFINITY), -1), kv.slice(2, 8))
            .permute({1, 0, 2});
    const Tensor o = sparse_mla(c.q, c.latent, c.kv_b, c.selection, c.d_v, num);
    const int64_t covered = std::min<int64_t>(length, 27);
    EXPECT_LE(max_abs(o.slice(0, 0, covered), dense.slice(0, 0, covered)), 1e-13) << length;
    if (length < 40) continue;
    EXPECT_GT(max_abs(o.slice(0, 27), dense.slice(0, 27)), 1e-3);
  }
}

TEST(SparseMla, PackedDocumentsEqualEachAloneBitForBit) {
  for (const std::string_view name : {"float64", "float32", "hf-bf16", "fsdp-bf16"}) {
    const Numerics num = Numerics::policy(name);
    const std::vector<int64_t> lengths = {30, 0, 1, 3, 150, 4};
    const Packing packing = Packing::of_lengths(lengths);
    const Case c = make_causal_case(lengths, 4, 66, 24, num);
    const Result whole = run(sparse_mla, c, num);
    for (size_t d = 0; d < lengths.size(); ++d) {
      const int64_t b = packing.cu_seqlens()[d], e = packing.cu_seqlens()[d + 1];
      const Tensor s = c.selection.slice(0, b, e);
      const Case alone{c.q.slice(0, b, e),
                       c.latent.slice(0, b, e),
                       c.kv_b,
                       at::where(s < 0, s, s - b).to(at::kInt),
                       c.d_o.slice(0, b, e),
                       c.d_v};
      const Result r = run(sparse_mla, alone, num);
      EXPECT_TRUE(at::equal(r.o, whole.o.slice(0, b, e))) << name << " " << d;
      EXPECT_TRUE(at::equal(r.d_q, whole.d_q.slice(0, b, e))) << name << " " << d;
      EXPECT_TRUE(at::equal(r.d_latent, whole.d_latent.slice(0, b, e))) << name << " " << d;
    }
  }
}

TEST(SparseMla, ShardedQueriesEqualTheWholeRowBitForBit) {
  for (const std::string_view name : {"float64", "float32", "hf-bf16", "fsdp-bf16"}) {
    const Numerics num = Numerics::policy(name);
    const Case c = make_causal_case({30, 0, 150, 4}, 4, 66, 24, num);
    const Result whole = run(sparse_mla, c, num);
    const std::vector<int64_t> cuts = {0, 13, 13, 90, 91, 184};
    Tensor d_latent = at::zeros_like(c.latent, c.latent.options().dtype(at::kDouble));
    for (size_t r = 0; r + 1 < cuts.size(); ++r) {
      const int64_t b = cuts[r], e = cuts[r + 1];
      const Case shard{c.q.slice(0, b, e),
                       c.latent,
                       c.kv_b,
                       c.selection.slice(0, b, e),
                       c.d_o.slice(0, b, e),
                       c.d_v};
      const Result part = run(sparse_mla, shard, num);
      EXPECT_TRUE(at::equal(part.o, whole.o.slice(0, b, e))) << name;
      EXPECT_TRUE(at::equal(part.d_q, whole.d_q.slice(0, b, e))) << name;
      d_latent += part.d_latent.to(at::kDouble);
    }
    const double bound = num.is_bf16() ? 1e-2 : name == "float32" ? 1e-6 : 1e-14;
    EXPECT_LE(rel_l2(d_latent, whole.d_latent), bound) << name;
  }
}

TEST(SparseMla, ThreadsAndVectorWidthDoNotChangeABit) {
  const int before = at::get_num_threads();
  for (const std::string_view name : {"float64", "float32", "hf-bf16", "fsdp-bf16"}) {
    const Numerics num = Numerics::policy(name);
    const Case c = make_causal_case({300, 90}, 4, 66, 24, num);
    at::set_num_threads(1);
    const Result one = run(sparse_mla, c, num);
    for (const int threads : {2, 3, 5}) {
      at::set_num_threads(threads);
      expect_same_bits(run(sparse_mla, c, num), one, name);
    }
    chain_gemm_allow_avx512(false);
    expect_same_bits(run(sparse_mla, c, num), one, name);
    chain_gemm_allow_avx512(true);
  }
  at::set_num_threads(before);
}

TEST(SparseMla, OnlyWantedGradientsAreComputed) {
  const Numerics num = Numerics::policy("float64");
  for (const Numerics& form : float64_forms()) {
    const Case c = make_case({20, 30, 9, 3, 5, 7, 13});
    const Tensor q = c.q.clone().requires_grad_(true);
    const Tensor o = sparse_mla(q, c.latent, c.kv_b, c.selection, c.d_v, form);
    const auto g = torch::autograd::grad({o}, {q}, {c.d_o});
    EXPECT_TRUE(at::equal(g[0], run(sparse_mla, c, form).d_q));
  }
}

TEST(SparseMla, B53WrongArgumentsAreRefusedAndInputsStayUntouched) {
  const Numerics num = Numerics::policy("float32");
  const Case c = make_case({20, 30, 9, 3, 5, 7, 13}).to(at::kFloat);
  const Tensor q = c.q.clone(), latent = c.latent.clone(), kv_b = c.kv_b.clone(),
               selection = c.selection.clone();
  const Result first = run(sparse_mla, c, num);
  expect_same_bits(run(sparse_mla, c, num), first, "twice");
  EXPECT_TRUE(at::equal(q, c.q) && at::equal(latent, c.latent) && at::equal(kv_b, c.kv_b) &&
              at::equal(selection, c.selection));
  const auto call = [&](const Tensor& a, const Tensor& b, const Tensor& w, const Tensor& s) {
    return sparse_mla(a, b, w, s, c.d_v, num);
  };
  EXPECT_THROW(call(q[0], latent, kv_b, selection), Error);
  EXPECT_THROW(call(q, latent.slice(1, 1), kv_b, selection), Error);
  EXPECT_THROW(call(q, latent, kv_b.slice(0, 1), selection), Error);
  EXPECT_THROW(call(q, latent, kv_b, selection.slice(0, 1)), Error);
  EXPECT_THROW(call(q, latent, kv_b, selection.to(at::kLong)), Error);
  EXPECT_THROW(call(q.to(at::kDouble), latent, kv_b, selection), Error);
  for (const int32_t bad : {30, -2}) {
    Tensor wrong = selection.clone();
    wrong[4][2] = bad;
    try {
      call(q, latent, kv_b, wrong);
      FAIL() << "accepted " << bad;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("selection[4, 2]"), std::string::npos);
    }
  }
}

}  // namespace
}  // namespace lockstep::model
