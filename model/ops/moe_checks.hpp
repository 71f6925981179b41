// What both forms of the mixture-of-experts operators ask first.
#pragma once

#include "model/ops/moe.hpp"
#include "model/ops/moe_kernels.hpp"

namespace lockstep::model {

/// Checks the arguments of route and resolves the policy.
RouterForm check_route(const Tensor& x,
                       const Tensor& gate,
                       const Tensor& bias,
                       const Tensor& replay,
                       const RouterParams& params,
                       const Numerics& num);
/// The router matrix and the bias as used, and the logits' product, which both forms share.
Tensor router_gate(const Tensor& gate, const Numerics& num);
Tensor router_bias(const Tensor& bias, const Numerics& num);

SwigluForm swiglu_form(std::optional<double> limit, const Numerics& num);
void check_swiglu(const Tensor& gate,
                  const Tensor& up,
                  std::optional<double> limit,
                  const Numerics& num);
void check_grouped(const Tensor& rows,
                   const std::vector<int64_t>& offsets,
                   const Tensor& gate_up,
                   const Tensor& down,
                   const Numerics& num);
void check_mlp(
    const Tensor& x, const Tensor& gate, const Tensor& up, const Tensor& down, const Numerics& num);
CombineForm check_combine(const Tensor& rows,
                          const ExpertOrder& order,
                          const Tensor& weights,
                          const Numerics& num);

/// For tensors on any device: the rows of each token in expert order, ascending, [tokens, slots],
/// from ExpertOrder::slot.
Tensor ascending_places(const Tensor& slot, int64_t tokens, int64_t slots);

}  // namespace lockstep::model
