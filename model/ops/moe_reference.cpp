// The plain form of the mixture-of-experts operators: ATen and autograd.
#include "model/ops/linear.hpp"
#include "model/ops/moe_checks.hpp"
#include "model/ops/op_support.hpp"
#include "model/ops/take_rows.hpp"

namespace lockstep::model {
namespace {

/// The k largest along the last dim, descending, ties to the lower index.
Tensor largest(const Tensor& v, int64_t k) {
  return std::get<1>(at::sort(v, /*stable=*/true, /*dim=*/-1, /*descending=*/true))
      .slice(-1, 0, k)
      .contiguous();
}

}  // namespace

Routing route_reference(const Tensor& x,
                        const Tensor& gate,
                        const Tensor& bias,
                        const Tensor& replay,
                        const RouterParams& params,
                        const Numerics& num) {
  const RouterForm form = check_route(x, gate, bias, replay, params, num);
  const int64_t T = form.tokens, E = form.experts, G = form.groups;
  Tensor logits_TE = at::matmul(x.to(num.acc()), router_gate(gate, num).t());
  if (form.round_scores) logits_TE = rounded(logits_TE, num);
  Tensor scores_TE = form.softmax ? at::softmax(logits_TE, 1) : at::sigmoid(logits_TE);
  if (form.round_scores) scores_TE = rounded(scores_TE, num);

  Tensor experts_Tk = replay.defined() ? replay.to(x.device()) : replay;
  if (!replay.defined()) {
    Tensor choice_TE = scores_TE.detach() + router_bias(bias, num);
    if (G > 1) {
      const Tensor by_group_TGe = choice_TE.reshape({T, G, E / G});
      const Tensor best =
          by_group_TGe.gather(2, largest(by_group_TGe, std::min<int64_t>(2, E / G)));
      const Tensor kept_Tg = largest(best.sum(2), form.groups_kept);
      const Tensor keep_TG =
          at::zeros({T, G}, x.options().dtype(at::kBool)).scatter(1, kept_Tg, true);
      choice_TE =
          by_group_TGe.masked_fill(~keep_TG.unsqueeze(2), -std::numeric_limits<double>::infinity())
              .reshape({T, E});
    }
    experts_Tk = largest(choice_TE, form.top_k);
  }
  const Tensor first_T1 = at::arange(T, experts_Tk.options()).mul(E).unsqueeze(1);
  Tensor weights_Tk = take_rows(scores_TE.flatten(), (experts_Tk + first_T1).flatten(), num.acc())
                          .view(experts_Tk.sizes());
  if (form.normalise) weights_Tk = weights_Tk / (weights_Tk.sum({1}, true) + form.eps);
  return {experts_Tk, weights_Tk * form.scaling};
}

Tensor clamped_swiglu_reference(const Tensor& gate,
                                const Tensor& up,
                                std::optional<double> limit,
                                const Numerics& num) {
  check_swiglu(gate, up, limit, num);
  const SwigluForm form = swiglu_form(limit, num);
  const Tensor g = gate.to(num.acc()).clamp_max(form.limit);
  const Tensor u = up.to(num.acc()).clamp(-form.limit, form.limit);
  Tensor activated;
  if (form.roundings == 3) {
    activated = rounded(g * rounded(at::sigmoid(g), num), num);
  } else {
    activated = form.divide ? g / (1 + (-g).exp()) : g * at::sigmoid(g);
    if (form.roundings == 2) activated = rounded(activated, num);
  }
  return (activated * u).to(num.act());
}

Tensor swiglu_mlp_reference(const Tensor& x,
                            const Tensor& gate,
                            const Tensor& up,
                            const Tensor& down,
                            std::optional<double> limit,
                            const Numerics& num) {
  check_mlp(x, gate, up, down, num);
  const Tensor h = clamped_swiglu_reference(
      linear_reference(x, gate, num), linear_reference(x, up, num), limit, num);
  return linear_reference(h, down, num);
}

Tensor grouped_experts_reference(const Tensor& rows,
                                 const std::vector<int64_t>& offsets,
                                 const Tensor& gate_up,
                                 const Tensor& down,
                                 std::optional<double> limit,
                                 const Numerics& num) {
  check_grouped(rows, offsets, gate_up, down, num);
  const int64_t inner = gate_up.size(1) / 2;
  const std::vector<Tensor> first = gate_up.unbind(), second = down.unbind();
  std::vector<Tensor> parts;
  for (size_t i = 0; i < first.size(); ++i) {
    const Tensor mine = rows.slice(0, offsets[i], offsets[i + 1]);
    const Tensor both = linear_reference(mine, first[i], num);
    const Tensor h = clamped_swiglu_reference(
        both.slice(1, 0, inner), both.slice(1, inner, 2 * inner), limit, num);
    parts.push_back(linear_reference(h, second[i], num));
  }
  return at::cat(parts);
}

Tensor combine_experts_reference(const Tensor& rows,
                                 const ExpertOrder& order,
                                 const Tensor& weights,
                                 const Numerics& num) {
  const CombineForm form = check_combine(rows, order, weights, num);
  const Tensor sorted_Tk = ascending_places(order.slot, form.tokens, form.slots);
  const Tensor values_R1 = weights.flatten().index_select(0, order.slot).unsqueeze(1);
  Tensor weighed_RD = rows.to(num.acc()) * values_R1;
  if (form.weigh_rounded) weighed_RD = rounded(weighed_RD, num);
  Tensor sum_TD = at::zeros({form.tokens, form.width}, weighed_RD.options());
  for (int64_t j = 0; j < form.slots; ++j) {
    sum_TD = sum_TD + weighed_RD.index_select(0, sorted_Tk.select(1, j));
    if (form.sum_rounded) sum_TD = rounded(sum_TD, num);
  }
  return sum_TD.to(num.act());
}

}  // namespace lockstep::model
