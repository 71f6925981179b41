#include "model/ops/kda_decode.hpp"

#include <set>

#include "model/ops/dynamic_tasks.hpp"
#include "model/ops/kda_decode_kernel.hpp"
#include "model/ops/kda_dispatch.hpp"
#include "model/ops/kda_mode.hpp"

namespace lockstep::model {
namespace {

bool narrow_states(const Tensor& states, const Numerics& num) {
  return states.scalar_type() != num.acc();
}

std::vector<KdaDecodeRun> check_decode(const KdaInput& in,
                                       const Tensor& slots,
                                       const Tensor& states,
                                       const Numerics& num) {
  KdaInput rows = in;
  rows.initial_state = Tensor();
  check_kda(rows, num);
  const int64_t heads = in.q.size(1), dim = in.q.size(2);
  const auto segments = static_cast<int64_t>(in.cu.size()) - 1;
  check_shape(slots, {segments}, "kda_decode: slots, one per segment");
  check_dtype(slots, at::kLong, "kda_decode: slots");
  check_shape(states, {-1, heads, dim, dim}, "kda_decode: states [slots, H, D, D]");
  LOCKSTEP_CHECK(states.is_contiguous() &&
                     (states.scalar_type() == num.acc() ||
                      (states.scalar_type() == at::kBFloat16 && num.acc() == at::kFloat)),
                 kShape,
                 "kda_decode: states: expected contiguous {} or, in float32, bfloat16, got {}",
                 dtype_name(num.acc()),
                 describe(states));
  std::vector<KdaDecodeRun> runs;
  std::set<int64_t> seen;
  const Tensor list = slots.contiguous();
  for (int64_t s = 0; s < segments; ++s) {
    const int64_t slot = list.const_data_ptr<int64_t>()[s];
    LOCKSTEP_CHECK(slot >= 0 && slot < states.size(0),
                   kInput,
                   "kda_decode: slots[{}] = {} is not one of {} slots",
                   s,
                   slot,
                   states.size(0));
    LOCKSTEP_CHECK(slot == 0 || seen.insert(slot).second,
                   kInput,
                   "kda_decode: slot {} is given to two segments",
                   slot);
    runs.push_back({in.cu[static_cast<size_t>(s)], in.cu[static_cast<size_t>(s) + 1], slot});
  }
  return runs;
}

Tensor decay_parameter(const Tensor& t, const KdaMode& mode, const Numerics& num) {
  return (mode.round_decay ? t.detach().to(at::kBFloat16) : t.detach()).to(num.acc());
}

}  // namespace

Tensor kda_decode(const KdaInput& in,
                  const Tensor& slots,
                  const Tensor& states,
                  const Numerics& num) {
  const at::NoGradGuard no_grad;
  const std::vector<KdaDecodeRun> runs = check_decode(in, slots, states, num);
  const KdaMode mode = kda_mode(num, in.lower_bound, /*recurrent=*/true);
  const int64_t heads = in.q.size(1), dim = in.q.size(2);
  const Tensor q = in.q.contiguous(), k = in.k.contiguous(), v = in.v.contiguous(),
               f = in.f.contiguous(), beta = in.beta_logit.contiguous();
  const Tensor rate = decay_parameter(in.a_log, mode, num).exp().contiguous(),
               dt = decay_parameter(in.dt_bias, mode, num).contiguous();
  Tensor o = at::zeros(in.q.sizes(), in.q.options()), cache = states;
  by_width(num.width(), [&](auto types) {
    using S = typename decltype(types)::S;
    using R = typename decltype(types)::R;
    const auto rows = [](const Tensor& t) { return TokenRows<S>{data<S>(t), t.stride(0)}; };
    const KdaCall<S, R> call{q.size(0),
                             heads,
                             dim,
                             rows(q),
                             rows(k),
                             rows(v),
                             rows(f),
                             rows(beta),
                             data<R>(rate),
                             data<R>(dt),
                             nullptr,
                             mode,
                             {}};
    const auto run_all = [&]<typename C>(C* base) {
      dynamic_tasks(static_cast<int64_t>(runs.size()) * heads, [&](int64_t) {
        return [&](int64_t task) {
          const KdaDecodeRun& run = runs[static_cast<size_t>(task / heads)];
          const int64_t head = task % heads;
          if (run.slot == 0) return;
          kda_decode_head(
              call, run, head, base + (run.slot * heads + head) * dim * dim, mutable_data<S>(o));
        };
      });
    };
    if constexpr (!std::is_same_v<R, double>) {
      if (narrow_states(states, num)) return run_all(mutable_data<simd::Bf16>(cache));
    }
    run_all(mutable_data<R>(cache));
  });
  return o;
}

Tensor kda_decode_reference(const KdaInput& in,
                            const Tensor& slots,
                            const Tensor& states,
                            const Numerics& num) {
  const at::NoGradGuard no_grad;
  const std::vector<KdaDecodeRun> runs = check_decode(in, slots, states, num);
  Tensor o = at::zeros(in.q.sizes(), in.q.options());
  for (const KdaDecodeRun& run : runs) {
    for (int64_t t = run.begin; t < run.end && run.slot != 0; ++t) {
      const auto row = [t](const Tensor& x) { return x.narrow(0, t, 1); };
      KdaInput token = in;
      token.q = row(in.q);
      token.k = row(in.k);
      token.v = row(in.v);
      token.f = row(in.f);
      token.beta_logit = row(in.beta_logit);
      token.cu = {0, 1};
      token.initial_state = states[run.slot].transpose(-1, -2).to(num.acc()).unsqueeze(0);
      const KdaOutput out = kda_recurrent_reference(token, num);
      o.narrow(0, t, 1).copy_(out.o);
      states[run.slot].copy_(out.final_state[0].transpose(-1, -2));
    }
  }
  return o;
}

}  // namespace lockstep::model
