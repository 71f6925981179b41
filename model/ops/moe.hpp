// Router, grouped experts and the clamped SwiGLU they share with the dense MLP.
//
// Inside an operator everything is in acc, rounded where the policy says so; gradients are rounded
// where a bf16 tensor of the forward pass stands (gate, up, h, rows), as a bf16 graph would. All
// sums over rows run in row order; nothing depends on the number of threads. Weights with exact
// sums get one chain per block of rows instead, blocks added exactly (all weights of a call or
// none).
#pragma once

#include <optional>
#include <vector>

#include "model/base/weight.hpp"
#include "model/config/numerics.hpp"

namespace lockstep::model {

struct RouterParams {
  int64_t top_k;
  int64_t n_group = 1,
          topk_group = 1;        ///< groups of E / n_group neighbours, of which topk_group stay
  bool normalise = true;         ///< weights divided by their sum
  bool softmax_scoring = false;  ///< scores softmax(logits) instead of sigmoid(logits)
  double scaling = 1.0;
};

struct Routing {
  Tensor experts;  ///< [T, k] int64, by descending biased score, ties to the lower id
  Tensor weights;  ///< [T, k] acc, differentiable
};

/// score = sigmoid(x gate^T); choose by score + bias; weight = scaling * score / (sum + eps).
/// x [T, D] act; gate [E, D] act or acc; bias [E] acc (correction bias, only for choosing, no
/// gradient). replay [T, k] int64 or undefined: take these experts (repeats allowed) instead of
/// choosing. Group score: the sum of the group's two largest choices. numerics: D47 (operands and
/// logits; bf16: scores rounded too), D48, D49, D50, D51 (both values give the lower id), D52.
/// Throws kShape, kConfig (k, groups), kInput (replayed id outside [0, E)).
Routing route(const Tensor& x,
              const Weight& gate,
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
/// Throws kInput for an id outside [0, E).
ExpertOrder order_by_expert(const Tensor& experts, int64_t num_experts);

/// x [T, D] act in expert order: [T * k, D]. The gradient of a token is the sum over its rows in
/// ascending expert id, in acc, rounded once.
Tensor gather_rows(const Tensor& x, const ExpertOrder& order, const Numerics& num);

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

/// Dense MLP: down(swiglu(gate x, up x)). x [T, D] act; gate, up [I, D], down [D, I] act or acc.
/// Keeps x and the products of gate and up; the rest is computed again in backward. D63.
Tensor swiglu_mlp(const Tensor& x,
                  const Weight& gate,
                  const Weight& up,
                  const Weight& down,
                  std::optional<double> limit,
                  const Numerics& num);
Tensor swiglu_mlp_reference(const Tensor& x,
                            const Tensor& gate,
                            const Tensor& up,
                            const Tensor& down,
                            std::optional<double> limit,
                            const Numerics& num);

/// Each sorted row through its expert. rows [R, D] act; offsets [E + 1] (last = R; experts may be
/// empty); gate_up [E, 2I, D] (gate rows first), down [E, D, I], act or acc. Returns [R, D] act.
/// Gradients for rows, gate_up, down; an expert without rows gets zeros. Memory: R * 2I act kept, R
/// * 3I acc in passing; narrower weights are raised to acc in groups of experts, 512 MB at a time.
/// D63. Blocks of the weights are runs of sorted rows; every offset is one of their bounds.
Tensor grouped_experts(const Tensor& rows,
                       const std::vector<int64_t>& offsets,
                       const Weight& gate_up,
                       const Weight& down,
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
