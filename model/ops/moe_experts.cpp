// Grouped experts, dense MLP and their activation, fast form.
#include "model/base/parallel.hpp"
#include "model/ops/device_kernels.hpp"
#include "model/ops/linear.hpp"
#include "model/ops/moe_checks.hpp"
#include "model/ops/op_support.hpp"

namespace lockstep::model {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kSliceBytes = int64_t{512} << 20;
constexpr int64_t kElements = 1 << 14;  // per piece of an elementwise loop

struct ExpertsInfo {
  std::vector<int64_t> offsets;
  int64_t inner;
  SwigluForm swiglu;
  RowTiles tiles;
  bool keep;  ///< someone will ask for gradients
  Numerics num;
  ExactSum gate, up, down;  ///< up undefined: merged into gate; all undefined: not exact
  RowBlocks blocks;

  [[nodiscard]] ExpertsForm form(const Tensor& rows) const {
    return {rows.size(0), rows.size(1), inner, offsets.data(), swiglu, tiles};
  }
};

/// Weights of all experts: either gate and up merged ([E, 2I, D] each under one name), or a single
/// expert's separate matrices.
struct Weights {
  Tensor gate, up, down;  ///< up undefined: merged into gate
  [[nodiscard]] int64_t experts() const { return up.defined() ? 1 : gate.size(0); }
};

/// Calls body(slice, tensors kept alive) for runs of experts whose raised weights fit kSliceBytes.
/// Weights that are in acc already are one run, without a copy.
template <typename A, typename F>
void for_each_slice(const Weights& w, const ExpertsInfo& info, F&& body) {
  const at::ScalarType acc = info.num.acc();
  const int64_t E = w.experts(), I = info.inner, D = w.gate.size(-1);
  const int64_t bytes = 3 * I * D * static_cast<int64_t>(sizeof(A));
  const int64_t step = w.gate.scalar_type() == acc ? E : std::max<int64_t>(1, kSliceBytes / bytes);
  for (int64_t first = 0; first < E; first += step) {
    const int64_t last = std::min(E, first + step);
    const auto raise = [&](const Tensor& t) {
      return (w.up.defined() ? t : t.slice(0, first, last)).to(acc).contiguous();
    };
    const Tensor gate = raise(w.gate), down = raise(w.down);
    const Tensor up = w.up.defined() ? raise(w.up) : Tensor();
    body(ExpertSlice<A>{first,
                        last,
                        cdata<A>(gate),
                        up.defined() ? cdata<A>(up) : cdata<A>(gate) + I * D,
                        cdata<A>(down),
                        2 * I * D});
  }
}

struct Forward {
  Tensor out, gate_up;
};

Forward run_forward(const Tensor& rows, const Weights& weights, const ExpertsInfo& info) {
  const int64_t R = rows.size(0), I = info.inner;
  const Tensor x = rows.to(info.num.acc());
  const Tensor h = at::empty({R, I}, x.options());
  Forward result;
  result.out = at::empty(rows.sizes(), rows.options());
  if (info.keep) result.gate_up = at::empty({R, 2 * I}, rows.options());
  with_width(info.num, [&]<typename W>() {
    using A = typename W::Acc;
    for_each_slice<A>(weights, info, [&](const ExpertSlice<A>& slice) {
      experts_forward<W>(info.form(rows),
                         slice,
                         cdata<A>(x),
                         data<typename W::Act>(result.gate_up),
                         data<A>(h),
                         data<typename W::Act>(result.out));
    });
  });
  return result;
}

struct Backward {
  Tensor rows, gate, up, down;
};

/// Weight gradients block by block into the exact sums.
void add_exactly(const ExpertsInfo& info,
                 const Tensor& rows,
                 const Tensor& dout,
                 const Tensor& h,
                 const Tensor& dgate_up) {
  const int64_t D = rows.size(1), I = info.inner;
  const bool merged = !info.up.defined();
  const auto target = [](const ExactSum& sum, int64_t skip, int64_t stride) {
    return ExactTarget{sum.high() + skip, sum.low() + skip, stride};
  };
  ExactExperts exact{*info.blocks,
                     static_cast<int64_t>(info.offsets.size()) - 1,
                     2 * I * D,
                     target(info.gate, 0, D),
                     merged ? target(info.gate, I * D, D) : target(info.up, 0, D),
                     target(info.down, 0, I),
                     {}};
  experts_exact_gradients(info.form(rows),
                          cdata<float>(rows),
                          cdata<float>(dout),
                          cdata<float>(h),
                          cdata<float>(dgate_up),
                          exact);
  for (const ExactSum* sum : {&info.gate, &info.up, &info.down}) {
    if (sum->defined()) sum->note(num_blocks(info.blocks), exact.peak.value());
  }
}

Backward run_backward(const Tensor& rows,
                      const Tensor& gate_up,
                      const Weights& weights,
                      const Tensor& dout,
                      const ExpertsInfo& info,
                      bool need_rows,
                      bool need_gate,
                      bool need_up,
                      bool need_down) {
  const at::ScalarType acc = info.num.acc();
  const int64_t R = rows.size(0), I = info.inner, D = rows.size(1);
  const Tensor x = rows.to(acc), dout_acc = dout.to(acc).contiguous();
  const Tensor h = at::empty({R, I}, x.options()), dgate_up = at::empty({R, 2 * I}, x.options());
  Backward result;
  if (need_rows) result.rows = at::empty(rows.sizes(), rows.options());
  const auto like = [](bool wanted, const Tensor& t) {
    return wanted ? at::empty(t.sizes(), t.options()) : Tensor();
  };
  const bool merged = !weights.up.defined(), exact = info.gate.defined();
  result.gate = like(need_gate && !exact, weights.gate);
  result.down = like(need_down && !exact, weights.down);
  if (!merged) result.up = like(need_up && !exact, weights.up);
  with_width(info.num, [&]<typename W>() {
    using A = typename W::Acc;
    for_each_slice<A>(weights, info, [&](const ExpertSlice<A>& slice) {
      // A gradient's place: the result itself, or a buffer in acc that is rounded into it.
      const auto part = [&](const Tensor& t) {
        return t.defined() && merged ? t.slice(0, slice.first, slice.last) : t;
      };
      const auto buffer = [&](const Tensor& t) {
        return t.defined() && t.scalar_type() != acc ? at::empty(t.sizes(), x.options()) : t;
      };
      const Tensor gate = part(result.gate), down = part(result.down);
      const Tensor gate_to = buffer(gate), down_to = buffer(down), up_to = buffer(result.up);
      A* gate_at = data<A>(gate_to);
      A* up_at = !merged ? data<A>(up_to) : gate_at != nullptr ? gate_at + I * D : nullptr;
      experts_backward<W>(info.form(rows),
                          slice,
                          cdata<A>(x),
                          cdata<typename W::Act>(gate_up),
                          cdata<A>(dout_acc),
                          data<A>(h),
                          data<A>(dgate_up),
                          data<typename W::Act>(result.rows),
                          {gate_at, up_at, data<A>(down_to)});
      const auto settle = [](const Tensor& to, const Tensor& from) {
        if (to.defined() && !to.is_same(from)) to.copy_(from);
      };
      settle(gate, gate_to);
      settle(down, down_to);
      settle(result.up, up_to);
    });
  });
  if (exact) add_exactly(info, x, dout_acc, h, dgate_up);
  return result;
}

class GroupedFunction : public torch::autograd::Function<GroupedFunction> {
 public:
  static Tensor forward(AutogradContext* ctx,
                        const Tensor& rows,
                        const Tensor& gate_up,
                        const Tensor& down,
                        const ExpertsInfo& info) {
    const Forward r = run_forward(rows, {gate_up, {}, down}, info);
    ctx->save_for_backward({rows, gate_up, down, r.gate_up});
    stash(ctx, info);
    return r.out;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto s = ctx->get_saved_variables();
    const Backward g = run_backward(s[0],
                                    s[3],
                                    {s[1], {}, s[2]},
                                    grads[0],
                                    stashed<ExpertsInfo>(ctx),
                                    ctx->needs_input_grad(0),
                                    ctx->needs_input_grad(1),
                                    false,
                                    ctx->needs_input_grad(2));
    return {g.rows, g.gate, g.down, {}};
  }
};

class MlpFunction : public torch::autograd::Function<MlpFunction> {
 public:
  static Tensor forward(AutogradContext* ctx,
                        const Tensor& x,
                        const Tensor& gate,
                        const Tensor& up,
                        const Tensor& down,
                        const ExpertsInfo& info) {
    const Forward r = run_forward(x, {gate, up, down}, info);
    ctx->save_for_backward({x, gate, up, down, r.gate_up});
    stash(ctx, info);
    return r.out;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto s = ctx->get_saved_variables();
    const Backward g = run_backward(s[0],
                                    s[4],
                                    {s[1], s[2], s[3]},
                                    grads[0],
                                    stashed<ExpertsInfo>(ctx),
                                    ctx->needs_input_grad(0),
                                    ctx->needs_input_grad(1),
                                    ctx->needs_input_grad(2),
                                    ctx->needs_input_grad(3));
    return {g.rows, g.gate, g.up, g.down, {}};
  }
};

class SwigluFunction : public torch::autograd::Function<SwigluFunction> {
 public:
  static Tensor forward(AutogradContext* ctx,
                        const Tensor& gate,
                        const Tensor& up,
                        const SwigluForm& form,
                        const Numerics& num) {
    const Tensor g = gate.to(num.acc()), u = up.to(num.acc()), h = at::empty_like(g);
    with_width(num, [&]<typename W>() {
      using A = typename W::Acc;
      parallel_for(0, g.numel(), kElements, [&](int64_t b, int64_t e) {
        swiglu_forward<W>(form, e - b, cdata<A>(g) + b, cdata<A>(u) + b, data<A>(h) + b);
      });
    });
    ctx->save_for_backward({gate, up});
    stash(ctx, std::make_pair(form, num));
    return h.to(num.act());
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto s = ctx->get_saved_variables();
    const auto& stash = stashed<std::pair<SwigluForm, Numerics>>(ctx);
    const SwigluForm form = stash.first;
    const Numerics& num = stash.second;
    const Tensor g = s[0].to(num.acc()), u = s[1].to(num.acc()),
                 dh = grads[0].to(num.acc()).contiguous();
    const Tensor h = at::empty_like(g), dg = at::empty_like(g), du = at::empty_like(g);
    with_width(num, [&]<typename W>() {
      using A = typename W::Acc;
      parallel_for(0, g.numel(), kElements, [&](int64_t b, int64_t e) {
        swiglu_backward<W>(form,
                           e - b,
                           cdata<A>(g) + b,
                           cdata<A>(u) + b,
                           cdata<A>(dh) + b,
                           data<A>(h) + b,
                           data<A>(dg) + b,
                           data<A>(du) + b);
      });
    });
    return {dg.to(num.act()), du.to(num.act()), {}, {}};
  }
};

ExpertsInfo make_info(const std::vector<int64_t>& offsets,
                      int64_t inner,
                      std::optional<double> limit,
                      const Numerics& num,
                      const Tensor& x,
                      const Weight& gate,
                      const Weight& up,
                      const Weight& down) {
  bool keep = x.requires_grad();
  for (const Weight* w : {&gate, &up, &down}) {
    keep = keep || (w->value.defined() && w->value.requires_grad());
    check_exact(*w, offsets.back(), num, "experts: weight");
    LOCKSTEP_CHECK(!w->value.defined() || w->sum.defined() == gate.sum.defined(),
                   kShape,
                   "experts: all weights must have exact sums or none");
  }
  const bool fixed = num.is<Switch::kGemmRows>("fixed-tiles");
  return {offsets,
          inner,
          swiglu_form(limit, num),
          fixed ? RowTiles::kFixed : RowTiles::kLibrary,
          keep && at::GradMode::is_enabled(),
          num,
          gate.sum,
          up.sum,
          down.sum,
          gate.blocks};
}

}  // namespace

