// Router, grouped experts and the clamped SwiGLU they share with the dense MLP.
#pragma once

#include <optional>

#include "model/config/numerics.hpp"

namespace lockstep::model {

struct RouterParams {
  int64_t top_k, n_group = 1, topk_group = 1;
  bool normalise = true, softmax_scoring = false;
  double scaling = 1.0;
};

struct Routing {
  Tensor experts;  ///< [T, k] int64, by descending biased score, ties to the lower id
  Tensor weights;  ///< [T, k] acc, differentiable
};

/// x [T, D] act; gate [E, D]; bias [E] acc (correction bias, only for choosing). replay [T, k]
/// int64 or undefined: take these experts instead of choosing. numerics: D47-D52.
Routing route(const Tensor& x,
              const Tensor& gate,
              const Tensor& bias,
              const Tensor& replay,
              const RouterParams& params,
              const Numerics& num);
Routing route_reference(const Tensor& x,
                        const Tensor& gate,
                        const Tensor& bias,
                        const Tensor& replay,
                        const RouterParams& params,
                        const Numerics& num);

/// Rows of T tokens sorted by (expert, token): a stable counting sort.
struct ExpertOrder {
  Tensor token;                  ///< [T * k] int64: source token of each sorted row
  Tensor slot;                   ///< [T * k] int64: t * k + slot of each sorted row
  std::vector<int64_t> offsets;  ///< [E + 1] first sorted row of each expert
};
ExpertOrder order_by_expert(const Tensor& experts, int64_t num_experts);

/// act(silu(gate)) * up with gate clamped from above and up on both sides (limit empty: no clamp).
/// gate, up [R, I] act. Gradient is zero where clamped. numerics: D53, D16.
Tensor clamped_swiglu(const Tensor& gate,
                      const Tensor& up,
                      std::optional<double> limit,
                      const Numerics& num);
Tensor clamped_swiglu_reference(const Tensor& gate,
                                const Tensor& up,
                                std::optional<double> limit,
                                const Numerics& num);

/// Dense MLP: down(swiglu(gate x, up x)). gate, up [I, D], down [D, I].
Tensor swiglu_mlp(const Tensor& x,
                  const Tensor& gate,
                  const Tensor& up,
                  const Tensor& down,
                  std::optional<double> limit,
                  const Numerics& num);

/// Each sorted row through its expert. rows [R, D] act; offsets [E + 1] (last = R; experts may be
/// empty); gate_up [E, 2I, D] (gate rows first), down [E, D, I]. Returns [R, D] act. Gradients for
/// rows, gate_up, down; an expert without rows gets zeros.
Tensor grouped_experts(const Tensor& rows,
                       const std::vector<int64_t>& offsets,
                       const Tensor& gate_up,
                       const Tensor& down,
                       std::optional<double> limit,
                       const Numerics& num);
Tensor grouped_experts_reference(const Tensor& rows,
                                 const std::vector<int64_t>& offsets,
                                 const Tensor& gate_up,
                                 const Tensor& down,
                                 std::optional<double> limit,
                                 const Numerics& num);

/// y[t] = sum over the token's experts in ascending id of w * row, out [T, D] act. rows [T * k, D]
/// in `order`; weights [T, k] acc. numerics: D54, D55.
Tensor combine_experts(const Tensor& rows,
                       const ExpertOrder& order,
                       const Tensor& weights,
                       const Numerics& num);
Tensor combine_experts_reference(const Tensor& rows,
                                 const ExpertOrder& order,
                                 const Tensor& weights,
                                 const Numerics& num);

}  // namespace lockstep::model
