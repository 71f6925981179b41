// Products whose weights may be split over ranks (tensor parallelism).
#pragma once

#include <string>

#include "model/layers/context.hpp"

namespace lockstep::model {

/// Output projection of a mixer: y [T, this rank's width] through `weight` -> whole [T, D]. The
/// weight is [D, this rank's width] where sums are split, [this rank's part of D, width] where they
/// are not.
Tensor project_out(const LayerContext& ctx,
                   const Tensor& y,
                   const Weight& weight,
                   const std::string& what);

/// Clamped SwiGLU of x (entered) with gate and up split by rows and down as in project_out. Where
/// sums are split the result is this rank's partial sum, which the caller lets leave; else it is
/// whole.
Tensor split_mlp(const LayerContext& ctx,
                 const Tensor& x,
                 const std::string& prefix,
                 const std::string& what);

}  // namespace lockstep::model
