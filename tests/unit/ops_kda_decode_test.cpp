// KDA one token at a time on states in slots.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "model/ops/kda_decode.hpp"
#include "tests/unit/ops_kda_support.hpp"

namespace lockstep::model::test {
namespace {

KdaInput input(const std::vector<int64_t>& lengths,
               int64_t heads,
               int64_t dim,
               const Numerics& num) {
  const std::vector<int64_t> cu = boundaries(lengths);
  const int64_t tokens = cu.back();
  KdaInput in;
  in.q = seeded({tokens, heads, dim}, "q").to(num.act());
  in.k = seeded({tokens, heads, dim}, "k").to(num.act());
  in.v = seeded({tokens, heads, dim}, "v").to(num.act());
  in.f = seeded({tokens, heads, dim}, "f", 3).to(num.act());
  in.beta_logit = seeded({tokens, heads}, "beta", 2).to(num.act());
  in.a_log = seeded({heads}, "a").to(num.acc());
  in.dt_bias = seeded({heads * dim}, "dt").to(num.acc());
  in.cu = cu;
  in.lower_bound = -5.0;
  return in;
}

/// Rows [begin, end) of a one-segment input.
KdaInput part(const KdaInput& in, int64_t begin, int64_t end) {
  KdaInput p = in;
  for (Tensor KdaInput::*field :
       {&KdaInput::q, &KdaInput::k, &KdaInput::v, &KdaInput::f, &KdaInput::beta_logit})
    p.*field = (in.*field).narrow(0, begin, end - begin);
  p.cu = {0, end - begin};
  return p;
}

Tensor states(int64_t slots, int64_t heads, int64_t dim, at::ScalarType dtype) {
  return seeded({slots, heads, dim, dim}, "states").to(dtype);
}

TEST(KdaDecode, EqualsThePlainRecurrenceWithTheStateTransposed) {
  for (const char* policy : {"float64", "float32", "hf-bf16", "fsdp-bf16"}) {
    for (const int64_t dim : {16, 5}) {
      const Numerics num = Numerics::policy(policy);
      const KdaInput in = input({1, 3, 0, 1}, 3, dim, num);
      const Tensor slots = at::tensor({4, 2, 1, 5}, at::kLong);
      Tensor fast = states(6, 3, dim, num.acc()), plain = fast.clone();
      const Tensor o = kda_decode(in, slots, fast, num),
                   want = kda_decode_reference(in, slots, plain, num);
      const double bound = num.act() == at::kDouble ? 1e-14 : num.is_bf16() ? 4e-3 : 1e-6;
      EXPECT_CLOSE(o, want, bound) << policy;
      EXPECT_CLOSE(fast, plain, num.act() == at::kDouble ? 1e-14 : 1e-6) << policy;
      // Slots that nobody named, and that of the empty segment, keep their bytes.
      for (const int64_t slot : {0, 1, 3})
        EXPECT_TRUE(same_bytes(fast[slot], states(6, 3, dim, num.acc())[slot])) << slot;
    }
  }
}

TEST(KdaDecode, ContinuesAChunkedPrefill) {
  const Numerics num = Numerics::policy("float64");
  const KdaInput in = input({150}, 2, 16, num);
  const KdaOutput whole = kda_chunk(in, num);
  const KdaOutput first = kda_chunk(part(in, 0, 130), num);
  Tensor cache = at::zeros({3, 2, 16, 16}, at::kDouble);
  cache[2].copy_(first.final_state[0].transpose(-1, -2));
  std::vector<Tensor> o{first.o};
  for (int64_t t = 130; t < 150; ++t)
    o.push_back(kda_decode(part(in, t, t + 1), at::tensor({2}, at::kLong), cache, num));
  EXPECT_CLOSE(at::cat(o), whole.o, 1e-13);
  EXPECT_CLOSE(cache[2].transpose(-1, -2), whole.final_state[0], 1e-13);
}

TEST(KdaDecode, SlotZeroIsNobodys) {
  const Numerics num = Numerics::policy("float32");
  const KdaInput in = input({1, 1}, 2, 16, num);
  Tensor cache = states(3, 2, 16, at::kFloat);
  const Tensor before = cache.clone();
  const Tensor o = kda_decode(in, at::tensor({0, 2}, at::kLong), cache, num);
  EXPECT_EQ(o[0].abs().max().item<float>(), 0);
  EXPECT_TRUE(same_bytes(cache[0], before[0]));
  EXPECT_FALSE(same_bytes(cache[2], before[2]));
}

TEST(KdaDecode, ARowsBytesDoNotDependOnTheBatch) {
  const Numerics num = Numerics::policy("float32");
  const KdaInput in = input({4}, 4, 24, num);
  Tensor together = states(5, 4, 24, at::kFloat), apart = together.clone();
  KdaInput batch = in;
  batch.cu = {0, 1, 2, 3, 4};
  const Tensor o = kda_decode(batch, at::tensor({1, 2, 3, 4}, at::kLong), together, num);
  for (int64_t t = 3; t >= 0; --t) {
    const Tensor one = kda_decode(part(in, t, t + 1), at::tensor({t + 1}, at::kLong), apart, num);
    EXPECT_TRUE(same_bytes(one, o.narrow(0, t, 1))) << t;
  }
  EXPECT_TRUE(same_bytes(together, apart));
}

TEST(KdaDecode, StatesMayBeKeptInBfloat16) {
  const Numerics num = Numerics::policy("hf-bf16");
  const KdaInput in = input({6}, 2, 16, num);
  Tensor narrow = states(2, 2, 16, at::kBFloat16), plain = narrow.clone();
  const Tensor slots = at::tensor({1}, at::kLong);
  const Tensor o = kda_decode(in, slots, narrow, num),
               want = kda_decode_reference(in, slots, plain, num);
  EXPECT_CLOSE(o, want, 1e-2);
  EXPECT_CLOSE(narrow, plain, 1e-2);
}

TEST(KdaDecode, NamesASlotThatIsWrongOrTaken) {
  const Numerics num = Numerics::policy("float32");
  const KdaInput in = input({1, 1}, 2, 16, num);
  const Tensor cache = states(3, 2, 16, at::kFloat);
  const auto message = [&](const Tensor& slots) -> std::string {
    try {
      kda_decode(in, slots, cache, num);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(message(at::tensor({1, 3}, at::kLong)), testing::HasSubstr("slots[1] = 3"));
  EXPECT_THAT(message(at::tensor({2, 2}, at::kLong)), testing::HasSubstr("slot 2 is given to two"));
}

}  // namespace
}  // namespace lockstep::model::test
