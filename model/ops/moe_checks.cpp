#include "model/ops/moe_checks.hpp"

#include <limits>

#include "model/ops/op_support.hpp"

namespace lockstep::model {
namespace {

void check_weight(const Tensor& t, at::IntArrayRef sizes, const Numerics& num, const char* what) {
  check_shape(t, sizes, what);
  check_weight_dtype(t, num, what);
}

void check_ids(const Tensor& ids, int64_t num_experts, const char* what) {
  check_dtype(ids, at::kLong, what);
  const Tensor flat = ids.cpu().contiguous();
  const int64_t* id = cdata<int64_t>(flat);
  for (int64_t i = 0; i < flat.numel(); ++i) {
    LOCKSTEP_CHECK(id[i] >= 0 && id[i] < num_experts,
                   kInput,
                   "{}: token {}, slot {} names expert {}; there are {} experts",
                   what,
                   i / ids.size(1),
                   i % ids.size(1),
                   id[i],
                   num_experts);
  }
}

}  // namespace

RouterForm check_route(const Tensor& x,
                       const Tensor& gate,
                       const Tensor& bias,
                       const Tensor& replay,
                       const RouterParams& params,
                       const Numerics& num) {
  check_shape(gate, {-1, -1}, "route: gate");
  check_weight_dtype(gate, num, "route: gate");
  const int64_t E = gate.size(0);
  check_shape(x, {-1, gate.size(1)}, "route: x");
  check_dtype(x, num.act(), "route: x");
  check_shape(bias, {E}, "route: bias");
  check_weight_dtype(bias, num, "route: bias");
  RouterForm form{};
  form.tokens = x.size(0);
  form.experts = E;
  form.top_k = params.top_k;
  const bool limited = params.n_group > 1 && num.is<Switch::kGroupLimit>("on");
  form.groups = limited ? params.n_group : 1;
  form.groups_kept = limited ? params.topk_group : 1;
  LOCKSTEP_CHECK(form.top_k >= 1 && form.top_k <= E,
                 kConfig,
                 "route: num_experts_per_tok is {}, must be in [1, {}]",
                 form.top_k,
                 E);
  LOCKSTEP_CHECK(
      E % form.groups == 0 && form.groups_kept >= 1 && form.groups_kept <= form.groups &&
          form.groups_kept * (E / form.groups) >= form.top_k,
      kConfig,
      "route: {} groups of {} experts, of which {} stay, cannot give {} experts; n_group "
      "must divide the experts and topk_group leave enough of them",
      form.groups,
      E,
      form.groups_kept,
      form.top_k);
  form.normalise = params.normalise;
  form.softmax = params.softmax_scoring;
  form.round_scores = num.rounds<Switch::kRouterLogits>("bf16");
  form.scaling = params.scaling;
  form.eps = num.is<Switch::kRouterEps>("0") ? 0.0 : 1e-20;
  if (replay.defined()) {
    check_shape(replay, {form.tokens, form.top_k}, "route: replay");
    check_ids(replay, E, "route: replay");
  }
  return form;
}

Tensor router_gate(const Tensor& gate, const Numerics& num) {
  const bool rounds = num.is_bf16() && (num.is<Switch::kRouterWeight>("bf16") ||
                                        !num.is<Switch::kRouterLogits>("fp32"));
  return param_as_used(gate, rounds, num);
}

Tensor router_bias(const Tensor& bias, const Numerics& num) {
  return param_as_used(bias.detach(), num.rounds<Switch::kRouterBias>("bf16"), num);
}

SwigluForm swiglu_form(std::optional<double> limit, const Numerics& num) {
  SwigluForm form{};
  form.limit = limit.value_or(std::numeric_limits<double>::infinity());
  form.divide = num.is<Switch::kSiluForm>("x/(1+exp(-x))");
  form.roundings = num.is<Switch::kSwigluRoundings>("3")   ? 3
                   : num.is<Switch::kSwigluRoundings>("2") ? 2
                                                           : 1;
  LOCKSTEP_CHECK(
      form.limit > 0, kConfig, "swiglu: swiglu_limit must be positive, got {}", form.limit);
  return form;
}

void check_swiglu(const Tensor& gate,
                  const Tensor& up,
                  std::optional<double>,
                  const Numerics& num) {
  check_dtype(gate, num.act(), "clamped_swiglu: gate");
  check_shape(up, gate.sizes(), "clamped_swiglu: up");
  check_dtype(up, num.act(), "clamped_swiglu: up");
}

void check_grouped(const Tensor& rows,
                   const std::vector<int64_t>& offsets,
                   const Tensor& gate_up,
                   const Tensor& down,
                   const Numerics& num) {
  check_shape(rows, {-1, -1}, "grouped_experts: rows");
  check_dtype(rows, num.act(), "grouped_experts: rows");
  check_shape(gate_up, {-1, -1, rows.size(1)}, "grouped_experts: gate_up");
  const int64_t E = gate_up.size(0);
  LOCKSTEP_CHECK(gate_up.size(1) % 2 == 0,
                 kShape,
                 "grouped_experts: gate_up must hold gate and up rows, got {}",
                 describe(gate_up));
  check_weight_dtype(gate_up, num, "grouped_experts: gate_up");
  check_weight(down, {E, rows.size(1), gate_up.size(1) / 2}, num, "grouped_experts: down");
  LOCKSTEP_CHECK(down.scalar_type() == gate_up.scalar_type(),
                 kShape,
                 "grouped_experts: gate_up and down differ in dtype, {} and {}",
                 describe(gate_up),
                 describe(down));
  bool ascending = static_cast<int64_t>(offsets.size()) == E + 1 && offsets.front() == 0 &&
                   offsets.back() == rows.size(0);
  for (size_t i = 1; ascending && i < offsets.size(); ++i) {
    ascending = offsets[i - 1] <= offsets[i];
  }
  LOCKSTEP_CHECK(
      ascending,
      kShape,
      "grouped_experts: offsets must rise from 0 to {} rows over {} experts; got {} entries "
      "ending in {}",
      rows.size(0),
      E,
      offsets.size(),
      offsets.empty() ? -1 : offsets.back());
}

void check_mlp(const Tensor& x,
               const Tensor& gate,
               const Tensor& up,
               const Tensor& down,
               const Numerics& num) {
  check_shape(x, {-1, -1}, "swiglu_mlp: x");
  check_dtype(x, num.act(), "swiglu_mlp: x");
  check_weight(gate, {-1, x.size(1)}, num, "swiglu_mlp: gate");
  check_weight(up, gate.sizes(), num, "swiglu_mlp: up");
  check_weight(down, {x.size(1), gate.size(0)}, num, "swiglu_mlp: down");
  LOCKSTEP_CHECK(gate.scalar_type() == up.scalar_type() && up.scalar_type() == down.scalar_type(),
                 kShape,
                 "swiglu_mlp: gate, up and down differ in dtype: {}, {}, {}",
                 describe(gate),
                 describe(up),
                 describe(down));
}

CombineForm check_combine(const Tensor& rows,
                          const ExpertOrder& order,
                          const Tensor& weights,
                          const Numerics& num) {
  check_shape(weights, {-1, -1}, "combine_experts: weights");
  check_dtype(weights, num.acc(), "combine_experts: weights");
  check_shape(rows, {weights.numel(), -1}, "combine_experts: rows");
  check_dtype(rows, num.act(), "combine_experts: rows");
  check_shape(order.slot, {weights.numel()}, "combine_experts: order.slot");
  check_dtype(order.slot, at::kLong, "combine_experts: order.slot");
  return {weights.size(0),
          weights.size(1),
          rows.size(1),
          num.rounds<Switch::kExpertWeighting>("per-expert"),
          num.is_bf16() && !num.is<Switch::kExpertSum>("fp32")};
}

ExpertOrder order_by_expert(const Tensor& experts, int64_t num_experts) {
  check_shape(experts, {-1, -1}, "order_by_expert: experts");
  // Counted and sorted on the host, which needs the offsets to start the products.
  const Tensor flat = experts.cpu().contiguous();
  check_ids(flat, num_experts, "order_by_expert: experts");
  const int64_t count = flat.numel(), slots = experts.size(1);
  const int64_t* id = cdata<int64_t>(flat);
  ExpertOrder order{at::empty({count}, flat.options()),
                    at::empty({count}, flat.options()),
                    std::vector<int64_t>(static_cast<size_t>(num_experts) + 1, 0)};
  for (int64_t i = 0; i < count; ++i) ++order.offsets[static_cast<size_t>(id[i]) + 1];
  for (size_t e = 1; e < order.offsets.size(); ++e) order.offsets[e] += order.offsets[e - 1];
  std::vector<int64_t> next(order.offsets.begin(), order.offsets.end() - 1);
  auto* token = data<int64_t>(order.token);
  auto* slot = data<int64_t>(order.slot);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = next[static_cast<size_t>(id[i])]++;
    token[row] = i / slots;
    slot[row] = i;
  }
  order.token = order.token.to(experts.device());
  order.slot = order.slot.to(experts.device());
  return order;
}

Tensor ascending_places(const Tensor& slot, int64_t tokens, int64_t slots) {
  const Tensor place_Tk = std::get<1>(at::sort(slot)).reshape({tokens, slots});
  return std::get<0>(at::sort(place_Tk, 1));
}

}  // namespace lockstep::model
