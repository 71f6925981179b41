#include "model/ops/kda_mode.hpp"

#include "model/ops/kda_dispatch.hpp"

namespace lockstep::model {

KdaMode kda_mode(const Numerics& num, std::optional<double> lower_bound, bool recurrent) {
  KdaMode mode;
  mode.chunk = num.is<Switch::kKdaAlgorithm>("chunk16")   ? 16
               : num.is<Switch::kKdaAlgorithm>("chunk64") ? 64
                                                          : 0;
  if (lower_bound) {
    LOCKSTEP_CHECK(*lower_bound < 0 && *lower_bound > -1e6,
                   kConfig,
                   "kda: lower_bound must be a negative number, got {}",
                   *lower_bound);
    mode.lower_bound = *lower_bound;
    const bool tanh = num.is<Switch::kGateSigmoid>("tanh");
    mode.gate = tanh && !recurrent                                   ? KdaMode::Gate::kTanh
                : tanh || num.is<Switch::kGateSigmoid>("lb/(1+exp)") ? KdaMode::Gate::kQuotient
                                                                     : KdaMode::Gate::kSigmoid;
  } else {
    mode.gate = KdaMode::Gate::kSoftplus;
  }
  mode.round_decay = num.rounds<Switch::kKdaDecayParams>("bf16");
  mode.beta_tanh = num.is<Switch::kBeta>("tanh") && !recurrent;
  mode.round_beta =
      num.rounds<Switch::kBeta>("bf16") || (!recurrent && num.rounds<Switch::kBeta>("tanh"));
  mode.l2_divides = num.is<Switch::kL2NormForm>("divide") ||
                    (recurrent && num.is<Switch::kL2NormForm>("rsqrt-prefill"));
  mode.round_normalised = num.rounds<Switch::kL2NormResult>("bf16") ||
                          (!recurrent && num.rounds<Switch::kL2NormResult>("bf16-prefill"));
  mode.round_scores = num.rounds<Switch::kKdaScoreStore>("bf16");
  mode.half_inverse = num.rounds<Switch::kKdaInverse>("fp16");
  mode.round_inverse = mode.half_inverse || num.rounds<Switch::kKdaInverse>("bf16");
  mode.round_operands =
      num.rounds<Switch::kKdaOperands>("bf16") || num.rounds<Switch::kKdaOperands>("bf16-prefill");
  mode.round_exp = num.rounds<Switch::kKdaExp>("bf16");
  mode.round_state = num.rounds<Switch::kKdaState>("bf16");
  mode.base2 = num.is<Switch::kExpBase>("base2");
  LOCKSTEP_CHECK(!mode.round_exp || recurrent ||
                     (lower_bound && -*lower_bound * static_cast<double>(kBlock) <= 87),
                 kConfig,
                 "kda: rounded exponentials (D25 = bf16) form exp(-b) over {} tokens and need a "
                 "lower_bound of at least -87/{}, got {}",
                 kBlock,
                 kBlock,
                 lower_bound ? fmt::format("{}", *lower_bound) : "none (softplus gate)");
  return mode;
}

void check_kda(const KdaInput& in, const Numerics& num) {
  const auto check = [&](const Tensor& t, std::string_view name, at::IntArrayRef sizes) {
    const std::string what = fmt::format("kda: {}", name);
    check_float(t, what);
    check_shape(t, sizes, what);
  };
  const auto check_act = [&](const Tensor& t, std::string_view name, at::IntArrayRef sizes) {
    check(t, name, sizes);
    check_dtype(t, num.act(), fmt::format("kda: {}", name));
  };
  check_act(in.q, "q", {-1, -1, -1});
  const int64_t tokens = in.q.size(0), heads = in.q.size(1), dim = in.q.size(2);
  LOCKSTEP_CHECK(heads >= 1 && dim >= 1,
                 kShape,
                 "kda: q: expected at least one head and one channel, got {}",
                 describe(in.q));
  check_act(in.k, "k", {tokens, heads, dim});
  check_act(in.v, "v", {tokens, heads, dim});
  check_act(in.f, "f", {tokens, heads, dim});
  check_act(in.beta_logit, "beta_logit", {tokens, heads});
  check(in.a_log, "a_log", {heads});
  check(in.dt_bias, "dt_bias", {heads * dim});
  check_boundaries(in.cu, tokens, "kda: cu");
  if (in.initial_state.defined()) {
    const auto segments = static_cast<int64_t>(in.cu.size()) - 1;
    check(in.initial_state, "initial_state", {segments, heads, dim, dim});
    check_dtype(in.initial_state, num.acc(), "kda: initial_state");
  }
}

}  // namespace lockstep::model
