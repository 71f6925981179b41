#include <ATen/Parallel.h>
#include <gmock/gmock.h>

#include "model/ops/chain_gemm.hpp"
#include "model/ops/kda.hpp"
#include "tests/unit/ops_kda_support.hpp"

namespace lockstep::model {
namespace {

using namespace test;

using Kda = KdaOutput (*)(const KdaInput&, const Numerics&);

enum class Regime { kSaturated, kMixed, kWeak, kSoftplus };
const std::vector<Regime> kRegimes = {
    Regime::kSaturated, Regime::kMixed, Regime::kWeak, Regime::kSoftplus};

/// float64 inputs; run() converts them to the policy's dtypes.
KdaInput make_input(const std::vector<int64_t>& lengths,
                    int64_t heads,
                    int64_t dim,
                    Regime regime,
                    bool with_state = true) {
  KdaInput in;
  in.cu = boundaries(lengths);
  const int64_t tokens = in.cu.back(), segments = static_cast<int64_t>(lengths.size());
  in.q = seeded({tokens, heads, dim}, "q");
  in.k = seeded({tokens, heads, dim}, "k");
  in.v = seeded({tokens, heads, dim}, "v");
  in.beta_logit = seeded({tokens, heads}, "beta", 3);
  in.a_log = seeded({heads}, "a_log", 0.3);
  in.dt_bias = seeded({heads * dim}, "dt_bias", 0.2);
  in.lower_bound = -5.0;
  switch (regime) {
    case Regime::kSaturated:
      in.f = seeded({tokens, heads, dim}, "f") + 40;
      break;
    case Regime::kMixed:
      in.f = seeded({tokens, heads, dim}, "f", 4);
      break;
    case Regime::kWeak:
      in.f = seeded({tokens, heads, dim}, "f") - 7;
      break;
    case Regime::kSoftplus:
      in.f = seeded({tokens, heads, dim}, "f", 30);  // decays from e^-39 to 1
      in.lower_bound.reset();
      break;
  }
  if (with_state) in.initial_state = seeded({segments, heads, dim, dim}, "state");
  return in;
}

KdaInput convert(const KdaInput& in, const Numerics& num) {
  KdaInput out = in;
  for (Tensor KdaInput::*t :
       {&KdaInput::q, &KdaInput::k, &KdaInput::v, &KdaInput::f, &KdaInput::beta_logit}) {
    out.*t = leaf(in.*t, num.act());
  }
  for (Tensor KdaInput::*t : {&KdaInput::a_log, &KdaInput::dt_bias, &KdaInput::initial_state}) {
    out.*t = leaf(in.*t, num.acc());
  }
  return out;
}

struct KdaResult {
  Tensor o, state;
  std::vector<Tensor> grads;  ///< in the order of kNames
};
const std::vector<std::string> kNames = {
    "dq", "dk", "dv", "df", "dbeta", "dA_log", "d dt_bias", "dS0"};

/// Values and gradients of sum(o * wave) + sum(final_state * weights).
KdaResult run(Kda f, const KdaInput& in, const Numerics& num) {
  const KdaInput x = convert(in, num);
  const KdaOutput out = f(x, num);
  const Tensor dout = seeded(out.o.sizes(), "do"), dstate = seeded(out.final_state.sizes(), "ds");
  // Rounded to bf16 so that every policy is given the same gradients.
  const auto given = [](const Tensor& t) { return t.to(at::kBFloat16); };
  const Tensor loss = (out.o.to(at::kDouble) * given(dout).to(at::kDouble)).sum() +
                      (out.final_state.to(at::kDouble) * dstate).sum();
  loss.backward();
  KdaResult r{out.o.detach(), out.final_state.detach(), {}};
  for (const Tensor* t :
       {&x.q, &x.k, &x.v, &x.f, &x.beta_logit, &x.a_log, &x.dt_bias, &x.initial_state}) {
    if (t->defined()) r.grads.push_back(t->grad().defined() ? t->grad() : at::zeros_like(*t));
  }
  return r;
}

void expect_close(const KdaResult& got, const KdaResult& want, double bound, double grad_bound) {
  EXPECT_CLOSE(got.o, want.o, bound);
  EXPECT_CLOSE(got.state, want.state, bound);
  for (size_t i = 0; i < want.grads.size(); ++i) {
    SCOPED_TRACE(kNames[i]);
    EXPECT_CLOSE(got.grads[i], want.grads[i], grad_bound);
  }
}

bool same_bytes(const KdaResult& a, const KdaResult& b) {
  bool same = lockstep::same_bytes(a.o, b.o) && lockstep::same_bytes(a.state, b.state);
  for (size_t i = 0; i < a.grads.size(); ++i) {
    same = same && lockstep::same_bytes(a.grads[i], b.grads[i]);
  }
  return same;
}

TEST(Kda, ChunkedEqualsRecurrenceInFloat64) {
  const Numerics num = Numerics::policy("float64");
  for (const Regime regime : kRegimes) {
    for (const int64_t tokens : {0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 130, 200}) {
      for (const Kda form : {kda_chunk, kda_chunk_reference}) {
        SCOPED_TRACE(fmt::format("regime {} tokens {} {}",
                                 static_cast<int>(regime),
                                 tokens,
                                 form == kda_chunk ? "fast" : "plain"));
        const KdaInput in = make_input({tokens}, 2, 16, regime);
        // The plain form's autograd cancels where the gate saturates; the fast form does not.
        const double bound = form == kda_chunk ? 1e-12 : 1e-10;
        expect_close(run(form, in, num), run(kda_recurrent_reference, in, num), 1e-13, bound);
      }
    }
  }
}

TEST(Kda, ChunkedEqualsRecurrenceWithEmptyAndShortDocuments) {
  const Numerics num = Numerics::policy("float64");
  for (const Regime regime : kRegimes) {
    for (const int64_t dim : {16, 20, 64}) {
      for (const bool with_state : {true, false}) {
        SCOPED_TRACE(fmt::format("regime {} dim {}", static_cast<int>(regime), dim));
        const KdaInput in = make_input({0, 70, 1, 0, 17, 0}, 3, dim, regime, with_state);
        const KdaResult want = run(kda_recurrent_reference, in, num);
        expect_close(run(kda_chunk, in, num), want, 1e-13, 1e-12);
        Numerics small = num;
        small.set("D21", "chunk16");
        expect_close(run(kda_chunk, in, small), want, 1e-13, 1e-12);
      }
    }
  }
}

// Recorded with an independent float64 program: one head, D = 4, documents of 3 and 2 tokens,
// inputs sin(step (i+1)). Its dq, dk, dg and dbeta are with respect to the normalised q and k, the
// log decay and beta; here they are carried on to the raw inputs.
TEST(Kda, RecordedNumbersAreReproduced) {
  const Numerics num = Numerics::policy("float64");
  KdaInput in;
  in.q = wave({5, 1, 4}, 0.9);
  in.k = wave({5, 1, 4}, 1.3);
  in.v = wave({5, 1, 4}, 0.4);
  in.f = wave({5, 1, 4}, 0.6);
  in.beta_logit = wave({5, 1}, 0.8);
  in.a_log = at::full({1}, 0.25, at::kDouble);
  in.dt_bias = at::full({4}, 0.1, at::kDouble);
  in.cu = {0, 3, 5};
  in.lower_bound = -5.0;
  const auto row = [](std::vector<double> values) { return at::tensor(values, at::kDouble); };
  const auto raw = [](const Tensor& x, const Tensor& d) {  // l2norm backward of one row
    const Tensor n = (x.square().sum() + 1e-6).sqrt(), xn = x / n;
    return (d - xn * (xn * d).sum()) / n;
  };
  const Tensor a = in.a_log.exp(), z = in.f.select(1, 0) + 0.1;
  const Tensor s = (a * z).sigmoid(), df_dg = -5.0 * a * s * (-a * z).sigmoid();
  EXPECT_LE(
      max_abs((-5.0 * s)[0], row({-3.5064180912, -3.9501982390, -3.9940293215, -3.6510757562})),
      2e-10);
  const Tensor beta = in.beta_logit.sigmoid();
  for (const Kda form : {kda_chunk, kda_chunk_reference, kda_recurrent_reference}) {
    const KdaInput x = convert(in, num);
    const KdaOutput out = form(x, num);
    (out.o * wave({5, 1, 4}, 0.35)).sum().backward();
    const auto expect = [](const Tensor& got, const Tensor& want) {
      EXPECT_LE(max_abs(got, want), 2e-10) << got << "\n" << want;
    };
    expect(out.o[2][0], row({0.1013538192, 0.1556207707, 0.1853186244, 0.1857587420}));
    expect(out.o[4][0], row({0.0390313241, 0.0380274794, 0.0310199319, 0.0191150191}));
    expect(out.final_state[0][0][3],
           row({-0.0340678331, -0.0491032021, -0.0563862552, -0.0547671584}));
    expect(out.final_state[1][0][0],
           row({0.0379280342, 0.0155238935, -0.0093311286, -0.0327129708}));
    expect(x.q.grad()[1][0],
           raw(in.q[1][0], row({0.1106930592, 0.4402200779, 0.0573557038, -0.4501500370})));
    expect(x.k.grad()[0][0],
           raw(in.k[0][0], row({0.4279241754, 0.5526434383, 0.2734096213, -0.2234162074})));
    expect(x.v.grad()[0][0], row({0.0484983876, 0.1138690315, 0.1654325346, 0.1969365860}));
    expect(x.f.grad()[1][0],
           df_dg[1] * row({-0.0144780408, -0.0028289674, -0.0119177744, -0.0178488971}));
    const Tensor dbeta =
        row({0.6720186185, -0.6287746241, -0.4930286119, 0.7288508993, 0.0601198810});
    expect(x.beta_logit.grad().select(1, 0), (dbeta.unsqueeze(1) * beta * (1 - beta)).select(1, 0));
  }
}

TEST(Kda, Float32ErrorIsThatOfTheFormat) {
  const Numerics wide = Numerics::policy("float64"), num = Numerics::policy("float32");
  for (const Regime regime : kRegimes) {
    for (const int64_t dim : {20, 128}) {
      SCOPED_TRACE(fmt::format("regime {} dim {}", static_cast<int>(regime), dim));
      const KdaInput in = make_input({200, 1, 75}, 2, dim, regime);
      KdaInput exact = in;  // what float32 is given
      for (Tensor KdaInput::*t : {&KdaInput::q,
                                  &KdaInput::k,
                                  &KdaInput::v,
                                  &KdaInput::f,
                                  &KdaInput::beta_logit,
                                  &KdaInput::a_log,
                                  &KdaInput::dt_bias,
                                  &KdaInput::initial_state}) {
        exact.*t = (in.*t).to(at::kFloat).to(at::kDouble);
      }
      const KdaResult want = run(kda_chunk, exact, wide);
      // With softplus dA_log multiplies gradients near 0 by decays of e^-30: a sum of rounding
      // errors.
      const double grad_bound = regime == Regime::kSoftplus ? 3e-4 : 1e-5;
      expect_close(run(kda_chunk, in, num), want, 1e-6, grad_bound);
      expect_close(run(kda_chunk_reference, in, num), want, 4e-6, 2e-4);
    }
  }
}

// One constant unit key and query. The recurrence then has one degree of freedom per channel.
TEST(Kda, B29RepeatedKeysHaveTheClosedForm) {
  const int64_t tokens = 256, dim = 32;
  KdaInput in;
  const Tensor key = seeded({dim}, "key");
  in.k = (key / key.norm()).expand({tokens, 1, dim}).contiguous();
  in.q = in.k;
  in.v = seeded({tokens, 1, dim}, "v");
  in.beta_logit = at::full({tokens, 1}, 8.0, at::kDouble);
  in.f = at::full({tokens, 1, dim}, -12.0, at::kDouble);
  in.a_log = at::zeros({1}, at::kDouble);
  in.dt_bias = at::zeros({dim}, at::kDouble);
  in.cu = {0, tokens};
  in.lower_bound = -5.0;
  const double b = 1 / (1 + std::exp(-8.0)), a = std::exp(-5 / (1 + std::exp(12.0)));
  const double kappa = 1 / (1 + 1e-6);
  std::vector<Tensor> rows;
  Tensor u = at::zeros({dim}, at::kDouble);
  for (int64_t t = 0; t < tokens; ++t) {
    u = (1 - b * kappa) * a * u + b * in.v[t][0];
    rows.push_back(kappa / std::sqrt(static_cast<double>(dim)) * u);
  }
  const Tensor want = at::stack(rows).unsqueeze(1);
  // Nearly parallel keys: the same bounds against float64.
  KdaInput near = in;
  near.k = in.k + seeded({tokens, 1, dim}, "delta", 1e-3);
  const KdaResult near_want = run(kda_recurrent_reference, near, Numerics::policy("float64"));
  for (const auto& [policy, bound, grad_bound] :
       std::vector<std::tuple<std::string, double, double>>{{"float64", 1e-13, 1e-10},
                                                            {"float32", 3e-6, 1e-4},
                                                            {"hf-bf16", 1e-2, 0.2},
                                                            {"fsdp-bf16", 2e-2, 0.2}}) {
    for (const Kda form : {kda_chunk, kda_chunk_reference, kda_recurrent_reference}) {
      SCOPED_TRACE(fmt::format("{} {}",
                               policy,
                               form == kda_chunk             ? "fast"
                               : form == kda_chunk_reference ? "plain chunked"
                                                             : "recurrent"));
      const Numerics num = Numerics::policy(policy);
      const KdaResult got = run(form, in, num);
      EXPECT_CLOSE(got.o, want, bound);
      for (const Tensor& g : got.grads) EXPECT_TRUE(g.isfinite().all().item<bool>());
      const KdaResult near_got = run(form, near, num);
      EXPECT_CLOSE(near_got.o, near_want.o, bound);
      for (size_t i = 0; i < near_want.grads.size(); ++i) {
        EXPECT_TRUE(near_got.grads[i].isfinite().all().item<bool>()) << kNames[i];
      }
      EXPECT_CLOSE(near_got.grads[2], near_want.grads[2], grad_bound);
    }
  }
}

TEST(Kda, ZeroKeysAndQueriesAreLegal) {
  for (const std::string policy : {"float64", "float32", "hf-bf16"}) {
    const Numerics num = Numerics::policy(policy);
    KdaInput in = make_input({90}, 2, 16, Regime::kMixed);
    in.k = at::zeros_like(in.k);
    in.q = at::zeros_like(in.q);
    const KdaResult got = run(kda_chunk, in, num);
    EXPECT_EQ(got.o.abs().max().item<double>(), 0);
    for (const Tensor& g : got.grads) EXPECT_TRUE(g.isfinite().all().item<bool>());
    if (policy == "float64") expect_close(got, run(kda_recurrent_reference, in, num), 1e-13, 1e-12);
  }
}

TEST(Kda, B07PackedDocumentsEqualDocumentsAloneBitForBit) {
  const std::vector<int64_t> lengths = {13, 7, 40, 1, 0, 3, 200, 64};
  const KdaInput in = make_input(lengths, 2, 20, Regime::kMixed);
  for (const std::string policy : {"float32", "fsdp-bf16"}) {
    const Numerics num = Numerics::policy(policy);
    const KdaResult packed = run(kda_chunk, in, num);
    const KdaInput x = convert(in, num);
    for (size_t d = 0; d < lengths.size(); ++d) {
      const auto doc = static_cast<int64_t>(d);
      const auto part = [&](const Tensor& t) { return t.slice(0, in.cu[d], in.cu[d + 1]); };
      KdaInput alone = x;
      for (Tensor KdaInput::*t :
           {&KdaInput::q, &KdaInput::k, &KdaInput::v, &KdaInput::f, &KdaInput::beta_logit}) {
        alone.*t = leaf(part(x.*t), num.act());
      }
      alone.initial_state = leaf(x.initial_state.slice(0, doc, doc + 1), num.acc());
      alone.cu = {0, lengths[d]};
      const KdaOutput out = kda_chunk(alone, num);
      EXPECT_TRUE(lockstep::same_bytes(out.o, part(packed.o)));
      EXPECT_TRUE(lockstep::same_bytes(out.final_state, packed.state.slice(0, doc, doc + 1)));
      // The same output gradients as the packed run was given.
      const Tensor dout = part(seeded(packed.o.sizes(), "do").to(at::kBFloat16).to(at::kDouble));
      const Tensor dstate = seeded(packed.state.sizes(), "ds").slice(0, doc, doc + 1);
      const Tensor loss =
          (out.o.to(at::kDouble) * dout).sum() + (out.final_state.to(at::kDouble) * dstate).sum();
      loss.backward();
      if (lengths[d] > 0) {
        EXPECT_TRUE(lockstep::same_bytes(alone.q.grad(), part(packed.grads[0])));
        EXPECT_TRUE(lockstep::same_bytes(alone.k.grad(), part(packed.grads[1])));
        EXPECT_TRUE(lockstep::same_bytes(alone.v.grad(), part(packed.grads[2])));
        EXPECT_TRUE(lockstep::same_bytes(alone.f.grad(), part(packed.grads[3])));
        EXPECT_TRUE(lockstep::same_bytes(alone.beta_logit.grad(), part(packed.grads[4])));
      }
      EXPECT_TRUE(
          lockstep::same_bytes(alone.initial_state.grad(), packed.grads[7].slice(0, doc, doc + 1)));
    }
    KdaInput changed = in;
    changed.v = in.v.clone();
    changed.v[3] += 1;
    const KdaResult other = run(kda_chunk, changed, num);
    EXPECT_TRUE(lockstep::same_bytes(other.o.slice(0, 13), packed.o.slice(0, 13)));
    EXPECT_FALSE(lockstep::same_bytes(other.o.slice(0, 0, 13), packed.o.slice(0, 0, 13)));
  }
}

// A row's bits depend on the rows before it only: not on how long the document is.
TEST(Kda, PrefixesAreBitEqual) {
  const Numerics num = Numerics::policy("float32");
  const KdaInput x = convert(make_input({200}, 2, 20, Regime::kMixed), num);
  const Tensor whole = kda_chunk(x, num).o;
  for (const int64_t n : {1, 15, 17, 64, 100, 130, 199}) {
    KdaInput head = x;
    for (Tensor KdaInput::*t :
         {&KdaInput::q, &KdaInput::k, &KdaInput::v, &KdaInput::f, &KdaInput::beta_logit}) {
      head.*t = (x.*t).slice(0, 0, n);
    }
    head.cu = {0, n};
    EXPECT_TRUE(lockstep::same_bytes(kda_chunk(head, num).o, whole.slice(0, 0, n))) << n;
  }
}

// A document cut at a multiple of the chunk and continued from its state: same bits.
TEST(Kda, HandedOverStateContinuesADocumentBitForBit) {
  const Numerics num = Numerics::policy("float32");
  const KdaInput x = convert(make_input({1000}, 2, 16, Regime::kMixed), num);
  const KdaOutput whole = kda_chunk(x, num);
  for (const int64_t cut : {64, 448, 512, 960}) {
    const auto piece = [&](int64_t begin, int64_t end, const Tensor& state) {
      KdaInput part = x;
      for (Tensor KdaInput::*t :
           {&KdaInput::q, &KdaInput::k, &KdaInput::v, &KdaInput::f, &KdaInput::beta_logit}) {
        part.*t = (x.*t).slice(0, begin, end);
      }
      part.cu = {0, end - begin};
      part.initial_state = state;
      return kda_chunk(part, num);
    };
    const KdaOutput first = piece(0, cut, x.initial_state);
    const KdaOutput second = piece(cut, 1000, first.final_state);
    EXPECT_TRUE(lockstep::same_bytes(second.o, whole.o.slice(0, cut)));
    EXPECT_TRUE(lockstep::same_bytes(second.final_state, whole.final_state));
  }
}

TEST(Kda, B10DecayParameterKeepsItsPrecision) {
  const int64_t tokens = 2048, dim = 16;
  const KdaInput base = make_input({tokens}, 1, dim, Regime::kWeak, /*with_state=*/false);
  const auto with_a_log = [&](double value) {
    KdaInput in = base;
    in.a_log = at::full({1}, value, at::kDouble);
    in.f = base.f + 5;  // weak, but not negligible over 2048 tokens
    return in;
  };
  const auto output = [&](const KdaInput& in, const std::string& policy) {
    const Numerics num = Numerics::policy(policy);
    return kda_chunk(convert(in, num), num).o.detach();
  };
  const double step = 1 + std::pow(2.0, -12);
  EXPECT_FALSE(
      lockstep::same_bytes(output(with_a_log(1), "float32"), output(with_a_log(step), "float32")));
  EXPECT_FALSE(lockstep::same_bytes(output(with_a_log(1), "fsdp-fp32-islands"),
                                    output(with_a_log(step), "fsdp-fp32-islands")));
  EXPECT_TRUE(lockstep::same_bytes(output(with_a_log(1), "fsdp-bf16"),
                                   output(with_a_log(step), "fsdp-bf16")));

  // Inputs that bf16 holds exactly, except for A_log.
  KdaInput in = with_a_log(1 + std::pow(2.0, -9));
  for (Tensor KdaInput::*t : {&KdaInput::q,
                              &KdaInput::k,
                              &KdaInput::v,
                              &KdaInput::f,
                              &KdaInput::beta_logit,
                              &KdaInput::dt_bias}) {
    in.*t = (in.*t).to(at::kBFloat16).to(at::kDouble);
  }
  const Tensor want = output(in, "float64");
  Numerics bf16_decay = Numerics::policy("hf-bf16");
  bf16_decay.set("D03", "bf16");
  const Tensor fp32 = output(in, "float32"),
               decay = kda_chunk(convert(in, bf16_decay), bf16_decay).o;
  const Tensor islands = output(in, "hf-bf16");
  for (int64_t t = 0; t < tokens; t += 256) {
    const auto window = [t](const Tensor& x) { return x.slice(0, t, t + 256); };
    EXPECT_CLOSE(window(fp32), window(want), 2e-6);
    const double with = rel_l2(window(decay), window(want));
    const double without = rel_l2(window(islands), window(want));
    RecordProperty(fmt::format("rel_l2_bf16_decay_from_token_{}", t), fmt::format("{}", with));
    RecordProperty(fmt::format("rel_l2_fp32_decay_from_token_{}", t), fmt::format("{}", without));
    EXPECT_GT(with, without) << "from token " << t;
  }
}

/// Every combination of roundings that a program uses, and each KDA switch alone.
std::vector<Numerics> bf16_numerics() {
  std::vector<Numerics> all;
  for (const std::string policy : {"hf-bf16", "fsdp-bf16"}) {
    const Numerics base = Numerics::policy(policy);
    all.push_back(base);
    for (const std::string id :
         {"D03", "D17", "D18", "D19", "D20", "D21", "D22", "D23", "D24", "D25", "D26", "D71"}) {
      for (const SwitchInfo& info : kSwitches) {
        if (info.id != id) continue;
        for (size_t i = 0; i < info.num_values(); ++i) {
          Numerics one = base;
          one.set(id, info.values[i]);
          if (one.differences(base).empty() || info.values[i] == "recurrent") continue;
          all.push_back(one);
        }
      }
    }
  }
  Numerics engine = Numerics::policy("fsdp-bf16");
  for (const SwitchInfo& info : kSwitches) engine.set(info.id, info.values[info.engine]);
  all.push_back(engine);
  return all;
}

TEST(Kda, FastFollowsThePlainFormsRoundingsInEveryBf16Policy) {
  double worst = 0, worst_grad = 0;
  for (const Numerics& num : bf16_numerics()) {
    for (const Regime regime : {Regime::kSaturated, Regime::kMixed, Regime::kWeak}) {
      SCOPED_TRACE(fmt::format("{} regime {}", num.name(), static_cast<int>(regime)));
      const KdaInput in = make_input({0, 75, 1}, 2, 32, regime);
      const KdaResult got = run(kda_chunk, in, num), want = run(kda_chunk_reference, in, num);
      worst = std::max({worst, rel_l2(got.o, want.o), rel_l2(got.state, want.state)});
      EXPECT_CLOSE(got.o, want.o, 4e-4);  // one bf16 rounding is 1.7e-3 in this norm
      EXPECT_CLOSE(got.state, want.state, 4e-4);
      for (size_t i = 0; i < want.grads.size(); ++i) {
        SCOPED_TRACE(kNames[i]);
        // The plain form's gate gradients cancel only where exp(b) exp(-b) is exactly 1, so with
        // rounded exponentials (D25) they are not what the fast form has to follow.
        const bool of_gate = i == 3 || i == 5 || i == 6;
        if (of_gate && num.rounds<Switch::kKdaExp>("bf16")) continue;
        worst_grad = std::max(worst_grad, rel_l2(got.grads[i], want.grads[i]));
        EXPECT_CLOSE(got.grads[i], want.grads[i], 1.5e-2);
      }
    }
  }
  RecordProperty("worst_rel_l2", fmt::format("{}", worst));
  RecordProperty("worst_gradient_rel_l2", fmt::format("{}", worst_grad));
}

// Whatever is rounded, gradients stay near those of the exact recurrence, also where the gate is
// saturated and the gate's gradient is a millionth of its terms.
TEST(Kda, Bf16GradientsStayNearTheExactOnes) {
  double worst = 0;
  for (const Numerics& num : bf16_numerics()) {
    for (const Regime regime : {Regime::kSaturated, Regime::kMixed, Regime::kWeak}) {
      SCOPED_TRACE(fmt::format("{} regime {}", num.name(), static_cast<int>(regime)));
      KdaInput in = make_input({0, 75, 1}, 2, 32, regime);
      for (Tensor KdaInput::*t : {&KdaInput::q,
                                  &KdaInput::k,
                                  &KdaInput::v,
                                  &KdaInput::f,
                                  &KdaInput::beta_logit,
                                  &KdaInput::a_log,
                                  &KdaInput::dt_bias}) {
        in.*t = (in.*t).to(at::kBFloat16).to(at::kDouble);
      }
      const KdaResult want = run(kda_recurrent_reference, in, Numerics::policy("float64"));
      const KdaResult got = run(kda_chunk, in, num);
      for (size_t i = 0; i < want.grads.size(); ++i) {
        SCOPED_TRACE(kNames[i]);
        worst = std::max(worst, rel_l2(got.grads[i], want.grads[i]));
        EXPECT_CLOSE(got.grads[i], want.grads[i], 3e-2);
      }
    }
  }
  RecordProperty("worst_gradient_rel_l2", fmt::format("{}", worst));
}

TEST(Kda, EverySwitchChangesTheBytes) {
  const KdaInput in = make_input({200}, 2, 32, Regime::kWeak);
  const std::vector<Numerics> all = bf16_numerics();
  const auto output = [&](const Numerics& num) {
    const KdaOutput out = kda_chunk(convert(in, num), num);
    return at::cat({out.o.detach().to(at::kFloat).flatten(), out.final_state.detach().flatten()});
  };
  const Tensor base = output(all.front());
  for (size_t i = 1; i < all.size() && all[i].name() != "fsdp-bf16"; ++i) {
    if (all[i].name() == "hf-bf16+D17=tanh") continue;  // exact tanh: a bf16 sigmoid in both
    EXPECT_FALSE(lockstep::same_bytes(output(all[i]), base)) << all[i].name();
  }
}

TEST(Kda, B53RepeatedCallsGiveTheSameBytesAndLeaveInputsAlone) {
  for (const std::string policy : {"float64", "float32", "fsdp-bf16"}) {
    const Numerics num = Numerics::policy(policy);
    const KdaInput in = convert(make_input({130, 0, 70}, 3, 20, Regime::kMixed), num);
    std::vector<Tensor> copies;
    const std::vector<const Tensor*> tensors = {
        &in.q, &in.k, &in.v, &in.f, &in.beta_logit, &in.a_log, &in.dt_bias, &in.initial_state};
    for (const Tensor* t : tensors) copies.push_back(t->detach().clone());
    const KdaOutput first = kda_chunk(in, num), second = kda_chunk(in, num);
    (first.o.to(at::kFloat).sum() + first.final_state.sum()).backward();
    EXPECT_TRUE(lockstep::same_bytes(first.o, second.o));
    EXPECT_TRUE(lockstep::same_bytes(first.final_state, second.final_state));
    for (size_t i = 0; i < tensors.size(); ++i) {
      EXPECT_TRUE(lockstep::same_bytes(*tensors[i], copies[i])) << kNames[i];
    }
  }
}

TEST(Kda, BytesDoNotDependOnThreadsOrStrides) {
  for (const std::string policy : {"float32", "fsdp-bf16"}) {
    const Numerics num = Numerics::policy(policy);
    const KdaInput in = make_input({130, 1, 700}, 3, 20, Regime::kMixed);
    const int threads = at::get_num_threads();
    at::set_num_threads(1);
    const KdaResult one = run(kda_chunk, in, num);
    at::set_num_threads(2);
    const KdaResult two = run(kda_chunk, in, num);
    at::set_num_threads(threads);
    EXPECT_TRUE(same_bytes(one, two));
    KdaInput strided = convert(in, num);
    const Tensor merged = at::cat({strided.q, strided.k, strided.v}, 1).detach();
    strided.q = merged.slice(1, 0, 3);
    strided.k = merged.slice(1, 3, 6);
    strided.v = merged.slice(1, 6, 9);
    EXPECT_TRUE(lockstep::same_bytes(kda_chunk(strided, num).o, one.o));
  }
}

TEST(Kda, BytesDoNotDependOnTheVectorWidth) {
  const Numerics num = Numerics::policy("float32");
  const KdaInput in = make_input({130, 1, 70}, 3, 20, Regime::kMixed);
  if (!chain_gemm_allow_avx512(true)) GTEST_SKIP() << "this processor has no AVX-512";
  const KdaResult wide = run(kda_chunk, in, num);
  chain_gemm_allow_avx512(false);
  const KdaResult narrow = run(kda_chunk, in, num);
  chain_gemm_allow_avx512(true);
  EXPECT_TRUE(same_bytes(wide, narrow));
}

TEST(Kda, GradientOfOneOutputAloneIsEnough) {
  const Numerics num = Numerics::policy("float64");
  const KdaInput in = make_input({70, 0}, 2, 16, Regime::kMixed);
  for (const bool of_state : {false, true}) {
    std::vector<Tensor> grads[2];
    for (const Kda form : {kda_chunk, kda_recurrent_reference}) {
      const KdaInput x = convert(in, num);
      const KdaOutput out = form(x, num);
      (of_state ? out.final_state : out.o).sum().backward();
      for (const Tensor* t : {&x.k, &x.v, &x.f, &x.a_log, &x.initial_state}) {
        grads[form == kda_chunk ? 0 : 1].push_back(t->grad());
      }
    }
    for (size_t i = 0; i < grads[0].size(); ++i) EXPECT_CLOSE(grads[0][i], grads[1][i], 1e-12);
  }
}

TEST(Kda, B53WrongArgumentsAreNamed) {
  const Numerics num = Numerics::policy("float32");
  const KdaInput good = convert(make_input({5}, 2, 8, Regime::kMixed), num);
  const auto message = [&](auto&& change, const Numerics& numerics) -> std::string {
    KdaInput in = good;
    change(in);
    try {
      kda_chunk(in, numerics);
    } catch (const Error& e) {
      return fmt::format("{}: {}", kind_name(e.kind()), e.what());
    }
    return "nothing was thrown";
  };
  using testing::HasSubstr;
  // A bias per head instead of per channel.
  EXPECT_THAT(message([](KdaInput& in) { in.dt_bias = at::zeros({2}); }, num),
              HasSubstr("kda: dt_bias: expected shape [16], got [2] float32"));
  EXPECT_THAT(message(
                  [](KdaInput& in) {
                    in.k = at::zeros({5, 2, 9});
                  },
                  num),
              HasSubstr("kda: k: expected shape [5, 2, 8]"));
  EXPECT_THAT(message([](KdaInput& in) { in.v = in.v.to(at::kDouble); }, num),
              HasSubstr("kda: v: expected dtype float32"));
  EXPECT_THAT(message([](KdaInput& in) { in.cu = {0, 4}; }, num), HasSubstr("kda: cu"));
  EXPECT_THAT(message([](KdaInput& in) { in.a_log = at::zeros({3}); }, num),
              HasSubstr("kda: a_log"));
  EXPECT_THAT(message(
                  [](KdaInput& in) {
                    in.initial_state = at::zeros({1, 2, 8, 7});
                  },
                  num),
              HasSubstr("kda: initial_state"));
  EXPECT_THAT(message([](KdaInput& in) { in.beta_logit = Tensor(); }, num),
              HasSubstr("kda: beta_logit"));
  EXPECT_THAT(message([](KdaInput& in) { in.lower_bound = 1.0; }, num), HasSubstr("lower_bound"));
  Numerics rounded = Numerics::policy("hf-bf16");
  rounded.set("D25", "bf16");
  const KdaInput bf16 = convert(make_input({5}, 2, 8, Regime::kSoftplus), rounded);
  EXPECT_THAT(message([&](KdaInput& in) { in = bf16; }, rounded), HasSubstr("D25"));
}

}  // namespace
}  // namespace lockstep::model