Tensor clamped_swiglu(const Tensor& gate,
                      const Tensor& up,
                      std::optional<double> limit,
                      const Numerics& num) {
  if (takes_device_form(gate)) return clamped_swiglu_reference(gate, up, limit, num);
  check_swiglu(gate, up, limit, num);
  return SwigluFunction::apply(gate.contiguous(), up.contiguous(), swiglu_form(limit, num), num);
}

Tensor swiglu_mlp(const Tensor& x,
                  const Weight& gate,
                  const Weight& up,
                  const Weight& down,
                  std::optional<double> limit,
                  const Numerics& num) {
  check_mlp(x, gate.value, up.value, down.value, num);
  if (takes_device_form(x)) {
    const Tensor h = clamped_swiglu(linear(x, gate, num), linear(x, up, num), limit, num);
    return linear(h, down, num);
  }
  return MlpFunction::apply(
      x.contiguous(),
      gate.value,
      up.value,
      down.value,
      make_info({0, x.size(0)}, gate.value.size(0), limit, num, x, gate, up, down));
}

Tensor grouped_experts(const Tensor& rows,
                       const std::vector<int64_t>& offsets,
                       const Weight& gate_up,
                       const Weight& down,
                       std::optional<double> limit,
                       const Numerics& num) {
  check_grouped(rows, offsets, gate_up.value, down.value, num);
  if (takes_device_form(rows)) {
    const auto out = grouped_experts_kernel(rows, offsets, gate_up.value, down.value, limit, num);
    return out ? *out
               : grouped_experts_reference(rows, offsets, gate_up.value, down.value, limit, num);
  }
  return GroupedFunction::apply(
      rows.contiguous(),
      gate_up.value,
      down.value,
      make_info(offsets, gate_up.value.size(1) / 2, limit, num, rows, gate_up, Weight(), down));
}

}  // namespace lockstep::model
