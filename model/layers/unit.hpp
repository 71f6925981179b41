// One unit of the model (the embedding, a layer, the head) as one node of the outer autograd graph.
#pragma once

#include <functional>

#include "model/layers/context.hpp"

namespace lockstep::model {

/// body(ctx, x) run between enter() and leave() of `unit`, with the parameters as leaves of a graph
/// of its own. In backward that graph is differentiated between enter() and leave(), the gradients
/// of the parameters go to ctx.params.add_grads() in order of first use, and the gradient of x goes
/// on. So every rank walks the units in the same order, and a scheme that gathers parameters or
/// reduces gradients has its place.
///
/// recompute: the inner graph is not kept; backward runs body again on the same inputs. Operators
/// are deterministic, so gradients are bitwise the same. A trace sees the first run only, and no
/// gradients then. body must not keep references to its locals and must give the same result again;
/// x may be undefined (the stem).
using UnitBody = std::function<Tensor(const LayerContext& ctx, const Tensor& x)>;
Tensor run_unit(
    const LayerContext& ctx, int64_t unit, const Tensor& x, bool recompute, UnitBody body);

}  // namespace lockstep::model
